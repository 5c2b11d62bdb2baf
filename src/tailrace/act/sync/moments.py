"""Documents of one side of a sync as they were at one moment of its past, by the UUID of their collection: whatever it
is called, and while others write to it.

Measured: a plain ``find`` at a cluster time works from 5.0 on, on 4.4 inside a transaction. By the UUID it finds a
collection that was renamed or (7.0) dropped since; before 7.0 the server refuses a time before a rename (246).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final, cast

import bson
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from tailrace.act.sync.catalog import entries_between
from tailrace.act.sync.rights import TARGET, at_side
from tailrace.act.sync.state import SyncDocument, SyncState, document_of
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SourceError
from tailrace.read.snapshot.chunk import KeyRangeCursor, id_alone
from tailrace.read.snapshot.documents import RunOfDocuments
from tailrace.read.snapshot.reader import places_of
from tailrace.read.snapshot.state import HIGHEST, KeyRange
from tailrace.read.source.connection import RETRY_SECONDS, Connection
from tailrace.read.source.raw_reply import RawReplyCursor
from tailrace.read.source.topology import Cluster
from tailrace.read.source.witness import oplogs_of

#: The server no longer has the moment, or not yet, or the collection was not there as it is: another moment may do.
ANOTHER_MOMENT: Final = frozenset({26, 239, 246})
_EMPTY_RANGE: Final = 51175
_READ_BYTES: Final = 8 << 20
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)


class _SnapshotAt(ReadConcern):
    """A snapshot of one cluster time."""

    def __init__(self, time: ClusterTime) -> None:
        super().__init__("snapshot")
        self._time = time.to_timestamp()

    @property
    def document(self) -> dict[str, Any]:
        """As it is sent."""
        return {**super().document, "atClusterTime": self._time}


def target_now(state: SyncState) -> ClusterTime:
    """The target's time; of a cluster, one that every shard has heard of."""
    if state.cluster is not None:
        return places_of(state.cluster, RETRY_SECONDS).now()
    return ClusterTime.from_timestamp(state.client.admin.command("ping")["operationTime"])


def state_at(state: SyncState, at: ClusterTime) -> SyncDocument | None:
    """The state of a sync as it was at a time of the target's: with it comes which position the target was at."""
    client = state.client
    if state.cluster is not None:
        client = state.cluster.primary_client(state.database) or client
    with MomentReader(client, TARGET).reading(at) as (concern, session):
        there = client.get_database(state.database, read_concern=concern)
        document = there["syncs"].find_one({"_id": state.name}, session=session)
    return None if document is None else document_of(document)


_WRITES: Final = bson.encode(
    {
        "$or": [
            {"op": {"$in": ["i", "u", "d"]}, "ns": {"$not": {"$regex": r"^(admin|config|local)\."}}},
            {"op": "c", "ns": {"$not": {"$regex": r"^(config|local)\."}}},
        ]
    }
)


def nothing_written(deployment: MongoClient[Any] | Cluster, after: ClusterTime, until: ClusterTime) -> bool:
    """Whether the oplogs have no write between two times, so that the source is at the one as at the other."""
    for source in oplogs_of(deployment).values():
        oldest, is_complete = source.oldest()
        if oldest > after and not is_complete:
            return False
    return not any(True for _ in entries_between(deployment, after, until, _WRITES))


