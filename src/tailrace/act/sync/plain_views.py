"""Views for a user who may not touch ``system.views``: by the commands that make, change and drop a view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.act.sync.commands import TargetCommands
from tailrace.act.sync.target import answered
from tailrace.core import raw_bson
from tailrace.core.raw_bson import encode_document, encode_element

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
_OPTIONS: Final = (b"viewOn", b"pipeline", b"collation")


def listed_view(commands: TargetCommands, namespace: str) -> bytes | None:
    """The document that ``system.views`` has of a view, from what the server lists; ``None`` where there is none."""
    database, _, name = namespace.partition(".")
    found = _listed(commands, database, {"type": "view", "name": name}).get(name)
    if found is None:
        return None
    own = encode_element(raw_bson.STRING, b"_id", raw_bson.encode_string(namespace))
    return encode_document(own, raw_bson.bytes_of(found)[4:-1])


def write_view(commands: TargetCommands, namespace: str, body: bytes | None) -> None:
    """Make a view what ``body`` says about it, a document of ``system.views``; ``None``: drop it. It may be done
    twice."""
    database, _, name = namespace.partition(".")
    there = listed_view(commands, namespace)
    if body is None:
        if there is not None:
            commands.command(database, {"drop": name}, f"drop {namespace}")
        return
    wanted = RawBSONDocument(body, _RAW)
    options = {one.decode(): wanted[one.decode()] for one in _OPTIONS if one.decode() in wanted}
    verb = "create" if there is None else "collMod"
    if there is not None:
        options.pop("collation", None)  # which never changes
    commands.command(database, {verb: name, **options}, f"define the view {namespace}")


def view_names(commands: TargetCommands, database: str) -> list[str]:
    """The namespaces of the views of a database."""
    return [f"{database}.{name}" for name in _listed(commands, database, {"type": "view"})]


def drop_views(commands: TargetCommands, database: str, has: Callable[[str], bool]) -> None:
    """Drop those views of a database that ``has`` says are of this sync."""
    for namespace in filter(has, view_names(commands, database)):
        commands.command(database, {"drop": namespace.partition(".")[2]}, f"drop {namespace}")


def _listed(commands: TargetCommands, database: str, query: Mapping[str, Any]) -> dict[str, RawBSONDocument]:
    """The options of the views that a query finds, by name."""
    command = {"listCollections": 1, "filter": dict(query)}

    def ask() -> dict[str, RawBSONDocument]:
        with commands.client.get_database(database).cursor_command(command, codec_options=_RAW) as cursor:
            return {str(one["name"]): one["options"] for one in cursor}

    return answered(f"list the views of {database}", ask, check=commands.ownership.check)
