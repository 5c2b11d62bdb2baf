"""The changes of a segment as statements, made before the transaction that writes them, while the target works on the
segment before.

Only what can be written without reading the target is made: updates of documents whose changes are deltas
(``deltas.py``), documents that are deleted, and documents that are inserted. The rest is left to the transaction
(``writer.py``).

The statements of a collection are in the order of the documents' keys, so that those of neighbours follow each other: a
server finds the pages of a collection in its cache then, and writes fewer of them to disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from tailrace.act.sync.deltas import DeltaEncoder
from tailrace.act.sync.fold import NOT_THERE, THERE, DocumentChanges
from tailrace.act.sync.inserting import has_dollar_in_id
from tailrace.core import raw_bson
from tailrace.read.window.apply import DELETE, INSERT
from tailrace.read.window.rows import ID_HEAD

#: How many bytes of documents a command holds at most; a larger document goes alone.
_COMMAND_BYTES: Final = 8 << 20
_COMMAND_DOCUMENTS: Final = 10_000
_EMPTY_TIMESTAMP: Final = bytes(8)
#: Bytes without which no document has an empty timestamp or a name that begins with a dollar.
_SUSPECT: Final = re.compile(rb"\x11[^\x00]*\x00{9}|[\x01-\x13\x7f\xff]\$")
_NINE_ZEROS: Final = bytes(9)
#: Types of ``_id`` that a query takes for a value and nothing else.
_PLAIN_TYPES: Final = frozenset(
    (
        raw_bson.DOUBLE,
        raw_bson.STRING,
        raw_bson.BINARY,
        raw_bson.OBJECT_ID,
        raw_bson.BOOL,
        raw_bson.DATE,
        raw_bson.INT32,
        raw_bson.TIMESTAMP,
        raw_bson.INT64,
        raw_bson.DECIMAL128,
    )
)
_LIMIT: Final = raw_bson.encode_element(raw_bson.INT32, b"limit", raw_bson.encode_int32(1))
_KEY: Final = attrgetter("key")


class JoinedStatements(NamedTuple):
    """Statements, or documents, one after another, and how many they are."""

    joined: bytes
    number: int


class CollectionStatements(NamedTuple):
    """What is to be written of a collection.

    ``deletes``, ``updates``, ``inserts``   commands' worth of statements and of documents
    ``special``     documents to be inserted that an insert would not store as they are
    ``rest``        documents of which the target's own have to be read, or that are written whole
    ``size``        the bytes of the statements and documents
    """

    deletes: list[JoinedStatements]
    updates: list[JoinedStatements]
    inserts: list[JoinedStatements]
    special: list[bytes]
    rest: list[DocumentChanges]
    size: int


class SegmentStatements(NamedTuple):
    """The statements of a segment's ``documents``, by the collections' UUIDs."""

    documents: Sequence[DocumentChanges]
    collections: Mapping[bytes, CollectionStatements]


NO_STATEMENTS: Final = SegmentStatements((), {})


def segment_statements(
    documents: Sequence[DocumentChanges], encoder: DeltaEncoder, in_time: Collection[bytes]
) -> SegmentStatements:
    """The statements of documents of a target that equals the source. ``in_time``: collections whose documents stay in
    the order of their changes."""
    found = {
        uuid: collection_statements(changed if uuid in in_time else sorted(changed, key=_KEY), encoder)
        for uuid, changed in by_collection(documents).items()
    }
    return SegmentStatements(documents, found)


def by_collection(documents: Iterable[DocumentChanges]) -> dict[bytes, list[DocumentChanges]]:
    found: dict[bytes, list[DocumentChanges]] = {}
    uuid, some = b"", []
    for one in documents:
        if one.uuid != uuid:
            uuid = one.uuid
            some = found.setdefault(uuid, [])
        some.append(one)
    return found


def collection_statements(documents: Iterable[DocumentChanges], encoder: DeltaEncoder) -> CollectionStatements:
    """The statements of one collection's documents, in their order."""
    deleted: list[bytes] = []
    updates: list[bytes] = []
    inserted: list[bytes] = []
    special: list[bytes] = []
    rest: list[DocumentChanges] = []
    made = encoder.updates
    for one in documents:
        _, _, identifier, before, changes = one
        op, body, _ = changes[0]
        if before == THERE:
            if op == DELETE and len(changes) == 1:
                deleted.append(query_of(identifier))
                continue
            found = made(changes)
            if found is not None:
                query = query_of(identifier)
                updates += [raw_bson.encode_document(query, update) for update in found]
                continue
        elif before == NOT_THERE and op == INSERT and len(changes) == 1:
            (special if needs_literal(body) else inserted).append(body)
            continue
        rest.append(one)
    size = sum(map(len, updates)) + sum(map(len, inserted)) + sum(map(len, special))
    return CollectionStatements(
        list(delete_pieces(deleted)), list(pieces(updates)), list(pieces(inserted)), special, rest, size
    )


def query_of(identifier: bytes) -> bytes:
    """The element of a statement that names a document by ``_id``, which may be a document: it is never taken for
    operators. What cannot be is given as it is: a server finds it without making a plan (half the time of a small
    update on 6.0.27)."""
    size = len(identifier)
    if identifier[0] in _PLAIN_TYPES:
        return b"\x03q\0" + (size + 5).to_bytes(4, "little") + identifier + b"\0"
    return (
        b"\x03q\0"
        + (size + 15).to_bytes(4, "little")
        + b"\x03_id\0"
        + (size + 5).to_bytes(4, "little")
        + identifier[:1]
        + b"$eq\0"
        + identifier[ID_HEAD:]
        + b"\0\0"
    )


def delete_pieces(queries: Sequence[bytes]) -> Iterator[JoinedStatements]:
    """The statements that delete what ``queries`` name, each one document."""
    return pieces([raw_bson.encode_document(one, _LIMIT) for one in queries])


def pieces(statements: Sequence[bytes]) -> Iterator[JoinedStatements]:
    """Statements, or documents, as commands take them."""
    for some in chunks(statements, len, _COMMAND_BYTES):
        yield JoinedStatements(b"".join(some), len(some))


def chunks(items: Sequence[Any], size: Callable[[Any], int], most: int = _COMMAND_BYTES) -> Iterator[list[Any]]:
    """Lists of items of ``most`` bytes together, or of one item."""
    some: list[Any] = []
    total = 0
    for item in items:
        each = size(item)
        if some and (total + each > most or len(some) >= _COMMAND_DOCUMENTS):
            yield some
            some, total = [], 0
        some.append(item)
        total += each
    if some:
        yield some


def needs_literal(document: bytes) -> bool:
    """Whether an insert or a replacement would not store these bytes: the server puts its time in the place of an empty
    timestamp on top level, takes names with a dollar there for operators, and refuses them inside of ``_id``."""
    # Most have neither; looking for these is ten times as fast as the expression.
    if b"$" not in document and _NINE_ZEROS not in document:
        return False
    if _SUSPECT.search(document) is None:
        return False
    if any(one.name.startswith(b"$") or is_empty_time(document, one) for one in raw_bson.elements(document)):
        return True
    return has_dollar_in_id(document)


def is_empty_time(document: bytes, one: raw_bson.Element) -> bool:
    """Whether an element of a document is a timestamp in whose place a server puts its time."""
    return one.type == raw_bson.TIMESTAMP and one.name != b"_id" and raw_bson.value(document, one) == _EMPTY_TIMESTAMP