class MomentReader:
    """Reads one replica set of a side, which errors name. Belongs to one thread."""

    def __init__(self, client: MongoClient[Any], side: str) -> None:
        self._client, self._side = client, side
        self._connection = Connection(client, retry_seconds=RETRY_SECONDS)
        self._connection.wait_for_hello()
        version = self._connection.retrying(client.server_info)["versionArray"]
        self._in_transactions = version[0] < 5

    def chunk(
        self, database: str, uuid: bytes, at: ClusterTime, within: KeyRange, size: int
    ) -> tuple[RunOfDocuments, bytes]:
        """The first documents of a range, at most ``size`` and about ``_READ_BYTES``, and where the next begin. Raises
        SourceError, with a code of ``ANOTHER_MOMENT`` where another time may do."""
        found, is_cut = self._range(database, uuid, at, within, limit=size + 1, bytes_max=_READ_BYTES)
        if is_cut or len(found) > size:
            kept = RunOfDocuments(b"".join(found[:-1]))
            if kept:
                return kept, id_alone(found[-1])
            following, _ = self._range(database, uuid, at, KeyRange(id_alone(found[0]), within.to), limit=2)
            return found, within.to if len(following) < 2 else id_alone(following[1])
        if within.to == HIGHEST:
            return RunOfDocuments(found.buffer + self._highest(database, uuid, at)), HIGHEST
        return found, within.to

    def whole(self, database: str, uuid: bytes, at: ClusterTime, within: KeyRange) -> RunOfDocuments:
        """All documents of a range."""
        found, _ = self._range(database, uuid, at, within, limit=0)
        if within.to == HIGHEST:
            return RunOfDocuments(found.buffer + self._highest(database, uuid, at))
        return found

    def _range(
        self, database: str, uuid: bytes, at: ClusterTime, within: KeyRange, *, limit: int, bytes_max: int | None = None
    ) -> tuple[RunOfDocuments, bool]:
        """Documents of a range, and whether more than ``bytes_max`` came and the rest was left."""

        def read() -> tuple[RunOfDocuments, bool]:
            replies: list[bytes] = []
            size, is_cut = 0, False
            with self.reading(at) as (concern, session):
                there = self._by_uuid(database, uuid, concern)
                options: dict[str, Any] = {} if not limit else {"limit": limit, "batch_size": limit + 1}
                with closing(KeyRangeCursor(there, within.at, within.to, session=session, **options)) as cursor:
                    for reply in cursor:
                        replies.append(reply)
                        size += len(reply)
                        if bytes_max is not None and size > bytes_max:
                            is_cut = True
                            break
            return RunOfDocuments(b"".join(replies)), is_cut

        try:
            with at_side(self._side, self._client):
                return self._connection.retrying(read)
        except SourceError as error:
            if error.code == _EMPTY_RANGE:
                return RunOfDocuments(b""), False
            raise

    def _highest(self, database: str, uuid: bytes, at: ClusterTime) -> bytes:
        """The document whose ``_id`` is MaxKey, which no range ends after."""

        def read() -> bytes:
            with self.reading(at) as (concern, session):
                there = self._by_uuid(database, uuid, concern)
                query = RawBSONDocument(HIGHEST, _RAW)
                with closing(RawReplyCursor(there, query, session=session)) as cursor:
                    return b"".join(cursor)

        with at_side(self._side, self._client):
            return self._connection.retrying(read)

    @contextmanager
    def reading(self, at: ClusterTime) -> Iterator[tuple[ReadConcern | None, ClientSession | None]]:
        """What to read with: a concern, or a session that is in a transaction."""
        if not self._in_transactions:
            yield _SnapshotAt(at), None
            return
        with (
            self._client.start_session(causal_consistency=False) as session,
            session.start_transaction(read_concern=_SnapshotAt(at)),
        ):
            yield None, session

    def _by_uuid(self, database: str, uuid: bytes, concern: ReadConcern | None) -> Collection[Any]:
        """A collection that PyMongo asks for by its UUID."""
        there = self._client.get_database(database, codec_options=_RAW, read_concern=concern)
        found: Any = there.get_collection("_")
        found._name = Binary(uuid, 4)
        return cast(Collection[Any], found)


class TargetReader:
    """Reads the target of a sync at one of its times: a replica set, or what the shards of a cluster own. Belongs to
    one thread."""

    def __init__(self, state: SyncState) -> None:
        self._state = state
        self._places = None if state.cluster is None else places_of(state.cluster, RETRY_SECONDS)
        self._readers: dict[int, MomentReader] = {}

    def whole(self, database: str, uuid: bytes, at: ClusterTime, within: KeyRange) -> RunOfDocuments | None:
        """All documents of a range, in the order of ``_id`` on each shard; ``None`` where chunks moved meanwhile."""
        if self._places is None:
            return self._reader(self._state.client).whole(database, uuid, at, within)
        placement = self._places.placement(uuid, database)
        if placement is None or placement.after > at:
            return None
        self._places.now()  # each shard has heard of the time
        owned: list[bytes] = []
        for member, client in placement.members.items():
            run = self._reader(client).whole(database, uuid, at, within)
            owned += [one for one in run if placement.owns(member, one)]
        if self._places.placement(uuid, database) != placement:
            return None
        return RunOfDocuments(b"".join(owned))

    def _reader(self, client: MongoClient[Any]) -> MomentReader:
        known = self._readers.get(id(client))
        if known is None:
            known = self._readers[id(client)] = MomentReader(client, TARGET)
        return known
