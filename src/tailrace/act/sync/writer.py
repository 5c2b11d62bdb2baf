"""A segment written to the target: final documents, as raw commands of one transaction.

Of a document whose first change is a delta, and of every one as long as the copy may be newer than the changes, the
target's own is read in the same transaction. Then it is known what is there, and each write says what it expects: a
count that differs is an error, since the target is then not what the sync has written.

Where every change of a document is a delta that the target can carry out (``deltas.py``), nothing is read: the target
equals the source at the position, so the document is the one that the delta was made for.

A unique index may be in the way of one order of writes and not of another. The first try deletes, replaces and inserts.
If the server refuses that (11000), the transaction is done again and takes all documents of the collection's segment
out before it puts any in: what remains is a part of a state that the source had, so nothing can be in the way. If it
refuses deltas, the transaction is done again with whole documents.

While the copy may be newer than the changes, one thing can be in the way all the same: a document that was copied
later, with an ``_id`` that is another's by the collation of its collection ("a" and "A"). The source did not have it at
the time of the changes, so a later change inserts it, and it is taken out.

Of a collection that is sharded on the target every document is read, since a statement has to name its shard key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure

from tailrace.act.sync.deltas import DELTA, DeltaEncoder
from tailrace.act.sync.fold import NOT_THERE, THERE, DocumentChanges
from tailrace.act.sync.inserting import RawDocuments, has_dollar_in_id
from tailrace.act.sync.shard_keys import key_elements
from tailrace.act.sync.state import SyncedCollection
from tailrace.act.sync.target import REPLIES, is_worth_again
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.printable import in_a_line
from tailrace.errors import TailraceError
from tailrace.read.source.connection import collection_of
from tailrace.read.window.apply import DELETE, DELETE_OF, UPDATE, DocumentWork, apply_all
from tailrace.read.window.rows import ID_HEAD
from tailrace.read.window.sortable_key import sortable_key

DUPLICATE_KEY: Final = 11000
#: From here on updates take names with a dollar as inserts do.
NAMES_SINCE: Final = (5, 0)
#: A command holds so many bytes of documents at most, or one document.
_COMMAND_BYTES: Final = 8 << 20
_COMMAND_DOCUMENTS: Final = 10_000
#: A statement that replaces a larger document may not fit a message, beside the query.
_REPLACED_MAX: Final = (16 << 20) - (64 << 10)
#: So many documents are read at a time at first, and so many bytes of them are in memory if they are even.
_READ_FIRST, _READ_MOST, _READ_BYTES = 64, 4_000, 16 << 20
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
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
ANEW: Final = "drop the collections on the target, remove the sync's state, and begin it again"


class TargetMismatchError(TailraceError):
    """The target does not hold what the sync has written: somebody else writes there too."""


#: How the documents of a collection are written: by what changed of them, if that can be; whole; or whole, and all are
#: deleted before any is inserted.
BY_DELTAS, WHOLE, ANEW_WHOLE = 0, 1, 2


class OtherWayError(Exception):
    """The server refused a write of ``uuid``'s collection: the transaction is to be done again, and this collection
    written the ``way``."""

    def __init__(self, uuid: bytes, way: int, error: OperationFailure) -> None:
        super().__init__(str(error))
        self.uuid = uuid
        self.way = way


@dataclass(frozen=True, slots=True)
class _Held:
    """A collection of the target, as ``read.window.apply`` wants it."""

    namespace: str
    copied: int
    holder: str = "the target"
    anew: str = f"Somebody else has written to the target. To begin anew, {ANEW}"


class _Writes(NamedTuple):
    """What is to be deleted, by the elements that name it in a statement; the statements that update; what is
    inserted."""

    deleted: list[bytes]
    updates: list[bytes]
    inserted: list[bytes]


class ChangesWriter:
    """Writes the documents of segments to the target that ``client`` leads to.

    ``hold``     up to this time the copy may hold later changes
    ``version``  the target's
    ``encoder``  makes updates of deltas
    ``keys``     the shard keys of the target's collections, by UUID there
    """

    def __init__(
        self,
        client: MongoClient[Any],
        hold: ClusterTime,
        version: tuple[int, int],
        encoder: DeltaEncoder,
        keys: Mapping[bytes, Mapping[str, Any]] = {},
    ) -> None:
        self._keys = keys
        self._client = client
        self._hold = hold
        self._version = version
        self._encoder = encoder
        self.written_bytes = 0

    def write(
        self,
        session: ClientSession,
        documents: Sequence[DocumentChanges],
        collections: Mapping[bytes, SyncedCollection],
        *,
        tolerant: bool,
        ways: Mapping[bytes, int],
    ) -> None:
        """Write what the documents are after their changes. ``tolerant``: the target may hold later changes. ``ways``:
        how the documents of a collection are written, if not by deltas. Raises TargetMismatchError, OtherWayError,
        PyMongoError."""
        self.written_bytes = 0
        by_collection: dict[bytes, list[DocumentChanges]] = {}
        for one in documents:
            if one.uuid in collections:
                by_collection.setdefault(one.uuid, []).append(one)
        for uuid, changed in by_collection.items():
            collection, way = collections[uuid], ways.get(uuid, BY_DELTAS)
            key = tuple(self._keys.get(collection.target_uuid, ()))
            encoder = None if tolerant or key or way != BY_DELTAS else self._encoder
            table = _Table(self._client, session, collection, int(self._hold), encoder, tolerant=tolerant, key=key)
            table.checks_names = self._version < NAMES_SINCE
            try:
                table.write(changed, anew=way == ANEW_WHOLE)
            except OperationFailure as error:
                if error.code == DUPLICATE_KEY and way != ANEW_WHOLE:
                    raise OtherWayError(uuid, ANEW_WHOLE, error) from None
                if table.has_deltas and not is_worth_again(error):
                    raise OtherWayError(uuid, WHOLE, error) from None
                if error.code == DUPLICATE_KEY and " _id_ dup key" in str(error):
                    raise TargetMismatchError(
                        f"a document is already on the target: {error}",
                        hint="Two shards hold documents with the same _id, which a replica set cannot; or somebody "
                        f"else has written to the target. To begin anew, {ANEW}",
                    ) from None
                raise
            self.written_bytes += table.written


class _Table:
    """One collection of the target in a transaction."""

    def __init__(
        self,
        client: MongoClient[Any],
        session: ClientSession,
        collection: SyncedCollection,
        hold: int,
        encoder: DeltaEncoder | None,
        *,
        tolerant: bool,
        key: tuple[str, ...],
    ) -> None:
        database, _, self._name = collection.target.partition(".")
        self._database = client.get_database(database, codec_options=_RAW)
        self._session = session
        self._held = _Held(collection.target, hold)
        self._tolerant = tolerant
        self._encoder = encoder
        #: The paths of its shard key; empty: it is not sharded.
        self._key = key
        #: Whether updates refuse names with a dollar, which an insert takes.
        self.checks_names = False
        #: Whether anything was written by deltas.
        self.has_deltas = False
        self.written = 0
        self._keys_written: frozenset[bytes] = frozenset()
        #: By their elements, documents whose ``_id`` the collection's collation takes for that of one that is written.
        self._equals: dict[bytes, None] = {}

    def write(self, documents: Sequence[DocumentChanges], *, anew: bool) -> None:
        waiting: list[bytes] = []  # what is inserted after everything else
        self._keys_written = frozenset(one.key for one in documents) if anew and self._tolerant else frozenset()
        for part in self._parts(documents):
            todo = _Writes([], [], [])
            works = self._works([one for one in part if not self._by_deltas(one, todo)])
            apply_all([work for _, work in works])
            for one, work in works:
                self._sort(one, work, todo, anew=anew)
            todo.deleted.extend(map(_query, self._equals))
            self._equals.clear()
            self._delete(todo.deleted)
            self._update(todo.updates)
            self.written += sum(map(len, todo.inserted)) + sum(map(len, todo.updates))
            if anew:
                waiting += todo.inserted
            else:
                self._insert(todo.inserted)
        self._insert(waiting)

    def _by_deltas(self, one: DocumentChanges, todo: _Writes) -> bool:
        """Whether the changes are written by updates that say what changes, which are added to ``todo`` then."""
        if self._encoder is None or one.before != THERE:
            return False
        updates = self._encoder.updates(one.changes)
        if updates is None:
            return False
        self.has_deltas = True
        query = _query(one.identifier)
        todo.updates.extend(raw_bson.encode_document(query, update) for update in updates)
        return True

    def _parts(self, documents: Sequence[DocumentChanges]) -> Iterator[Sequence[DocumentChanges]]:
        """The documents in parts whose current state fits in memory, by the sizes of those before."""
        at, count = 0, _READ_FIRST
        while at < len(documents):
            before = self.written
            part = documents[at : at + count]
            yield part
            at += len(part)
            each = max(1, (self.written - before) // len(part))
            count = max(1, min(_READ_MOST, _READ_BYTES // each, count * 4))

    def _works(self, documents: Sequence[DocumentChanges]) -> list[tuple[DocumentChanges, DocumentWork[_Held]]]:
        wanted = [one for one in documents if self._needs(one)]
        held = self._read(wanted)
        return [(one, DocumentWork(self._held, one.key, held.get(one.key), one.changes)) for one in documents]

    def _needs(self, one: DocumentChanges) -> bool:
        """Whether the target's document has to be read."""
        op, body, _ = one.changes[0]
        if self._key or self._tolerant or one.before not in (THERE, NOT_THERE) or op == DELETE_OF:
            return True
        return op == UPDATE and (body[4:18] == DELTA or _is_modifier(body))

    def _sort(self, one: DocumentChanges, work: DocumentWork[_Held], todo: _Writes, *, anew: bool) -> None:
        """What has to be done for a document to be ``work.document``."""
        after = work.document
        if work.held is not None:
            if self._key and one.before == NOT_THERE and not self._tolerant:
                raise self._mismatch(
                    one, "is already on the target: the source has two of that _id, or somebody wrote it"
                )
            before = _identifier(work.held)
        elif self._needs(one):
            if one.before == THERE and not self._tolerant and one.changes[0][0] not in (DELETE_OF,):
                raise self._mismatch(one, "is not on the target")
            before = None
        else:
            before = one.identifier if one.before == THERE else None
        if after == work.held and after is not None and not anew:
            return
        if before is not None and (after is None or anew or self._is_inserted_anew(before, after, work.held)):
            todo.deleted.append(self._named(before, work.held))
            before = None
        if after is None:
            return
        if before is None:
            todo.inserted.append(after)
        else:
            todo.updates.append(raw_bson.encode_document(self._named(before, after), _update(after)))

    def _is_inserted_anew(self, before: bytes, after: bytes, held: bytes | None) -> bool:
        """Whether a replacement would not do: the type of ``_id`` or the shard key has changed, the statement would be
        too large, or the server refuses names in it that it takes in an insert."""
        if self._key and held is not None and key_elements(held, self._key) != key_elements(after, self._key):
            return True
        return _identifier(after) != before or len(after) > _REPLACED_MAX or self._strange(after)

    def _named(self, identifier: bytes, document: bytes | None) -> bytes:
        """The element of a statement that names a document: by ``_id``, and by the shard key that ``document`` has."""
        if not self._key or document is None:
            return _query(identifier)
        equals = raw_bson.encode_document(
            raw_bson.encode_element(identifier[0], b"$eq", identifier[ID_HEAD:]),
        )
        own = raw_bson.encode_element(raw_bson.OBJECT, b"_id", equals)
        whole = raw_bson.encode_document(own, key_elements(document, self._key))
        return raw_bson.encode_element(raw_bson.OBJECT, b"q", whole)

    # -- commands ---------------------------------------------------------------------------------------------------

    def _read(self, documents: Sequence[DocumentChanges]) -> dict[bytes, bytes]:
        """The target's documents, by sortable key."""
        found: dict[bytes, bytes] = {}
        if not documents:
            return found
        asked = {one.key for one in documents}
        values = [one.identifier for one in documents]
        there = collection_of(self._database, self._name)
        for some in _chunks(values, len, _COMMAND_BYTES):
            names = (
                raw_bson.encode_element(value[0], b"%d" % number, value[ID_HEAD:]) for number, value in enumerate(some)
            )
            among = raw_bson.encode_element(raw_bson.ARRAY, b"$in", raw_bson.encode_document(*names))
            query = raw_bson.encode_document(
                raw_bson.encode_element(raw_bson.OBJECT, b"_id", raw_bson.encode_document(among))
            )
            batches = there.find_raw_batches(RawBSONDocument(query), session=self._session)
            for raw in (document for batch in batches for document in raw_bson.split(batch)):
                element = _identifier(raw)
                key = sortable_key(element[0], element[ID_HEAD:])
                if key in asked and found.setdefault(key, raw) is not raw:
                    raise TargetMismatchError(
                        f"{in_a_line(self._held.namespace)} has two documents with the same _id on the target",
                        hint="The source has two of them on two shards: give each another _id, or leave the collection "
                        f"out. To begin anew, {ANEW}",
                    )
                if self._keys_written and key not in self._keys_written:
                    self._equals[element] = None
        return found

    def _delete(self, queries: Sequence[bytes]) -> None:
        for some in _chunks(queries, len, _COMMAND_BYTES):
            statements = b"".join(raw_bson.encode_document(one, _LIMIT) for one in some)
            self._send({"delete": self._name, "deletes": [RawDocuments(statements)]}, len(some), "delete")

    def _update(self, statements: Sequence[bytes]) -> None:
        for some in _chunks(statements, len, _COMMAND_BYTES):
            command = {"update": self._name, "updates": [RawDocuments(b"".join(some))], **_BYPASS}
            self._send(command, len(some), "update")

    def _insert(self, documents: Sequence[bytes]) -> None:
        plain = [one for one in documents if not needs_literal(one)]
        for some in _chunks(plain, len, _COMMAND_BYTES):
            self._send(
                {"insert": self._name, "documents": [RawDocuments(b"".join(some))], **_BYPASS}, len(some), "insert"
            )
        if len(plain) == len(documents):
            return
        for one in documents:
            if needs_literal(one) and self._strange(one):
                self._insert_strange(one)
            elif needs_literal(one):
                statement = raw_bson.encode_document(self._named(_identifier(one), one), _update(one), _UPSERT)
                self._send({"update": self._name, "updates": [RawDocuments(statement)], **_BYPASS}, 1, "insert")

    def _strange(self, document: bytes) -> bool:
        """Whether an update may refuse a name in a document, though an insert takes it."""
        return self.checks_names and b"$" in document

    def _insert_strange(self, document: bytes) -> None:
        """Insert it, and put the empty timestamps into it afterwards."""
        empty = [document[one.start : one.end] for one in raw_bson.elements(document) if _is_empty_time(document, one)]
        change = raw_bson.encode_element(raw_bson.OBJECT, b"$set", raw_bson.encode_document(*empty))
        statement = raw_bson.encode_document(
            self._named(_identifier(document), document),
            raw_bson.encode_element(raw_bson.OBJECT, b"u", raw_bson.encode_document(change)),
        )
        self._send({"insert": self._name, "documents": [RawDocuments(document)], **_BYPASS}, 1, "insert")
        if empty:
            self._send({"update": self._name, "updates": [RawDocuments(statement)], **_BYPASS}, 1, "insert")

    def _send(self, command: dict[str, Any], expected: int, what: str) -> None:
        reply = self._database.command(command, session=self._session, codec_options=REPLIES)
        errors = reply.get("writeErrors")
        if errors:
            first = errors[0]
            labels = {"errorLabels": reply.get("errorLabels", [])}
            raise OperationFailure(str(first.get("errmsg", first)), first.get("code"), {**first, **labels})
        if reply.get("n") != expected:
            raise TargetMismatchError(
                f"of {expected} documents of {in_a_line(self._held.namespace)} on the target, the sync could {what} "
                f"only {reply.get('n')}",
                hint=self._held.anew,
            )

    def _mismatch(self, one: DocumentChanges, what: str) -> TargetMismatchError:
        return TargetMismatchError(
            f"a document of {in_a_line(self._held.namespace)} (key {one.key.hex()[:80]}) {what}",
            hint=self._held.anew,
        )


