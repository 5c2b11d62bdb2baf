"""Which Iceberg catalogue shows the tables, as a user names it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from tailrace.errors import UsageError
from tailrace.lake.store.place import TablePlace

#: The catalogues that are tested.
TYPES: Final = ("rest", "sql")
_DEFAULT: Final = "tailrace"
_SCHEMES: Final = {"http": "rest", "https": "rest"}
_SQL: Final = ("sqlite", "postgresql")
_HINT: Final = "Give the URI of a catalogue (sqlite:///FILE, https://HOST), or its name in .pyiceberg.yaml"


@dataclass(frozen=True)
class IcebergSettings:
    """A catalogue of pyiceberg.

    Attributes:
        name: its name, under which pyiceberg finds more properties (``.pyiceberg.yaml``, ``PYICEBERG_CATALOG__...``)
        properties: pyiceberg's properties of the catalogue. They may hold passwords, so they are never shown
    """

    name: str = _DEFAULT
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, given: object, where: str) -> IcebergSettings:
        """From a URI, a name or a mapping of properties with ``name``. Raises UsageError, which begins with
        ``where``."""
        if isinstance(given, str) and given:
            return cls(properties=_with_type({"uri": given}, where)) if "://" in given else cls(name=given)
        if not isinstance(given, Mapping) or not given:
            raise UsageError(f"{where} must name an Iceberg catalogue", hint=_HINT)
        wrong = next((key for key, value in given.items() if not isinstance(value, (str, int, bool))), None)
        if wrong is not None or not all(isinstance(key, str) for key in given):
            raise UsageError(f"{where} must map pyiceberg's properties to texts")
        texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in given.items()}
        name = texts.pop("name", _DEFAULT)
        return cls(name, _with_type(texts, where) if "uri" in texts else texts)

    def to_text(self) -> str:
        """As one text, for an option of Spark. It may hold passwords."""
        return json.dumps({"name": self.name, "properties": dict(self.properties)})

    @classmethod
    def from_text(cls, text: str) -> IcebergSettings:
        """From ``to_text``."""
        value = json.loads(text)
        return cls(value["name"], value["properties"])


def check_place(root: TablePlace, what: str = "tables") -> None:
    """Raises UsageError where Iceberg's readers cannot find the files of tables, or of ``what``."""
    if not isinstance(root, Path):
        if not str(root).startswith("s3://"):
            where = "Google Cloud Storage" if str(root).startswith("gs://") else "Azure"
            why = "This is not tested" if where != "Azure" else "Iceberg's readers disagree on URIs"
            raise UsageError(
                f"{what} in {where} cannot have Iceberg snapshots: {root}",
                hint=f"{why} there. Use s3:// or a disk, or leave out iceberg",
            )
        return
    path = str(root.absolute())
    if root.absolute().as_uri() != f"file://{path}":
        raise UsageError(
            f"{what} with Iceberg snapshots must have a path of plain ASCII, without blanks and without # ? %: {path}",
            hint="Iceberg's readers disagree on escapes in a path",
        )


def _with_type(properties: Mapping[str, str], where: str) -> dict[str, str]:
    """The properties with the type that the URI says."""
    uri = properties["uri"]
    scheme = re.split(r"[+:]", uri, maxsplit=1)[0]
    found = _SCHEMES.get(scheme, "sql" if scheme in _SQL else "")
    type_ = properties.get("type", found)
    if type_ not in TYPES or (found and found != type_):
        raise UsageError(f"{where}: a catalogue of this kind is not supported ({scheme})", hint=_HINT)
    if type_ == "rest" and not urlsplit(uri).hostname:
        raise UsageError(f"{where}: the catalogue's URI has no host", hint=_HINT)
    return {**properties, "type": type_}


def texts_of(properties: Mapping[str, Any]) -> list[str]:
    """The values of properties that must not be shown, longest first: all but those that only name something."""
    shown = {"type", "warehouse", "prefix", "py-io-impl"}
    found = {str(value) for key, value in properties.items() if key not in shown and len(str(value)) > 3}
    for value in list(found):
        if "@" in value and "://" in value:
            user, _, password = value.split("://", 1)[1].rpartition("@")[0].partition(":")
            found |= {password or user, unquote(password or user)}  # drivers show it as the server gets it
    if ":" in (credential := str(properties.get("credential", ""))):  # CLIENT:SECRET, of which the server gets parts
        found.add(credential.partition(":")[2])
    found.discard("")
    return sorted(found, key=len, reverse=True)
