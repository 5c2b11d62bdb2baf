"""A segment written to the target: final documents, as raw commands of one transaction.

If a document's first change is a delta, and for every document as long as the copy may be newer than the changes, the
target's own document is read in the same transaction. So it is known what the target has, and each write says what it
expects: a count that differs is an error, since the target is then not what the sync has written.

Where every change of a document is a delta that the target can carry out (``deltas.py``), nothing is read: the target
equals the source at the position, so the document is the one that the delta was made for.

A unique index may rule out one order of writes and not another. The first try deletes, replaces and inserts. If the
server refuses that (11000), the transaction is repeated, and deletes all documents of the collection's segment before
it inserts any: what remains is a part of a state that the source had, so nothing can be in the way. If it refuses
deltas, the transaction is done again with whole documents.

While the copy may be newer than the changes, one thing can still be in the way: a document that was copied later, with
an ``_id`` that equals another's under the collation of its collection ("a" and "A"). The source did not have it at the
time of the changes, so a later change inserts it, and it is deleted here.

If a collection is sharded on the target, every document is read, since a statement has to name its shard key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure

from tailrace.act.sync.deltas import DELTA, DeltaEncoder
from tailrace.act.sync.fold import NOT_THERE, THERE, DocumentChanges
from tailrace.act.sync.inserting import RawDocuments
from tailrace.act.sync.shard_keys import key_elements
from tailrace.act.sync.state import SyncedCollection
from tailrace.act.sync.statements import (
    NO_STATEMENTS,
    CollectionStatements,
    JoinedStatements,
    SegmentStatements,
    by_collection,
    chunks,
    collection_statements,
    delete_pieces,
    is_empty_time,
    needs_literal,
    pieces,
    query_of,
)
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
#: A statement that replaces a larger document may not fit a message together with its query.
_REPLACED_MAX: Final = (16 << 20) - (64 << 10)
#: How many documents are read at a time at first, and how many bytes are in memory if they are of similar size.
_READ_FIRST, _READ_MOST, _READ_BYTES = 64, 4_000, 16 << 20
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
    anew: str = f"Somebody else has written to the target. To start again, {ANEW}"


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
        made: SegmentStatements = NO_STATEMENTS,
    ) -> None:
        """Write what the documents are after their changes. ``tolerant``: the target may hold later changes. ``ways``:
        how the documents of a collection are written, if not by deltas. ``made``: their statements, if they were made
        beforehand. Raises TargetMismatchError, OtherWayError, PyMongoError."""
        self.written_bytes = 0
        statements = made.collections if made.documents is documents else {}
        for uuid, changed in by_collection(documents).items():
            if uuid not in collections:
                continue
            collection, way = collections[uuid], ways.get(uuid, BY_DELTAS)
            key = tuple(self._keys.get(collection.target_uuid, ()))
            encoder = None if tolerant or key or way != BY_DELTAS else self._encoder
            table = _Table(self._client, session, collection, int(self._hold), tolerant=tolerant, key=key)
            table.checks_names = self._version < NAMES_SINCE
            try:
                if encoder is None:
                    table.write(changed, anew=way == ANEW_WHOLE)
                else:
                    table.write_statements(statements.get(uuid) or collection_statements(changed, encoder))
            except OperationFailure as error:
                if error.code == DUPLICATE_KEY and way != ANEW_WHOLE:
                    raise OtherWayError(uuid, ANEW_WHOLE, error) from None
                if table.has_deltas and not is_worth_again(error):
                    raise OtherWayError(uuid, WHOLE, error) from None
                if error.code == DUPLICATE_KEY and " _id_ dup key" in str(error):
                    raise TargetMismatchError(
                        f"a document is already on the target: {error}",
                        hint="Two shards hold documents with the same _id, which a replica set cannot; or somebody "
                        f"else has written to the target. To start again, {ANEW}",
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
        *,
        tolerant: bool,
        key: tuple[str, ...],
    ) -> None:
        database, _, self._name = collection.target.partition(".")
        self._database = client.get_database(database, codec_options=_RAW)
        self._session = session
        self._held = _Held(collection.target, hold)
        self._tolerant = tolerant
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

    def write_statements(self, made: CollectionStatements) -> None:
        """Write the documents of a target that equals the source: by statements, and the rest as ``write`` does.
        Inserts come last, as there."""
        self.has_deltas = bool(made.updates)
        self.written += made.size
        for one in made.deletes:
            self._delete(one)
        for one in made.updates:
            self._update(one)
        self.write(made.rest, anew=False)
        for one in made.inserts:
            self._insert_plain(one)
        self._insert_special(made.special)

    def write(self, documents: Sequence[DocumentChanges], *, anew: bool) -> None:
        """Write documents: what of the target's own is needed is read in the transaction."""
        waiting: list[bytes] = []  # what is inserted after everything else
        self._keys_written = frozenset(one.key for one in documents) if anew and self._tolerant else frozenset()
        for part in self._parts(documents):
            todo = _Writes([], [], [])
            works = self._works(part)
            apply_all([work for _, work in works])
            for one, work in works:
                self._sort(one, work, todo, anew=anew)
            todo.deleted.extend(map(query_of, self._equals))
            self._equals.clear()
            for piece in delete_pieces(todo.deleted):
                self._delete(piece)
            for piece in pieces(todo.updates):
                self._update(piece)
            self.written += sum(map(len, todo.inserted)) + sum(map(len, todo.updates))
            if anew:
                waiting += todo.inserted
            else:
                self._insert(todo.inserted)
        self._insert(waiting)

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
        if one.before == NOT_THERE and one.changes[-1][0] in (DELETE, DELETE_OF):
            return True  # it came and went; a target that is newer than the sync's state may have it
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
            return query_of(identifier)
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
        for some in chunks(values, len):
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
                        f"out. To start again, {ANEW}",
                    )
                if self._keys_written and key not in self._keys_written:
                    self._equals[element] = None
        return found

    def _delete(self, some: JoinedStatements) -> None:
        self._send({"delete": self._name, "deletes": [RawDocuments(some.joined)]}, some.number, "delete")

    def _update(self, some: JoinedStatements) -> None:
        command = {"update": self._name, "updates": [RawDocuments(some.joined)], **_BYPASS}
        self._send(command, some.number, "update")

    def _insert(self, documents: Sequence[bytes]) -> None:
        plain: list[bytes] = []
        special: list[bytes] = []
        for one in documents:
            (special if needs_literal(one) else plain).append(one)
        for some in pieces(plain):
            self._insert_plain(some)
        self._insert_special(special)

    def _insert_plain(self, some: JoinedStatements) -> None:
        command = {"insert": self._name, "documents": [RawDocuments(some.joined)], **_BYPASS}
        self._send(command, some.number, "insert")

    def _insert_special(self, documents: Sequence[bytes]) -> None:
        for one in documents:
            if self._strange(one):
                self._insert_strange(one)
            else:
                statement = raw_bson.encode_document(self._named(_identifier(one), one), _update(one), _UPSERT)
                self._send({"update": self._name, "updates": [RawDocuments(statement)], **_BYPASS}, 1, "insert")

    def _strange(self, document: bytes) -> bool:
        """Whether an update may refuse a name in a document, though an insert takes it."""
        return self.checks_names and b"$" in document

    def _insert_strange(self, document: bytes) -> None:
        """Insert it, and put the empty timestamps into it afterwards."""
        empty = [document[one.start : one.end] for one in raw_bson.elements(document) if is_empty_time(document, one)]
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
_UPSERT: Final = raw_bson.encode_element(raw_bson.BOOL, b"upsert", b"\x01")


def _update(document: bytes) -> bytes:
    """The element of a statement that replaces a document: as it is, or by a pipeline that takes it as it is."""
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


def _identifier(document: bytes) -> bytes:
    """The element ``_id`` of a document."""
    if document[5:9] == b"_id\0" and (size := raw_bson.FIXED_SIZES.get(document[4])) is not None:
        return document[4 : 9 + size]
    element = raw_bson.find(document, b"_id")
    if element is None:
        raise TargetMismatchError("a document has no _id", hint="The sync cannot tell it from others")
    return document[element.start : element.end]


__all__ = ["ANEW", "DELETE", "NAMES_SINCE", "ChangesWriter", "OtherWayError", "TargetMismatchError", "needs_literal"]
