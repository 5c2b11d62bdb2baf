"""Two deployments compared with plain PyMongo: documents, catalogue and indexes, byte for byte.

The oracle of every test of ``tailrace sync``: nothing of the product's own reading, copying or verifying is used here.
Nobody may write meanwhile, unless documents are read at a given time (``documents(..., at=...)``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument,
    unicode_decode_error_handler="replace",
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
_SERVERS_OWN: Final = ("admin", "config", "local")
#: How many differences are named for each namespace; the rest are counted.
_NAMED_MAX: Final = 5
Selected = Callable[[str], bool]
Renames = Mapping[str, str]


@dataclass(frozen=True)
class Held:
    """What a deployment holds under a name. ``documents`` are in natural order; those of a view are not read."""

    kind: str
    options: bytes
    uuid: bytes | None = None
    id_index: bytes = b""
    indexes: Mapping[str, bytes] = field(default_factory=dict)
    documents: tuple[bytes, ...] = ()

    @property
    def is_capped(self) -> bool:
        """Whether the order of its documents matters."""
        return bool(RawBSONDocument(self.options, RAW).get("capped"))


def held(uri: str, *, but: Iterable[str] = (), selected: Selected = lambda _: True) -> dict[str, Held]:
    """Everything that the members at ``uri`` hold, by namespace, without the databases ``but``."""
    left_out = {*_SERVERS_OWN, *but}
    found: dict[str, Held] = {}
    with MongoClient[Any](uri) as client:
        named = client.admin.command({"listDatabases": 1, "nameOnly": True})["databases"]
        for database in (one["name"] for one in named if one["name"] not in left_out):
            for one in _all(client, database, {"listCollections": 1}):
                name = one["name"]
                if selected(f"{database}.{name}") and name != "system.views":  # its contents are the views
                    found[f"{database}.{name}"] = _held(client, database, name, one)
    return found


def _held(client: MongoClient[Any], database: str, name: str, listed: RawBSONDocument) -> Held:
    kind, options = listed["type"], _raw(listed, "options")
    if kind != "collection":
        return Held(kind, options)
    indexes = {one["name"]: bytes(one.raw) for one in _all(client, database, {"listIndexes": name})}
    uuid = bytes(listed["info"]["uuid"])
    found = tuple(documents(client, database, name))
    return Held(kind, options, uuid, _raw(listed, "idIndex"), indexes, found)


def documents(client: MongoClient[Any], database: str, name: str, *, at: Timestamp | None = None) -> Iterator[bytes]:
    """The documents of the collection with this name or UUID, in natural order; with ``at``, as they were then (from
    5.0)."""
    command: dict[str, Any] = {"find": name, "hint": {"$natural": 1}}
    if at is not None:
        command["readConcern"] = {"level": "snapshot", "atClusterTime": at}
    for one in _all(client, database, command):
        yield bytes(one.raw)


def _all(client: MongoClient[Any], database: str, command: Mapping[str, Any]) -> Iterator[RawBSONDocument]:
    """The documents of a cursor. It uses commands, since a driver makes no object for some of the names."""
    there = client.get_database(database)
    with client.start_session() as session:
        reply = there.command({**command}, codec_options=RAW, session=session)
        batch = reply["cursor"]["firstBatch"]
        while True:
            yield from batch
            cursor = reply["cursor"]["id"]
            if not cursor:
                return
            collection = reply["cursor"]["ns"].partition(".")[2]
            more = {"getMore": cursor, "collection": collection}
            reply = there.command(more, codec_options=RAW, session=session)
            batch = reply["cursor"]["nextBatch"]


def _raw(document: RawBSONDocument, name: str) -> bytes:
    value = document.get(name)
    return b"" if value is None else bytes(value.raw)


def differences(
    source: Mapping[str, Held],
    target: Mapping[str, Held],
    *,
    renames: Renames | None = None,
    uuids: bool = True,
    known: Callable[[str, bytes], bytes] = lambda _, one: one,
) -> list[str]:
    """The differences, each in a sentence. ``known`` removes from ``options`` or an ``index`` what a newer server
    writes differently by itself."""
    named = {renamed(namespace, renames or {}): one for namespace, one in source.items()}
    found = [f"{namespace}: missing" for namespace in sorted(named.keys() - target.keys())]
    found += [f"{namespace}: nobody wrote it" for namespace in sorted(target.keys() - named.keys())]
    for namespace in sorted(named.keys() & target.keys()):
        left, right = named[namespace], target[namespace]
        found += [f"{namespace}: {one}" for one in _of_catalogue(left, right, uuids, known)]
        found += [f"{namespace}: {one}" for one in of_documents(left.documents, right.documents, left.is_capped)]
    return found


def renamed(namespace: str, renames: Renames) -> str:
    """The name on the target, of the namespace or of its database."""
    database, _, collection = namespace.partition(".")
    if namespace in renames:
        return renames[namespace]
    return f"{renames[database]}.{collection}" if database in renames else namespace


def _of_catalogue(left: Held, right: Held, uuids: bool, known: Callable[[str, bytes], bytes]) -> Iterator[str]:
    if left.kind != right.kind:
        yield f"a {left.kind} became a {right.kind}"
    if known("options", left.options) != known("options", right.options):
        yield f"options {_shown(left.options)} became {_shown(right.options)}"
    if uuids and left.uuid != right.uuid:
        yield "another UUID"
    if known("index", left.id_index) != known("index", right.id_index):
        yield f"the index of _id {_shown(left.id_index)} became {_shown(right.id_index)}"
    for name in sorted(left.indexes.keys() | right.indexes.keys()):
        before, after = left.indexes.get(name, b""), right.indexes.get(name, b"")
        if known("index", before) != known("index", after):
            yield f"index {name}: {_shown(before)} became {_shown(after)}"


def of_documents(left: Iterable[bytes], right: Iterable[bytes], ordered: bool = False) -> list[str]:
    """How the documents of two collections differ."""
    before, after = list(left), list(right)
    found = [f"{count} times: _id {_id_shown(key)}" for key, count in _counted(after).items() if count > 1]
    mine, theirs = {id_of(one): one for one in before}, {id_of(one): one for one in after}
    found += [f"lost: _id {_id_shown(key)}" for key in mine.keys() - theirs.keys()]
    found += [f"too much: _id {_id_shown(key)}" for key in theirs.keys() - mine.keys()]
    unlike = [key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]]
    found += [f"_id {_id_shown(key)}: {_shown(mine[key])} became {_shown(theirs[key])}" for key in unlike]
    if ordered and not found and before != after:
        found.append("in another order")
    if len(found) > _NAMED_MAX:
        found[_NAMED_MAX:] = [f"and {len(found) - _NAMED_MAX} more"]
    return found


def _counted(found: Iterable[bytes]) -> Counter[bytes]:
    return Counter(map(id_of, found))


def id_of(document: bytes) -> bytes:
    """The first element ``_id``: its type and its value. The whole document if it has none."""
    place = 4
    while document[place]:
        end = document.index(b"\0", place + 1)
        size = _size(document, document[place], end + 1)
        if document[place + 1 : end] == b"_id":
            return document[place : place + 1] + document[end + 1 : end + 1 + size]
        place = end + 1 + size
    return document


_FIXED: Final = {
    0x01: 8, 0x06: 0, 0x07: 12, 0x08: 1, 0x09: 8, 0x0A: 0, 0x10: 4, 0x11: 8, 0x12: 8, 0x13: 16, 0x7F: 0, 0xFF: 0,
}  # fmt: skip


def _size(document: bytes, type_: int, place: int) -> int:
    """How long a value is (https://bsonspec.org)."""
    if type_ in _FIXED:
        return _FIXED[type_]
    if type_ == 0x0B:  # a pattern and its options, each ended by a zero
        return document.index(b"\0", document.index(b"\0", place) + 1) + 1 - place
    length = int.from_bytes(document[place : place + 4], "little")
    return length + {0x03: 0, 0x04: 0, 0x0F: 0, 0x02: 4, 0x0D: 4, 0x0E: 4, 0x05: 5, 0x0C: 16}[type_]


def _shown(raw: bytes) -> str:
    text = raw.hex() if not raw else repr(bson.decode(raw, RAW.with_options(document_class=dict)))  # type: ignore[arg-type]
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]} ({len(raw)} bytes)"


def _id_shown(key: bytes) -> str:
    """The value of an ``_id`` as Python sees it."""
    whole = key[:1] + b"_id\0" + key[1:] + b"\0"
    try:
        return repr(bson.decode((len(whole) + 4).to_bytes(4, "little") + whole)["_id"])
    except bson.errors.BSONError:
        return key.hex()
