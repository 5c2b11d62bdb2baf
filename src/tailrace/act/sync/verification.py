"""Source and target compared at one moment, byte for byte, while both go on.

The target equals the source at each position that it commits, and its state, read at one of the target's own times,
says which position that was. So a range of ``_id`` is read at a position on the source and at the matching time on the
target; whatever differs then really differs, and nothing has to be read again. Catalogues cannot be read at a past
time: they count only if no definition of the source changed between the position and the end of reading.

How far a verification has come is kept next to the state, so that an interrupted one can be continued.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from bson.binary import Binary
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.act.sync import indexes
from tailrace.act.sync.catalog import (
    CatalogDifference,
    OnSource,
    OnTarget,
    definitions_changed,
    difference,
    name_of,
    read_catalog,
)
from tailrace.act.sync.comparing import DocumentDifference, compare_documents, compare_places
from tailrace.act.sync.moments import ANOTHER_MOMENT, MomentReader, TargetReader, nothing_written, state_at, target_now
from tailrace.act.sync.natural import AGAIN, Lying, changes, in_natural_order
from tailrace.act.sync.rights import SOURCE, TARGET, at_side
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import Committed, SyncDocument, SyncedCollection, SyncState
from tailrace.act.sync.target import answered, answering
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, SourceError, UsageError
from tailrace.read.snapshot.chunk import ChunkReader, id_alone
from tailrace.read.snapshot.documents import RunOfDocuments
from tailrace.read.snapshot.places import Placement, Places
from tailrace.read.snapshot.reader import places_of
from tailrace.read.snapshot.state import KeyRange, key_ranges
from tailrace.read.source.connection import RETRY_SECONDS
from tailrace.read.source.topology import Cluster

#: How many ranges are compared at a time.
PARALLEL: Final = 3
_CHUNK_DOCUMENTS: Final = 2_000
_CHUNK_BYTES: Final = 4 << 20
_RANGE_DOCUMENTS: Final = 50_000
_RANGES_MAX: Final = 64
_SAMPLE_DOCUMENTS: Final = 100
#: For how long a position is used: the older it is, the more the server has to keep.
_MOMENT_S: Final = 1.0
_WAIT_S: Final = 60.0
_LOOK_S: Final = 0.2
_TRIES: Final = 60
_NOTED_S: Final = 2.0
#: How many differences of one collection are named. The rest is counted.
_NAMED_MAX: Final = 100
_log = logging.getLogger("tailrace.sync")


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification found.

    Attributes:
        time: the last position that was compared; every range was compared at one no earlier than ``since``
        more: differing documents beyond those that are named
        complete: whether everything that was asked for was compared; false if the verification was stopped
    """

    since: ClusterTime
    time: ClusterTime
    documents: int = 0
    bytes: int = 0
    collections: int = 0
    differences: Sequence[DocumentDifference | CatalogDifference] = ()
    more: int = 0
    complete: bool = True

    @property
    def good(self) -> bool:
        """Whether everything was compared, and nothing differs."""
        return self.complete and not self.differences and not self.more

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "good": self.good,
            "complete": self.complete,
            "since": self.since.for_programs(),
            "time": self.time.for_programs(),
            "collections": self.collections,
            "documents": self.documents,
            "bytes": self.bytes,
            "differences": [str(one) for one in self.differences],
            "more": self.more,
        }

    def __str__(self) -> str:
        count = len(self.differences) + self.more
        return f"{self.collections:,} collections, {self.documents:,} documents at {self.time}: differences: {count:,}"


@dataclass(frozen=True, slots=True)
class VerificationProgress:
    """Documents compared so far, about how many there are, and differences found."""

    documents: int
    estimate_documents: int
    differences: int


