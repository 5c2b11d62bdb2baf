"""Tables compared with their collections at one time, document by document, while both go on.

A version of a table equals its collection at the time that it states. The collection is read later, piece by piece,
while applications write. So a document that differs is checked again: the changes since the version's time, from the
oplog, are applied to the table's document, and the result is compared with the document as it is then. It differs only
if it does so several times over while nobody changes it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import unquote

import bson
import pyarrow as pa
import pyarrow.compute as pc
from bson import json_util
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace.base.object_place import reason
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, SourceError, UsageError
from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit
from tailrace.lake.tables.copying import key_of
from tailrace.lake.tables.delta_commit import DamagedCommitError
from tailrace.lake.tables.fold import FoldOfOne
from tailrace.lake.tables.holding import state_folder
from tailrace.lake.tables.masking import check_masks, masked_changes
from tailrace.lake.tables.names import BEGIN_ANEW, BSON, KEY, place_of
from tailrace.lake.tables.quarantine import FOLDER as QUARANTINE_FOLDER
from tailrace.lake.tables.standing import harm_of
from tailrace.lake.tables.state import UNKNOWN, TabledCollection, TableMark, TablesPosition, TableState
from tailrace.lake.tables.version_rows import batches, rows_in
from tailrace.read.snapshot.places import Placement
from tailrace.read.snapshot.reader import places_of, range_reader
from tailrace.read.snapshot.state import LOWEST, KeyRange
from tailrace.read.source.connection import RETRY_SECONDS, Connection, open_client
from tailrace.read.source.mask_file import Masks
from tailrace.read.source.topology import Cluster
from tailrace.read.window.apply import DocumentWork, StateMismatchError, TimedChange, apply_all
from tailrace.read.window.oplogs import Oplogs

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)
#: How many documents are read again together.
_TOGETHER: Final = 500
#: A document differs if it did so this many times, and nobody changed it meanwhile.
_STRIKES: Final = 3
_ROUNDS: Final = 100
_PAUSE_S: Final = 0.05
_NUMBER: Final = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A document that is not in the table as it is in the collection: its ``_id`` as Extended JSON, and how."""

    id: str
    how: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """A table compared with its collection.

    ``time``         the cluster time that the table was compared at
    ``documents``    how many documents were compared
    ``quarantined``  how many of them are in quarantine, and so not in the table
    ``faults``       what else is wrong: a damaged file, a table that was set back
    """

    namespace: str
    time: ClusterTime
    documents: int
    quarantined: int = 0
    differences: Sequence[Difference] = ()
    faults: Sequence[str] = ()

    @property
    def good(self) -> bool:
        """Whether the table equals the collection."""
        return not self.differences and not self.faults


def verify(
    root: TablePlace,
    uri: Any,
    namespaces: Sequence[str] = (),
    *,
    sample: int | None = None,
    masks: Masks | None = None,
) -> Iterator[TableReport]:
    """Compare the tables in ``root`` (or some of them) with their collections in the deployment at ``uri``. A writer
    may run meanwhile.

    ``sample``  compare only this many documents of each collection, and as many rows of each table, chosen at random
    ``masks``   those that the tables are written with: the collections' documents are masked before they are compared

    Raises UsageError for a namespace without a table and for other masks, OtherHistoryError for another deployment than
    the tables'.
    """
    check_masks(root, _masks_of(root), masks)
    position, marks, _ = _state(root)
    for namespace in namespaces:
        if namespace not in marks:
            raise UsageError(f"{namespace} has no table in {root}")
    if position is None or not position.stated:
        raise UsageError("the tables do not equal their collections yet: a copy has not caught up")
    with ExitStack() as stack:
        client = stack.enter_context(open_client(uri))
        cluster = Cluster.discover(client, uri, {})
        if cluster is not None:
            stack.callback(cluster.close)
        for namespace in namespaces or sorted(marks):
            yield _Verification(root, namespace, client, cluster, sample=sample, masks=masks).report()


