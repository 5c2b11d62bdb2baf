"""The state of the tables in LMDB: every document of their collections as it is now, and how far each table is.

One write transaction holds all of a micro-batch: the documents, the position in the oplog, and the rows that the tables
still have to take over. After a crash at any moment, the next start finds the batch as a whole or not at all, and a
table that has not taken it over gets it from here, without reading the oplog again.

A document's key is the number of its collection (four bytes) and the sortable key of its ``_id``; its value is the
cluster time of its last change (eight bytes; 0 for one that was copied), the length of the sortable key, that key, and
the document. What is read of the file is compared with its checksum (``state_file.py``), the metadata all at once when
it is opened.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import lmdb

from tailrace.base.lmdb_file import confirm_missing, note_closed, records, sealed, unsealed
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.witness import Witness
from tailrace.core.printable import in_a_line
from tailrace.errors import SinkError
from tailrace.lake.tables.names import state_key
from tailrace.lake.tables.state_file import MADE_ANEW, NEAR, Databases, OpenFile, clear_errors, close_file, open_file

_FORMAT: Final = 3
_OTHER_RELEASE: Final = "Use the release that has written it"
_HEAD: Final = struct.Struct(">QI")
_NUMBER: Final = struct.Struct(">I")
#: How many pending rows are read at a time.
_AT_ONCE: Final = 1024
_POSITION: Final = b"position"
_SELECTION: Final = b"selection"
_COLLECTION: Final = b"collection/"
_TABLE: Final = b"table/"
_COPY: Final = b"copy"
_COPYING: Final = b"copying/"
_NAME: Final = b"state"
_NEXT: Final = b"next"
_SESSIONS: Final = b"sessions"
_MASKS: Final = b"masks"
_RESYNC: Final = b"resync/"
_FED: Final = b"fed"
#: The number of no collection: a table has rows of one that the state does not know.
UNKNOWN: Final = 0


class StoredDocument(NamedTuple):
    """A current document: the sortable key of its ``_id``, the cluster time of its last change, its BSON."""

    key: bytes
    time: ClusterTime
    document: bytes


@dataclass(frozen=True, slots=True)
class TablesPosition:
    """How far the oplogs were read: micro-batch, cluster time, and the servers that were read (name -> host).

    ``hold``    the tables take nothing over before this time, since a copy may hold changes up to it
    ``stated``  the last time at which all tables were up to date; 0 before the first
    ``witness``  whose oplogs they were
    """

    batch: int
    time: ClusterTime
    members: Mapping[str, str]
    hold: ClusterTime = ZERO
    stated: ClusterTime = ZERO
    witness: Witness | None = None

    def now_stated(self) -> TablesPosition:
        """The same position, which all tables have reached."""
        return replace(self, stated=self.time)

    def next_batch(self) -> TablesPosition:
        """The same position with the next micro-batch number, for tables that are written once more."""
        return replace(self, batch=self.batch + 1)


@dataclass(frozen=True, slots=True)
class TabledCollection:
    """A collection that has a table. Changes up to ``copied`` may be in the documents already.

    ``pending``  another collection has its name still: a database is getting another primary shard
    ``filled``   the oplog whose migration entries fill it; empty where these only copy documents from shard to shard
    """

    uuid: str
    number: int
    namespace: str
    copied: int = 0
    pending: bool = False
    filled: str = ""

    holder: ClassVar[str] = "the tables' state"
    anew: ClassVar[str] = "After `tailrace tables resync` the next run copies the collection again"


@dataclass(frozen=True, slots=True)
class CopyBegun:
    """A first copy that has not come to its end: the oplogs are read from ``start`` on, those of ``members``."""

    start: ClusterTime
    members: Mapping[str, str]
    witness: Witness | None = None


@dataclass(frozen=True, slots=True)
class CopyingCollection:
    """How far the copy of a collection is: the documents before ``at`` (hex; a document of the one field ``_id``) are
    in the state. ``done``: all of them are."""

    uuid: str
    number: int
    at: str
    done: bool = False


@dataclass(frozen=True, slots=True)
class TableMark:
    """What a table last took over: the collection's documents (``None``: there is no such collection), and the batch.
    ``whole``: the table has to be rewritten from the state, not changed row by row.

    ``version``  the table's version that our last commit made; -1 where that is not known
    ``digest``   of that commit's file
    ``table``    the table's id
    ``checkpoints``  the digests of the checkpoints in its log, by version (in decimal)
    """

    namespace: str
    collection: int | None
    batch: int
    whole: bool
    version: int = -1
    digest: str = ""
    table: str = ""
    checkpoints: Mapping[str, str] = field(default_factory=dict)


class TableState:
    """The state in ``directory``. One process at a time may have it open for writing; others may read it meanwhile."""

    def __init__(self, directory: Path, *, readonly: bool = False) -> None:
        self._path, self._readonly = directory, readonly
        with clear_errors(directory):
            file = open_file(directory, readonly=readonly)
            self._file: OpenFile | None = file
            self._environment, self._databases = file.environment, file.databases
            try:
                self._begin()
            except BaseException:
                close_file(file)
                raise

    def _begin(self) -> None:
        """Compare all metadata: nobody would notice that a record whose key was changed is missing. Name a new
        state."""
        for _ in self._records(self._databases.meta, b""):
            pass
        with self._reading():
            for key in (_NAME, _POSITION):  # before anything else is read: not every command asks for the position
                self._check_format((self._read(key) or {}).get("format", _FORMAT))
        if not self._readonly and self._read(_NAME) is None:
            with self.writing() as transaction:
                transaction.set_name(secrets.token_hex(8))

    def _check_format(self, written: object) -> None:
        if written != _FORMAT:
            raise SinkError(
                f"{self._path} was written by another version of Tailrace (format {written})", hint=_OTHER_RELEASE
            )

    def close(self) -> None:
        """Close the files."""
        file, self._file = self._file, None
        if file is not None and close_file(file) and not self._readonly:
            note_closed(self._path)  # otherwise a reader is still at work: the next one to open it reads all of it

    # -- what is there ----------------------------------------------------------------------------------------------

    def position(self) -> TablesPosition | None:
        """The position; ``None`` if nothing was copied yet."""
        with self._reading():
            value = self._read(_POSITION)
            if value is None:
                return None
            self._check_format(value["format"])
            times = [ClusterTime(value[name]) for name in ("time", "hold", "stated")]
            return TablesPosition(value["batch"], times[0], value["members"], times[1], times[2], _witness(value))

    def fed(self) -> dict[str, Any] | None:
        """Which rows of a query were applied last, of tables that are fed by one (``fed.py``); ``None`` for others."""
        with self._reading():
            found = self._read(_FED)
            return None if found is None else dict(found)

    @property
    def name(self) -> str:
        """What distinguishes this state from others: chosen at random when it began."""
        with self._reading():
            value = self._read(_NAME)
            return "" if value is None else str(value["name"])

    def masks(self) -> dict[str, str]:
        """What tells by which masks the tables were begun; empty: by none."""
        with self._reading():
            found = self._read(_MASKS)
            return {} if found is None else {str(name): str(value) for name, value in found.items()}

    def sessions(self) -> list[str]:
        """The sessions of writers to an object store, the last one at the end."""
        with self._reading():
            value = self._read(_SESSIONS)
            return [] if value is None else [str(one) for one in value]

    def selection(self) -> tuple[str, ...] | None:
        """The patterns whose collections are there; ``None`` where that is not known."""
        with self._reading():
            value = self._read(_SELECTION)
            return None if value is None else tuple(value["patterns"])

    def collections(self) -> list[TabledCollection]:
        """The collections that have tables."""
        with self._reading():
            return [TabledCollection(**one) for one in self._all(_COLLECTION)]

    def marks(self) -> dict[str, TableMark]:
        """What each table took over last, by namespace."""
        with self._reading():
            return {one["namespace"]: TableMark(**one) for one in self._all(_TABLE)}

    def snapshot(self) -> tuple[TablesPosition | None, dict[str, TableMark], dict[int, str]]:
        """The position, the marks and the UUIDs of the collections by number, all as they were at one moment. For
        readers, while a writer may go on."""
        while True:
            before = self._environment.info()["last_txnid"]
            found = self.position(), self.marks(), {one.number: one.uuid for one in self.collections()}
            if self._environment.info()["last_txnid"] == before:
                return found

    def copy_begun(self) -> CopyBegun | None:
        """The first copy, if one has begun and not come to its end."""
        with self._reading():
            value = self._read(_COPY)
            return None if value is None else CopyBegun(ClusterTime(value["start"]), value["members"], _witness(value))

    def copying(self) -> dict[str, CopyingCollection]:
        """The collections that are being copied, by UUID."""
        with self._reading():
            return {one["uuid"]: CopyingCollection(**one) for one in self._all(_COPYING)}

    def resyncing(self) -> list[str]:
        """The collections that are being copied again."""
        with self._reading():
            return [one["namespace"] for one in self._all(_RESYNC)]

    def documents(self, number: int) -> Iterator[StoredDocument]:
        """All documents of a collection, in the order of their keys."""
        with self._reading_documents(number):
            for _, value in self._records(self._databases.documents, _NUMBER.pack(number)):
                yield _document(value)

    def holds(self, number: int, key: bytes) -> bool:
        """Whether a collection's document with a sortable key is there, or its row waits to be taken over."""
        place, databases = _NUMBER.pack(number) + state_key(key), self._databases
        with self._reading_documents(number), self._environment.begin() as transaction:
            if any(transaction.get(place, db=one) is not None for one in (databases.documents, databases.waiting)):
                return True
            with transaction.cursor(databases.documents) as cursor:
                confirm_missing(cursor, place, NEAR)
            return False

    def waiting_keys(self, number: int) -> list[bytes]:
        """The keys whose rows the collection's table has to take over."""
        with clear_errors(self._path):
            return [key for _, key in self._records(self._databases.waiting, _NUMBER.pack(number))]

    def waiting(self, number: int) -> Iterator[StoredDocument]:
        """The documents of these keys, of those that have not been deleted."""
        databases = self._databases
        with (
            self._reading_documents(number),
            self._environment.begin() as transaction,
            transaction.cursor(databases.waiting) as cursor,
            transaction.cursor(databases.documents) as documents,
        ):
            rows = records(cursor, _NUMBER.pack(number))
            while places := [place for place, _ in islice(rows, _AT_ONCE)]:
                found = dict(documents.getmulti(places))
                for place in places:
                    if place in found:
                        yield _document(unsealed(place, found[place]))
                    else:
                        confirm_missing(documents, place, NEAR)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Around reads of metadata."""
        try:
            with clear_errors(self._path):
                yield
        except (KeyError, TypeError, ValueError) as error:
            raise SinkError(f"{self._path} is damaged: {error!r}", hint=MADE_ANEW.format(path=self._path)) from error

    @contextmanager
    def _reading_documents(self, number: int) -> Iterator[None]:
        with clear_errors(self._path):
            try:
                yield
            except lmdb.CorruptedError:
                raise self._damaged(number) from None

    def _damaged(self, number: int) -> SinkError:
        """The error for a document that is not what was written. A single collection can be copied again."""
        found = next((one.namespace for one in self.collections() if one.number == number), None)
        anew = MADE_ANEW.format(path=self._path)
        if found is None:
            return SinkError(f"{self._path} is damaged: a document in it is not what was written", hint=anew)
        name = in_a_line(found)
        return SinkError(
            f"{self._path} is damaged: a document of {name} in it is not what was written",
            hint=f"`tailrace tables resync` lets the next run copy {name} again. If that is not enough: {anew}",
        )

    def _read(self, key: bytes) -> Any:
        with self._environment.begin(self._databases.meta) as transaction:
            record = transaction.get(key)
        return None if record is None else json.loads(unsealed(key, record))

    def _all(self, prefix: bytes) -> Iterator[Any]:
        for _, value in self._records(self._databases.meta, prefix):
            yield json.loads(value)

    def _records(self, database: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._environment.begin(database) as transaction, transaction.cursor() as cursor:
            yield from records(cursor, prefix)

    # -- changing it ------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[StateTransaction]:
        """One transaction: at the end all of it is on the device, or nothing."""
        with clear_errors(self._path), self._environment.begin(write=True) as transaction:
            yield StateTransaction(transaction, self._databases, self._damaged)


class StateTransaction:
    """Changes to the state, and reads that see them. ``damaged``: the error for a collection's documents."""

    def __init__(self, transaction: Any, databases: Databases, damaged: Callable[[int], SinkError]) -> None:
        self._transaction = transaction
        self._documents, self._waiting, self._meta = databases
        self._damaged = damaged

    def get(self, number: int, key: bytes) -> bytes | None:
        """The BSON of the document with a sortable key."""
        place = _NUMBER.pack(number) + state_key(key)
        record = self._transaction.get(place, db=self._documents)
        if record is None:
            return None
        try:
            value = unsealed(place, record)
        except lmdb.CorruptedError:
            raise self._damaged(number) from None
        return value[_HEAD.size + _HEAD.unpack_from(value)[1] :]

    def confirm_missing(self, number: int, key: bytes) -> None:
        """Raise SinkError where ``get`` has missed a document that may be there."""
        try:
            with self._transaction.cursor(self._documents) as cursor:
                confirm_missing(cursor, _NUMBER.pack(number) + state_key(key), NEAR)
        except lmdb.CorruptedError:
            raise self._damaged(number) from None

    def put(self, number: int, key: bytes, time: ClusterTime, document: bytes) -> None:
        """Write the current document."""
        place = _NUMBER.pack(number) + state_key(key)
        value = _HEAD.pack(time, len(key)) + key + document
        self._transaction.put(place, sealed(place, value), db=self._documents)

    def delete(self, number: int, key: bytes) -> None:
        """Delete the document, if there is one."""
        self._transaction.delete(_NUMBER.pack(number) + state_key(key), db=self._documents)

    def wait(self, number: int, keys: Iterable[bytes]) -> None:
        """Add rows, by their sortable keys, to those that the collection's table has to take over."""
        prefix = _NUMBER.pack(number)
        places = sorted((prefix + state_key(key), key) for key in keys)
        with self._transaction.cursor(self._waiting) as cursor:
            cursor.putmulti([(place, sealed(place, key)) for place, key in places])

    def forget_waiting(self) -> None:
        """Empty the list of rows to take over: the tables have them all."""
        self._transaction.drop(self._waiting, delete=False)

    def forget(self, collection: TabledCollection) -> None:
        """Delete a collection that no longer has a table, with its documents."""
        self.clear(collection.number)
        self._transaction.delete(_COLLECTION + collection.uuid.encode(), db=self._meta)

    def clear(self, number: int) -> None:
        """Delete all documents of a collection."""
        prefix = _NUMBER.pack(number)
        with self._transaction.cursor(self._documents) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key()[:4] == prefix:
                found = cursor.delete()

    def clear_all(self) -> None:
        """Delete everything but the state's name, sessions and masks, for a new start."""
        kept = {key: self._transaction.get(key, db=self._meta) for key in (_NAME, _SESSIONS, _MASKS)}
        for database in (self._documents, self._waiting, self._meta):
            self._transaction.drop(database, delete=False)
        for key, record in kept.items():
            if record is not None:
                self._transaction.put(key, record, db=self._meta)

    def forget_mark(self, namespace: str) -> None:
        """Delete the mark of a table that is no longer kept."""
        self._transaction.delete(_table_key(namespace), db=self._meta)

    def next_number(self) -> int:
        """A number that no collection has had."""
        record = self._transaction.get(_NEXT, db=self._meta)
        number = 1 if record is None else int(unsealed(_NEXT, record))
        self._put(_NEXT, number + 1)
        return number

    def set_name(self, name: str) -> None:
        """Name the state."""
        self._put(_NAME, {"name": name, "format": _FORMAT})

    def set_collection(self, collection: TabledCollection) -> None:
        """Add or change a collection."""
        self._put(_COLLECTION + collection.uuid.encode(), asdict(collection))

    def set_copy_begun(self, begun: CopyBegun) -> None:
        """Note where a first copy has begun."""
        known = {"start": int(begun.start), "members": dict(begun.members)}
        self._put(_COPY, {**known, **_witnessed(begun.witness)})

    def end_copy(self) -> None:
        """Forget that there was a first copy: there is a position now."""
        self._transaction.delete(_COPY, db=self._meta)

    def set_copying(self, copying: CopyingCollection) -> None:
        """Note how far the copy of a collection is."""
        self._put(_COPYING + copying.uuid.encode(), asdict(copying))

    def end_copying(self, uuid: str) -> None:
        """Forget that a collection was being copied."""
        self._transaction.delete(_COPYING + uuid.encode(), db=self._meta)

    def set_resyncing(self, namespace: str) -> None:
        """Note that a collection is being copied again."""
        self._put(_RESYNC + _table_key(namespace), {"namespace": namespace})

    def end_resyncing(self, namespace: str) -> None:
        """Forget that a collection was being copied again."""
        self._transaction.delete(_RESYNC + _table_key(namespace), db=self._meta)

    def set_mark(self, mark: TableMark) -> None:
        """Add or change the mark of a table."""
        self._put(_table_key(mark.namespace), asdict(mark))

    def set_position(self, position: TablesPosition) -> None:
        """Set where reading of the oplogs continues."""
        times = {name: int(getattr(position, name)) for name in ("time", "hold", "stated")}
        known = {"format": _FORMAT, "batch": position.batch, "members": dict(position.members)}
        self._put(_POSITION, {**known, **times, **_witnessed(position.witness)})

    def set_fed(self, fed: Mapping[str, Any]) -> None:
        """Set which rows of a query were applied last."""
        self._put(_FED, dict(fed))

    def set_masks(self, witness: Mapping[str, str]) -> None:
        """Set what tells by which masks the tables are begun."""
        self._put(_MASKS, dict(witness))

    def set_sessions(self, sessions: Iterable[str]) -> None:
        """Set the sessions of writers to an object store."""
        self._put(_SESSIONS, list(sessions))

    def set_selection(self, patterns: Iterable[str]) -> None:
        """All collections that these patterns select are there."""
        self._put(_SELECTION, {"patterns": list(patterns)})

    def _put(self, key: bytes, value: object) -> None:
        self._transaction.put(key, sealed(key, json.dumps(value).encode()), db=self._meta)


def taken_over(mark: TableMark, batch: int) -> TableMark:
    """The mark of a table that has taken over ``batch``."""
    return replace(mark, batch=batch, whole=False)


def unknown(namespace: str) -> TableMark:
    """The mark of a table whose rows are not those that the state knows: all of it is rewritten."""
    return TableMark(namespace, UNKNOWN, -1, whole=True)


def _table_key(namespace: str) -> bytes:
    from hashlib import sha256  # noqa: PLC0415

    return _TABLE + sha256(namespace.encode()).hexdigest().encode()


def _document(value: bytes) -> StoredDocument:
    time, size = _HEAD.unpack_from(value)
    start = _HEAD.size + size
    return StoredDocument(value[_HEAD.size : start], ClusterTime(time) if time else ZERO, value[start:])


def _witnessed(witness: Witness | None) -> dict[str, Any]:
    return {} if witness is None else {"witness": witness.to_document()}


def _witness(found: Mapping[str, Any]) -> Witness | None:
    return Witness.from_document(found["witness"]) if "witness" in found else None