_BYPASS: Final = {"ordered": True, "bypassDocumentValidation": True}
_LIMIT: Final = raw_bson.encode_element(raw_bson.INT32, b"limit", raw_bson.encode_int32(1))
_UPSERT: Final = raw_bson.encode_element(raw_bson.BOOL, b"upsert", b"\x01")


def needs_literal(document: bytes) -> bool:
    """Whether an insert or a replacement would not store these bytes: the server puts its time in the place of an empty
    timestamp on top level, takes names with a dollar there for operators, and refuses them inside of ``_id``."""
    # Most have neither; looking for these is ten times as fast as the expression.
    if b"$" not in document and _NINE_ZEROS not in document:
        return False
    if _SUSPECT.search(document) is None:
        return False
    if any(one.name.startswith(b"$") or _is_empty_time(document, one) for one in raw_bson.elements(document)):
        return True
    return has_dollar_in_id(document)


def _is_empty_time(document: bytes, one: raw_bson.Element) -> bool:
    return one.type == raw_bson.TIMESTAMP and one.name != b"_id" and raw_bson.value(document, one) == _EMPTY_TIMESTAMP


def _update(document: bytes) -> bytes:
    """The element of a statement that replaces a document: by itself, or by a pipeline that takes it as it is."""
    if not needs_literal(document):
        return b"\x03u\0" + document
    literal = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"$literal", document))
    stage = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"$replaceWith", literal))
    stages = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"0", stage))
    return raw_bson.encode_element(raw_bson.ARRAY, b"u", stages)


def _is_modifier(body: bytes) -> bool:
    """Whether an update's ``o`` is no replacement: a delta, or operators of 4.4."""
    element = next(raw_bson.elements(body), None)
    return element is not None and element.name.startswith(b"$")


def _query(identifier: bytes) -> bytes:
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


def _identifier(document: bytes) -> bytes:
    """The element ``_id`` of a document."""
    if document[5:9] == b"_id\0" and (size := raw_bson.FIXED_SIZES.get(document[4])) is not None:
        return document[4 : 9 + size]
    found = raw_bson.find(document, b"_id")
    if found is None:
        raise TargetMismatchError("a document has no _id", hint="The sync cannot tell it from others")
    return document[found.start : found.end]


def _chunks(items: Iterable[Any], size: Any, most: int) -> Iterator[list[Any]]:
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


__all__ = ["ANEW", "DELETE", "NAMES_SINCE", "ChangesWriter", "OtherWayError", "TargetMismatchError", "needs_literal"]