def _masks_of(root: TablePlace) -> dict[str, str]:
    state = TableState(state_folder(root) / "state", readonly=True)
    try:
        return state.masks()
    finally:
        state.close()


def _state(root: TablePlace) -> tuple[TablesPosition | None, dict[str, TableMark], dict[int, str]]:
    state = TableState(state_folder(root) / "state", readonly=True)
    try:
        return state.snapshot()
    finally:
        state.close()


@dataclass(slots=True)
class _Candidate:
    """A document that seems to differ: what the table holds, and how often it differed."""

    element: bytes
    held: bytes | None
    strikes: int = 0
    broken: bool = False


@dataclass(slots=True)
class _Found:
    documents: int = 0
    quarantined: int = 0
    candidates: dict[bytes, _Candidate] = field(default_factory=dict)


class _Verification:
    """One table compared with its collection."""

    def __init__(
        self,
        root: TablePlace,
        namespace: str,
        client: Any,
        cluster: Cluster | None,
        *,
        sample: int | None,
        masks: Masks | None,
    ) -> None:
        self._root = root
        self._mask = None if masks is None else masks.of_collection(namespace)
        self._folder = place_of(root, namespace)
        self._namespace = namespace
        self._database, _, self._name = namespace.partition(".")
        self._deployment = cluster or client
        self._client, self._cluster = client, cluster
        self._sample = sample
        self._places = places_of(self._deployment, RETRY_SECONDS)
        #: Documents of which there are several rows.
        self._twice: dict[bytes, bytes] = {}

    def report(self) -> TableReport:
        """Compare the table."""
        position, marks, uuids = _state(self._root)  # anew: it was later when the tables before were compared
        assert position is not None
        mark = marks[self._namespace]
        stated = position.stated
        if mark.collection == UNKNOWN:
            return TableReport(self._namespace, stated, 0, faults=["the next run will rewrite it"])
        if (harm := harm_of(self._folder, mark)) is not None:
            fault = f"it does not match its state: it {harm}"
            return TableReport(self._namespace, stated, 0, faults=[fault])
        oplogs = Oplogs(
            self._client,
            self._cluster,
            position.members,
            witness=position.witness,
            what=f"the tables in {self._root}",
            anew=BEGIN_ANEW,
        )
        try:
            uuid = bytes.fromhex(uuids[mark.collection]) if mark.collection in uuids else None
            faults: list[str] = []
            table = self._table(mark, faults)
            if table is None:
                return TableReport(self._namespace, stated, 0, faults=faults)
            found = self._compared(table, uuid)
            differences = [
                Difference(_text(_element(document)), "is in the table more than once")
                for document in self._twice.values()
            ]
            differences += self._settled(found, uuid, oplogs, stated)
        finally:
            oplogs.close()
        return TableReport(self._namespace, stated, found.documents, found.quarantined, differences, faults)

    def _shown(self, mark: TableMark, faults: list[str]) -> int | None:
        """The version that readers read, if it has the rows of the one that the state describes: files may have been
        merged since. ``None``: the newest. That another program has changed rows goes to ``faults``. Raises
        DamagedCommitError."""
        if mark.version < 0:
            return None
        version = mark.version
        for number in (one for one in delta.commits_in(self._folder) if one > mark.version):
            actions = delta_commit.actions_of(self._folder, number)
            if delta_commit.statement(actions, number) is not None:
                break  # a writer goes on
            if delta_commit.changes_data(actions):
                faults.append(f"another program has changed it: version {number} is not one of Tailrace's")
                break
            version = number
        return version

    def _table(self, mark: TableMark, faults: list[str]) -> DeltaTable | None:
        """The version that is compared, and what of it cannot be read."""
        try:
            table = places.delta_table(self._folder, self._shown(mark, faults))
            with places.asking(self._folder):
                names = [unquote(one) for one in pa.table(table.get_add_actions()).column("path").to_pylist()]
            there = places.sizes(self._folder, names)
            for name in names:
                if name not in there:
                    raise FileNotFoundError(f"{self._folder / name} is missing")
                if self._sample is None:
                    with places.parquet_file(self._folder / name) as file:
                        for _ in file.iter_batches(4096):
                            pass
        except TableNotFoundError:
            if mark.collection is None:
                return None
            faults.append("there is no table")
            return None
        except DamagedCommitError as error:
            faults.append(f"it is damaged: {error.message}")
            return None
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            faults.append(f"it is damaged: {reason(error)}")
            return None
        return table

    # -- the first look -----------------------------------------------------------------------------------------------

    def _compared(self, table: DeltaTable, uuid: bytes | None) -> _Found:
        """What seems to differ between the table and the collection as it is read."""
        with places.asking(self._folder):
            keys = self._digests(table)
        found = _Found()
        wanted: dict[bytes, bytes] = {}
        if self._sample is not None:
            chosen = set(random.sample(sorted(keys), min(self._sample, len(keys))))
            documents = self._sampled(uuid, self._sample)
        else:
            chosen, documents = set(keys), self._documents(uuid)
        seen: set[bytes] = set()
        for document in documents:
            key = key_of(document)
            found.documents += key not in seen
            seen.add(key)
            if keys.get(key) != _digest(document):
                wanted[key] = _element(document)
        for key in chosen - seen:
            found.documents += self._sample is not None
            wanted[key] = b""
        with places.asking(self._folder):
            held = self._rows(table, wanted)
            quarantined = self._quarantined(wanted.keys() - held.keys())
        for key, element in wanted.items():
            row = held.get(key, quarantined.get(key))
            found.candidates[key] = _Candidate(element or _element(row or b""), row)
        found.quarantined = len(quarantined)
        return found

    def _digests(self, table: DeltaTable) -> dict[bytes, bytes]:
        """What tells the documents of all rows apart, by key."""
        found: dict[bytes, bytes] = {}
        for batch in batches(self._folder, table, [KEY, BSON]):
            for key, document in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                if key in found:
                    self._twice[key] = document
                found[key] = _digest(document)
        return found

    def _rows(self, table: DeltaTable, keys: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        rows = rows_in(self._folder, table, KEY, sorted(keys), [KEY, BSON])
        return dict(zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True))

    def _quarantined(self, keys: set[bytes]) -> dict[bytes, bytes]:
        """The documents in quarantine, of those that the table lacks."""
        try:
            table = places.delta_table(self._root / QUARANTINE_FOLDER)
        except TableNotFoundError:
            return {}
        ours = pc.field("namespace") == self._namespace
        rows = table.to_pyarrow_dataset().to_table(columns=["_key", "_bson", "noticed"], filter=ours)
        rows = rows.sort_by("noticed")
        both = zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True)
        return {key: document for key, document in both if key in keys}

    def _documents(self, uuid: bytes | None) -> Iterator[bytes]:
        if uuid is None:
            return
        for chunk in range_reader(self._deployment, self._places.now())(self._namespace, uuid, KeyRange(LOWEST)):
            yield from map(self._masked, chunk.documents)

    def _masked(self, document: bytes) -> bytes:
        return document if self._mask is None else self._mask.document(document)

    def _sampled(self, uuid: bytes | None, count: int) -> Iterator[bytes]:
        for placement, name, collection in self._parts(uuid):
            for one in collection.aggregate([{"$sample": {"size": count}}]):
                document = raw_bson.bytes_of(one)
                if placement.owns(name, document):
                    yield self._masked(document)

    def _parts(self, uuid: bytes | None) -> Iterator[tuple[Placement, str, Any]]:
        """Where the collection is now: the placement, and each replica set with its collection."""
        placement = None if uuid is None else self._places.placement(uuid, self._database)
        if placement is None:
            return
        collection = placement.namespace.partition(".")[2]
        for name, client in placement.members.items():
            yield placement, name, Connection(client).majority(self._database, collection, codec_options=_RAW)

    # -- looking again ------------------------------------------------------------------------------------------------

    def _settled(self, found: _Found, uuid: bytes | None, oplogs: Oplogs, stated: ClusterTime) -> list[Difference]:
        """The candidates that differ for good."""
        differences: list[Difference] = []
        left, after = found.candidates, stated
        for turn in range(_ROUNDS):
            if not left:
                return differences
            before = self._now(uuid, left)
            after = self._replayed(left, uuid, oplogs, after)
            now = self._now(uuid, left)
            for key in list(left):
                one = left[key]
                if before.get(key) != now.get(key):
                    continue
                if one.held == now.get(key) and not one.broken:
                    del left[key]
                    continue
                one.strikes += 1
                if one.strikes >= _STRIKES:
                    del left[key]
                    differences.append(Difference(_text(one.element), _how(one.held, now.get(key))))
            time.sleep(_PAUSE_S * min(turn, 10))
        differences += [
            Difference(_text(one.element), "changed all the time, and table and collection never agreed")
            for one in left.values()
        ]
        return differences

    def _now(self, uuid: bytes | None, keys: Mapping[bytes, _Candidate]) -> dict[bytes, bytes]:
        """The documents as they are now."""
        found: dict[bytes, bytes] = {}
        for placement, name, collection in self._parts(uuid):
            elements = [one.element for one in keys.values()]
            for first in range(0, len(elements), _TOGETHER):
                for one in collection.find(_query(elements[first : first + _TOGETHER])):
                    document = raw_bson.bytes_of(one)
                    key = key_of(document)
                    if key in keys and placement.owns(name, document):
                        found[key] = self._masked(document)
        return found

    def _replayed(
        self, left: Mapping[bytes, _Candidate], uuid: bytes | None, oplogs: Oplogs, after: ClusterTime
    ) -> ClusterTime:
        """Apply what has happened to the candidates since ``after``. Returns up to when."""
        collection = None if uuid is None else TabledCollection(uuid.hex(), _NUMBER, self._namespace)
        until = self._places.now()
        numbers = iter(range(_NUMBER + 1, 1 << 30))
        while after < until:
            window = oplogs.window(after, at_once=True, at_least=until)
            if window is None:
                raise SourceError(f"the oplog cannot be read after {after}")
            if uuid is not None and collection is not None:
                fold = FoldOfOne(uuid, {uuid: collection})
                fold.read(window, lambda: next(numbers))
                for (_, key), changes in fold.grouped().items():
                    if key in left:
                        _apply(left[key], collection, key, masked_changes(self._mask, changes))
                if uuid not in fold.collections:
                    for one in left.values():
                        one.held = None
            after = window.until
        return after