def verify(
    source: MongoClient[Any] | Cluster,
    state: SyncState,
    settings: SyncSettings,
    *,
    sample: int | None = None,
    names: Sequence[str] = (),
    resume: bool = False,
    on_progress: Callable[[VerificationProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> Verification:
    """Compare both sides. The sync should run meanwhile: each comparison takes its newest position.

    ``sample``  how many documents of each collection, in short ranges at random, and not all
    ``names``   these collections alone, by their names on the source. All definitions are compared nevertheless
    ``resume``  go on where a verification before was interrupted

    Raises UsageError for a name that is not in the sync, SinkError where the target does not equal the source yet or
    the sync does not go on, SourceError where a side cannot be read.
    """
    tell = on_progress or (lambda _: None)
    work = _VerificationRun(source, state, settings, sample=sample, stop=stop or threading.Event(), on_progress=tell)
    return work.run(names, resume=resume)


class _Moments:
    """The position that the target is at now, with the target's time of it; asked for again when it is old.

    The sync's document, read at a time of the target, says which position the target was at then. While a definition is
    carried out or lanes are at work it is at none; then a position counts that was committed since the beginning.
    """

    def __init__(self, source: MongoClient[Any] | Cluster, state: SyncState) -> None:
        self._source = source
        self._state = state
        self._lock = threading.Lock()
        self._found: Committed | None = None
        self._asked = 0.0
        self._begun = self._now()

    def newest(self, after: ClusterTime | None = None) -> Committed:
        """A position after ``after``. Waits for it. Raises SinkError where none comes."""
        deadline = time.monotonic() + _WAIT_S
        with self._lock:
            while True:
                now = time.monotonic()
                is_early = self._found is None or (after is not None and self._found.time <= after)
                if is_early or now - self._asked >= _MOMENT_S:
                    self._found, self._asked = self._ask(after) or self._found, now
                if self._found is not None and (after is None or self._found.time > after):
                    return self._found
                if now >= deadline:
                    raise SinkError(
                        "the target equals the source at no position that could be compared"
                        if self._found is None
                        else f"the sync has stayed at {self._found.time}, and the source has gone on",
                        hint="A verification needs a running sync: start it, or wait until it has caught up",
                    )
                time.sleep(_LOOK_S)

    def _now(self) -> ClusterTime:
        return answered("tell its time", lambda: target_now(self._state))

    def _ask(self, after: ClusterTime | None) -> Committed | None:
        at = self._now()
        document = answered("read the state of the sync", lambda: state_at(self._state, at))
        if document is None:
            raise UsageError(f"there is no sync {self._state.name!r} on the target")
        found = Committed(document.time, at) if document.is_consistent else self._committed(document)
        if found is None or after is None or found.time > after:
            return found
        # A sync that does not run stays where it is. It is at the source's present where nobody has written since.
        until = places_of(self._source, RETRY_SECONDS).now()
        return Committed(until, found.at) if nothing_written(self._source, found.time, until) else found

    def _committed(self, document: SyncDocument) -> Committed | None:
        if document.phase in ("copy", "catchUp") or not document.commits:
            return None
        newest, copied = document.commits[-1], document.extra.get("copied")
        equal = copied is None or newest.time >= ClusterTime.from_timestamp(copied)
        return newest if equal and newest.at >= self._begun else None


class _VerificationRun:
    def __init__(
        self,
        source: MongoClient[Any] | Cluster,
        state: SyncState,
        settings: SyncSettings,
        *,
        sample: int | None,
        stop: threading.Event,
        on_progress: Callable[[VerificationProgress], None],
    ) -> None:
        self._source = source
        self.state = state
        self._settings = settings
        self._sample = sample
        self.stop = stop
        self._on_progress = on_progress
        self.moments = _Moments(source, state)
        self._lock = threading.Lock()
        self._found: list[DocumentDifference | CatalogDifference] = []
        self._named: dict[str, int] = {}
        self._more = self._documents = self._bytes = self._estimate = 0
        self._times: list[ClusterTime] = []
        self._kept = state.client.get_database(state.database)["verifications"]

    def run(self, names: Sequence[str], *, resume: bool) -> Verification:
        first = self.moments.newest()
        self._times = [first.time]
        collections = [one for one in self.state.collections().values() if not one.pending]
        known = {one.namespace for one in collections} | {one.target for one in collections}
        for name in names:
            if name not in known:
                raise UsageError(f"{name} is not a collection of the sync {self.state.name!r}")
        chosen = [one for one in collections if not names or one.namespace in names or one.target in names]
        definitions = self._definitions()
        ranges = self._begin(chosen, resume=resume)
        self._all(ranges)
        self._found += definitions
        complete = not self.stop.is_set()
        result = Verification(
            self._times[0],
            self._times[-1],
            self._documents,
            self._bytes,
            len(chosen),
            tuple(self._found),
            self._more,
            complete,
        )
        if complete:
            self._note(result)
        return result

    def _note(self, result: Verification) -> None:
        """Let the state tell when all of it was last found equal, or not."""
        verified = {"time": result.time.to_timestamp(), **result.to_json()}
        verified |= {"differences": len(result.differences) + result.more, "sample": self._sample}
        with answering("note the verification"):
            self._kept.delete_many({"_id.sync": self.state.name})
            self._kept.replace_one(
                {"_id": {"sync": self.state.name, "last": True}},
                {"_id": {"sync": self.state.name, "last": True}, **verified},
                upsert=True,
            )

    # -- definitions ---------------------------------------------------------------------------------------------------

    def _definitions(self) -> list[CatalogDifference]:
        """How the catalogues differ. Raises SourceError where definitions change all the time."""
        for _ in range(_TRIES):
            moment = self.moments.newest()
            waiting = indexes.waiting(self.state)
            with at_side(SOURCE):
                there = read_catalog(self._source, OnSource(self._settings)).renamed(self._settings.target_of)
            with at_side(TARGET):
                here = read_catalog(self.state.deployment, OnTarget(self._settings))
            with at_side(SOURCE):
                until = places_of(self._source, RETRY_SECONDS).now()
                has_changed = definitions_changed(self._source, moment.time, until)
            if not has_changed:
                held = {(one.namespace, name_of(one.spec)): one.held for one in waiting}
                return difference(there, here, held=held)
            time.sleep(_LOOK_S)
            self.moments.newest(after=moment.time)
        raise SourceError(
            f"definitions of the source changed during each of {_TRIES} attempts to compare them",
            hint="Verify when collections and indexes are not being created, renamed or dropped all the time",
        )

    # -- documents ---------------------------------------------------------------------------------------------------

    def _begin(self, chosen: Sequence[SyncedCollection], *, resume: bool) -> list[_RangeToCompare]:
        """The ranges to compare: those that were left of a verification before, or new ones."""
        if resume and (left := self._left({one.uuid: one for one in chosen})):
            return left
        old = {"_id.sync": self.state.name, "_id.uuid": {"$exists": True}}
        answered("begin the verification", lambda: self._kept.delete_many(old))
        ranges: list[_RangeToCompare] = []
        for one in chosen:
            ranges += self._cut(one)
        if ranges and self._sample is None:
            with answering("begin the verification"):
                self._kept.insert_many([range_.document(self.state.name) for range_ in ranges])
        return ranges

    def _left(self, chosen: Mapping[bytes, SyncedCollection]) -> list[_RangeToCompare]:
        query = {"_id.sync": self.state.name, "_id.uuid": {"$exists": True}}
        found = answered("go on with the verification", lambda: list(self._kept.find(query)))
        left = []
        for one in found:
            self._documents += int(one["documents"])
            self._estimate += int(one["estimate"])
            self._found += [DocumentDifference(*(str(part) for part in parts)) for parts in one["differences"]]
            collection = chosen.get(bytes(one["_id"]["uuid"]))
            if collection is not None and not one["done"]:
                within = KeyRange(bytes(one["at"]), bytes(one["to"]))
                left.append(_RangeToCompare(collection, int(one["_id"]["range"]), within, int(one["estimate"])))
        return left

    @at_side(SOURCE)
    def _cut(self, one: SyncedCollection) -> list[_RangeToCompare]:
        reader = ChunkReader(retry_seconds=RETRY_SECONDS)
        database = one.namespace.partition(".")[0]
        placement = places_of(self._source, RETRY_SECONDS).placement(one.uuid, database)
        if placement is None:
            return []  # dropped a moment ago
        estimate = reader.estimate(placement)
        sample = self._sample if self._sample is not None and self._sample < estimate else None
        self._estimate += sample or estimate
        if one.capped:
            return [_RangeToCompare(one, 0, key_ranges(())[0], estimate)]
        if sample is not None:
            return [
                _RangeToCompare(one, number, KeyRange(bound), _SAMPLE_DOCUMENTS, is_short=True)
                for number, bound in enumerate(self._sampled(one, placement, sample))
            ]
        cut = key_ranges(reader.ranges(placement, min(_RANGES_MAX, estimate // _RANGE_DOCUMENTS)))
        return [_RangeToCompare(one, number, within, estimate // len(cut)) for number, within in enumerate(cut)]

    def _sampled(self, one: SyncedCollection, placement: Placement, sample: int) -> list[bytes]:
        """Where short ranges begin, at random: at documents of both sides, so that one that is too many is met too."""
        count = -(-sample // _SAMPLE_DOCUMENTS)
        pipeline = [{"$sample": {"size": count}}, {"$project": {"_id": 1}}]
        clients = [(SOURCE, client, placement.namespace) for client in placement.members.values()]
        found: list[bytes] = []
        for side, client, namespace in (*clients, (TARGET, self.state.client, one.target)):  # a mongos takes that too
            database, _, name = namespace.partition(".")
            try:
                with client[database][name].aggregate_raw_batches(pipeline) as cursor:
                    found += [id_alone(document) for batch in cursor for document in raw_bson.split(batch)]
            except PyMongoError as error:
                raise SourceError(
                    f"documents of {namespace} on the {side} cannot be chosen at random: {error}"
                ) from None
        different = list(dict.fromkeys(found))
        random.shuffle(different)
        return different[:count]

    def _all(self, ranges: Sequence[_RangeToCompare]) -> None:
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="tailrace-verify") as pool:
            shares = [list(ranges[number::PARALLEL]) for number in range(PARALLEL)]
            working = [pool.submit(self._share, share) for share in shares if share]
            while not all(one.done() for one in working):
                if any(one.done() and one.exception() is not None for one in working):
                    self.stop.set()
                self._tell()
                time.sleep(0.1)
            for one in working:
                one.result()
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            count = len(self._found) + self._more
            progress = VerificationProgress(self._documents, max(self._estimate, self._documents), count)
        self._on_progress(progress)

    def _share(self, ranges: Sequence[_RangeToCompare]) -> None:
        comparer = _Comparer(self, self._source)
        for one in ranges:
            noted = time.monotonic()
            for found in comparer.compare(one):
                self._add(one, found)
                if self._sample is None and (found.end == one.within.to or time.monotonic() - noted > _NOTED_S):
                    noted = time.monotonic()
                    self._keep(one, found.end)
                if self.stop.is_set():
                    return

    def _add(self, one: _RangeToCompare, found: _Compared) -> None:
        with self._lock:
            self._documents += found.documents
            self._bytes += found.size
            self._times = [min(self._times[0], found.time), max(self._times[-1], found.time)]
            one.documents += found.documents
            for different in found.differences:
                if self._named.get(one.collection.target, 0) >= _NAMED_MAX:
                    self._more += 1
                    continue
                self._named[one.collection.target] = self._named.get(one.collection.target, 0) + 1
                self._found.append(different)
                one.differences.append(different)

    def _keep(self, one: _RangeToCompare, end: bytes) -> None:
        document = one.document(self.state.name, end)
        key = {"_id": document["_id"]}
        answered("note how far the verification is", lambda: self._kept.replace_one(key, document, upsert=True))


@dataclass(slots=True)
class _RangeToCompare:
    """A range to compare. ``is_short``: only its first documents."""

    collection: SyncedCollection
    number: int
    within: KeyRange
    estimate: int
    is_short: bool = False
    documents: int = 0
    differences: list[DocumentDifference] = field(default_factory=list)

    def document(self, sync: str, end: bytes | None = None) -> dict[str, Any]:
        """As it is kept. ``end``: it is compared before this ``_id``."""
        return {
            "_id": {"sync": sync, "uuid": Binary(self.collection.uuid, 4), "range": self.number},
            "at": Binary(end or self.within.at),
            "to": Binary(self.within.to),
            "done": end == self.within.to,
            "documents": Int64(self.documents),
            "estimate": Int64(self.estimate),
            "differences": [[one.namespace, one.id, one.how] for one in self.differences],
        }


@dataclass(frozen=True, slots=True)
class _Compared:
    """A piece of a range that was compared: up to ``end``, at ``time``."""

    end: bytes
    time: ClusterTime
    documents: int
    size: int
    differences: Sequence[DocumentDifference] = ()


class _Comparer:
    """Compares ranges, in one thread."""

    def __init__(self, work: _VerificationRun, source: MongoClient[Any] | Cluster) -> None:
        self._work = work
        self._source = source
        self._places: Places = places_of(source, RETRY_SECONDS)
        self._readers: dict[int, MomentReader] = {}
        self._target = TargetReader(work.state)

    def compare(self, one: _RangeToCompare) -> Iterator[_Compared]:
        """A range, piece by piece. Fewer come where its collection is gone."""
        within, size = one.within, _CHUNK_DOCUMENTS
        if one.is_short:
            size = _SAMPLE_DOCUMENTS
        while True:
            found = self._piece(one, within, size)
            if found is None:
                return
            yield found
            if found.end == within.to or one.is_short:
                return
            within = KeyRange(found.end, within.to)
            if found.documents and not one.is_short:
                size = max(1, min(_CHUNK_DOCUMENTS, _CHUNK_BYTES * found.documents // max(1, found.size)))

    def _piece(self, one: _RangeToCompare, within: KeyRange, size: int) -> _Compared | None:
        """The next piece, at a moment at which both sides could be read; ``None`` where the collection is gone."""
        after: ClusterTime | None = None
        last: SourceError | None = None
        for _ in range(_TRIES):
            with at_side(SOURCE):
                placement = self._places.placement(one.collection.uuid, one.collection.namespace.partition(".")[0])
            if placement is None:
                return None
            if placement.chunks is not None:
                after = max(after or placement.after, placement.after)
            moment = self._work.moments.newest(after)
            try:
                return self._at(one, within, size, moment, placement)
            except SourceError as error:
                if error.code not in ANOTHER_MOMENT and not (one.collection.capped and error.code in AGAIN):
                    raise
                last = error
                if one.collection.uuid not in self._work.state.collections():
                    return None
            except _MovedError:
                pass
            after = moment.time
            time.sleep(_LOOK_S)
        raise last or SourceError(
            f"chunks of {one.collection.namespace} moved during each of {_TRIES} attempts to compare them",
            hint="Verify when the balancer has finished",
        )

    def _at(
        self, one: _RangeToCompare, within: KeyRange, size: int, moment: Committed, placement: Placement
    ) -> _Compared:
        collection = one.collection
        database, target = placement.namespace.partition(".")[0], collection.target.partition(".")[0]
        if collection.capped:
            return self._capped(one, moment, placement)
        mine: Sequence[bytes]
        if placement.chunks is None:
            reader = self._reader(next(iter(placement.members.values())))
            mine, end = reader.chunk(database, collection.uuid, moment.time, within, size)
        else:
            mine, end = self._of_owners(placement, moment.time, within, size)
        theirs = self._target.whole(target, collection.target_uuid, moment.at, KeyRange(within.at, end))
        if theirs is None:
            raise _MovedError
        if placement.chunks is not None:
            if self._places.placement(collection.uuid, database) != placement:
                raise _MovedError
        elif isinstance(mine, RunOfDocuments) and mine.buffer == theirs.buffer:
            return _Compared(end, moment.time, len(mine), len(mine.buffer))
        return _Compared(
            end,
            moment.time,
            len(mine),
            sum(map(len, mine)),
            list(compare_documents(collection.target, mine, theirs)),
        )

    def _of_owners(
        self, placement: Placement, at: ClusterTime, within: KeyRange, size: int
    ) -> tuple[Sequence[bytes], bytes]:
        """What the shards own of a piece that none has more than ``size`` documents of."""
        database, end = placement.namespace.partition(".")[0], within.to
        found: dict[str, RunOfDocuments] = {}
        for member, client in placement.members.items():
            reader = self._reader(client)
            found[member], cut = reader.chunk(database, placement.uuid, at, KeyRange(within.at, end), size)
            if cut != end:
                end = cut
                for before in list(found)[:-1]:
                    found[before] = self._reader(placement.members[before]).whole(
                        database, placement.uuid, at, KeyRange(within.at, end)
                    )
        owned = [one for member, run in found.items() for one in run if placement.owns(member, one)]
        return owned, end

    def _capped(self, one: _RangeToCompare, moment: Committed, placement: Placement) -> _Compared:
        """A capped collection as a whole, in the order in which its documents lie. No server reads it at a moment, so
        what the source changed since the moment is left out on both sides."""
        known = one.collection
        client = next(iter(placement.members.values()))
        database, target = placement.namespace.partition(".")[0], known.target.partition(".")[0]
        with at_side(SOURCE, client):
            here = _lying(in_natural_order(client, database, known.uuid, moment.time))
        with at_side(TARGET, self._work.state.client):
            there = _lying(in_natural_order(self._work.state.client, target, known.target_uuid, moment.at))
        since = changes(client, known.uuid, moment.time, self._places.now())
        changed = {id_alone(part) for entry in since if (part := entry.o2 or entry.o) is not None}
        mine, theirs = ([pair for pair in side if pair[0] not in changed] for side in (here, there))
        if any(entry.operation == "i" for entry in since):  # the oldest may have made room on one side alone
            left = min(len(mine), len(theirs))
            mine, theirs = mine[len(mine) - left :], theirs[len(theirs) - left :]
        found = list(compare_places(known.target, mine, theirs))
        return _Compared(one.within.to, moment.time, len(here), 0, found)

    def _reader(self, client: MongoClient[Any]) -> MomentReader:
        known = self._readers.get(id(client))
        if known is None:
            known = self._readers[id(client)] = MomentReader(client, SOURCE)
        return known


class _MovedError(Exception):
    """Chunks moved while they were read."""


def _lying(found: Iterator[Lying]) -> list[tuple[bytes, bytes]]:
    """The ``_id`` of each document, and what tells its bytes apart, in their order."""
    return [(id_alone(one.document), blake2b(one.document, digest_size=16).digest()) for one in found]
