"""Masks as a user declares them: rules, and where their key is. The key is read where something is masked, and never
appears in a file, option, offset or message of ours."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import bson

from tailrace.base.yaml_file import read_text, read_yaml
from tailrace.core import raw_bson
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.masking.documents import DocumentMask
from tailrace.core.masking.events import MaskSet
from tailrace.core.masking.rules import ACTIONS, MaskRules
from tailrace.core.masking.values import MaskKey
from tailrace.errors import UsageError

KEYS: Final = ("key", "rules")
#: In the text that we make for Spark's workers: of the key that they must have.
_FINGERPRINT: Final = "fingerprint"
_PLACES: Final = ("file", "environment")
_KEY_BYTES_MAX: Final = 1 << 16
_HINT: Final = "Give masks.key: {file: ./mask.key}, or {environment: TAILRACE_MASK_KEY}"


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where a key is: ``kind`` is ``file`` (``name`` is its path) or ``environment`` (that of a variable)."""

    kind: str
    name: str

    @classmethod
    def of(cls, given: object, base: Path) -> KeyPlace:
        """Check what a user has given; a path is relative to ``base``. Raises UsageError."""
        if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in _PLACES:
            raise UsageError("masks.key must say where the key is, and is never the key itself", hint=_HINT)
        ((kind, name),) = given.items()
        if not isinstance(name, str) or not name or "\0" in name or (kind == "environment" and "=" in name):
            raise UsageError(f"masks.key.{kind} must be the name of {_article(kind)}", hint=_HINT)
        return cls(kind, os.path.abspath(base / name) if kind == "file" else name)

    def read(self) -> bytes:
        """The secret. Raises UsageError."""
        if self.kind == "environment":
            found = os.environb.get(os.fsencode(self.name))
            if found is None:
                raise UsageError(
                    f"the environment variable {self.name}, which holds the key of the masks, is not set",
                    hint="Spark's workers need it too" if "SPARK_HOME" in os.environ else None,
                )
            return found.strip()
        try:
            with Path(self.name).open("rb") as opened:
                found = opened.read(_KEY_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(f"cannot read the key of the masks, {self.name}: {error.strerror}") from None
        if len(found) > _KEY_BYTES_MAX:
            raise UsageError(f"{self.name} is too long for a key")
        return found.strip()


def _article(kind: str) -> str:
    return "a file" if kind == "file" else "an environment variable"


@dataclass(frozen=True)
class Masks:
    """Masks that a user has declared. They may be pickled: the key stays where it is.

    Attributes:
        rules: which fields of which collections are dropped, hashed or tokenised
        key: where the key is; ``None`` for rules that only drop
        fingerprint: the fingerprint of the key that must be used; empty: any key
    """

    rules: MaskRules
    key: KeyPlace | None = None
    fingerprint: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Masks, (self.rules, self.key, self.fingerprint)  # without the key that was read

    def pinned(self) -> Masks:
        """The same masks, to be used only with the key that is there now."""
        return replace(self, fingerprint=self.witness.get("key", ""))

    @classmethod
    def of(cls, given: object, base: Path | str = ".") -> Masks:
        """Check a declaration, ``{"key": {"file": path}, "rules": {"shop.customers": {"email": "hash"}}}``. Raises
        UsageError that names what is wrong."""
        if not isinstance(given, Mapping):
            raise UsageError("masks must hold the keys key and rules")
        unknown = next((name for name in given if name not in KEYS), None)
        if unknown is not None:
            raise UsageError(f"unknown key 'masks.{unknown}'", hint=f"The known keys are {', '.join(KEYS)}")
        rules = MaskRules.of(given.get("rules"))
        key = given.get("key")
        if key is None and rules.needs_key:
            raise UsageError("the masks hash or tokenise, but they have no key", hint=_HINT)
        return cls(rules, None if key is None else KeyPlace.of(key, Path(base)))

    @classmethod
    def load(cls, path: Path | str) -> Masks:
        """Read the file at ``path``: YAML, JSON (``.json``) or TOML (``.toml``). It holds ``key`` and ``rules``, or a
        section ``masks`` with them, as a pipeline file does. Paths in it are relative to it. Raises UsageError."""
        file = Path(path)
        found = _read(file)
        try:
            return cls.of(found.get("masks", found) if isinstance(found, Mapping) else found, file.absolute().parent)
        except UsageError as error:
            raise UsageError(f"{file}: {error.message}", hint=error.hint) from None

    def to_json(self) -> str:
        """The declaration as text, from which ``from_json`` makes it again."""
        rules: dict[str, dict[str, str]] = {}
        for rule in self.rules.rules:
            rules.setdefault(rule.pattern, {})[b".".join(rule.path).decode()] = ACTIONS[rule.action - 1]
        key = {} if self.key is None else {"key": {self.key.kind: self.key.name}}
        pinned = {_FINGERPRINT: self.fingerprint} if self.fingerprint else {}
        return json.dumps({**key, "rules": rules, **pinned})

    @classmethod
    def from_text(cls, text: str) -> Masks:
        """The masks of an option: a declaration as JSON, or the path of a file. Raises UsageError."""
        if not text.startswith("{"):
            return cls.load(text)
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise UsageError("masks: neither the path of a file nor a declaration as JSON") from None
        fingerprint = str(document.pop(_FINGERPRINT, ""))
        return replace(cls.of(document), fingerprint=fingerprint)

    @cached_property
    def compiled(self) -> MaskSet:
        """The masks, ready for use; the key is read when they are first asked for. Raises UsageError if that fails."""
        key = None if self.key is None else MaskKey(self.key.read())
        if key is not None and self.fingerprint not in ("", key.fingerprint):
            raise UsageError(
                f"the key of the masks has changed: its fingerprint was {self.fingerprint} and is {key.fingerprint}",
                hint="Every machine needs the key that the lake was begun with",
            )
        return MaskSet(self.rules, key)

    @property
    def witness(self) -> dict[str, str]:
        """The rules' digest and the key's fingerprint."""
        return self.compiled.witness

    def of_collection(self, namespace: str) -> DocumentMask | None:
        """The masks of a collection; ``None`` if it has none."""
        return self.compiled.of(namespace)

    def event(self, event: bytes) -> bytes:
        """A change event (BSON), masked. Raises MaskRefusedError if a rule reaches a value that cannot be masked."""
        return self.compiled.event(event)

    def quarantined(self, aside: QuarantinedEvent) -> QuarantinedEvent:
        """An event that was put aside, masked."""
        return self.compiled.quarantined(aside)

    def revealed(self, token: str) -> Any:
        """The value that a token stands for, as PyMongo decodes it. Raises UsageError if it is not a token of this
        key."""
        if self.key is None:
            raise UsageError("these masks have no key, so they have made no tokens")
        kind, value = MaskKey(self.key.read()).revealed(token)
        return bson.decode(raw_bson.encode_document(raw_bson.encode_element(kind, b"", value)))[""]


def _read(file: Path) -> Any:
    if file.suffix in {".json", ".toml"}:
        text = read_text(file, "declaration of masks")
        try:
            if file.suffix == ".toml":
                return tomllib.loads(text)
            return json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not {file.suffix[1:].upper()}: {error}") from None
    try:
        return read_yaml(file, "declaration of masks")
    except ImportError:
        raise UsageError(
            f"reading {file} needs the package pyyaml",
            hint="Install it: pip install 'tailrace[masks]'; or write the declaration as .json or .toml",
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key '{name}' is given twice")
        found[name] = value
    return found