def _apply(one: _Candidate, collection: TabledCollection, key: bytes, changes: list[TimedChange]) -> None:
    work = DocumentWork(collection, key, one.held, changes)
    try:
        apply_all([work])
    except StateMismatchError:
        one.broken = True
        return
    one.held = work.document


def _how(held: bytes | None, now: bytes | None) -> str:
    if held is None:
        return "is missing from the table"
    return "is in the table, but not in the collection" if now is None else "is a different document in the table"


def _digest(document: bytes) -> bytes:
    return blake2b(document, digest_size=16).digest()


def _element(document: bytes) -> bytes:
    """The element ``_id`` of a document, its name included."""
    element = raw_bson.find(document, b"_id") if document else None
    if element is None:
        raise SinkError("a row of the table holds no document with an _id")
    return document[element.start : element.end]


def _query(elements: Sequence[bytes]) -> RawBSONDocument:
    """``{_id: {$in: [...]}}`` with the values as they are."""
    values = [raw_bson.encode_element(one[0], str(number).encode(), one[5:]) for number, one in enumerate(elements)]
    array = raw_bson.encode_document(*values)
    inner = raw_bson.encode_document(raw_bson.encode_element(raw_bson.ARRAY, b"$in", array))
    return RawBSONDocument(raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"_id", inner)))


def _text(element: bytes) -> str:
    try:
        return json_util.dumps(bson.decode(raw_bson.encode_document(element))["_id"])
    except Exception:  # noqa: BLE001  what the codec cannot read is named by its bytes
        return element[5:].hex()
