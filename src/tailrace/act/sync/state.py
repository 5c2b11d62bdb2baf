"""What a sync knows, kept only on the target: position, owner, collections, copies and indexes under way.

Each write of data is one transaction with an update of a *fence*, a document that names the owner's epoch; a newer
owner has raised the epoch there, so an old one's transaction finds nothing to update and writes nothing. The fence of
lane 0 is the sync's document itself, which holds the position too; ``ownership.py`` runs such transactions. Definitions
cannot be in one: ``definitions.py`` has a fence for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo import MongoClient, ReadPreference
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import CollectionInvalid, OperationFailure
from pymongo.read_concern import ReadConcern

from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.target import MAJORITY, answered, answering
from tailrace.act.sync.undamaged import NONE, check_types, typed, undamaged
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.witness import Witness
from tailrace.errors import UsageError
from tailrace.read.source.topology import Cluster

_FORMAT: Final = 1
#: How many positions are kept with the target's times, for comparisons of both ends.
COMMITS_KEPT: Final = 200
_NAMESPACE_EXISTS: Final = 48
#: Seconds of the source for which it is known that a collection was dropped. Shards drop one a moment apart.
_GONE_S: Final = 3600


class Committed(NamedTuple):
    """The target equals the source at ``time``, and a read of the target at its own time ``at`` sees just that."""

    time: ClusterTime
    at: ClusterTime


@dataclass(frozen=True, slots=True)
class SyncDocument:
    """The state of one sync.

    ``epoch``    how often the sync had another owner; ``owner`` the one now, until ``expires_at`` by the target's clock
    ``phase``    "copy", "catchUp" until the target equals the source for the first time, "follow", "cutOver"
    ``time``     the target equals the source at it, once it has reached ``hold``
    ``hold``     what was copied may be newer than ``time``, up to this
    ``barrier``  the definition that is being carried out: its time and command
    ``commits``  the last positions
    ``extra``    what others keep next to it: settings, verified, cut-over
    """

    name: str
    epoch: int
    owner: str | None
    expires_at: datetime | None
    phase: str
    time: ClusterTime
    hold: ClusterTime
    batch: int
    members: Mapping[str, str] = field(default_factory=dict)
    witness: Witness | None = None
    barrier: Mapping[str, Any] | None = None
    commits: Sequence[Committed] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_consistent(self) -> bool:
        """Whether the target equals the source at ``time``."""
        return self.phase not in ("copy", "catchUp") and self.time >= self.hold and self.barrier is None


@dataclass(frozen=True, slots=True)
class SyncedCollection:
    """A collection that is on the target.

    ``uuid``       the source's (16 bytes), and ``target_uuid`` the target's: the same where the rights allow it
    ``namespace``  its name on the source, and ``target`` on the target
    ``pending``    another collection has its name still: a database is getting another primary shard
    ``filled``     the shard whose migration entries fill it; empty where these only copy from shard to shard
    ``capped``     its documents keep the order in which they were inserted
    ``as_of``      of a capped collection: it was copied as it was at this time, so that what came before is in it
    """

    uuid: bytes
    namespace: str
    target: str
    target_uuid: bytes
    pending: bool = False
    filled: str = ""
    capped: bool = False
    as_of: ClusterTime = ZERO


class SyncState:
    """The state of the sync that ``settings`` name, on the target that ``client`` leads to. From any thread.

    ``cluster``  the target as a cluster, if ``client`` leads to a mongos: that writes, and the shards are read
    """

    def __init__(self, client: MongoClient[Any], settings: SyncSettings, cluster: Cluster | None = None) -> None:
        self.client = client
        self.cluster = cluster
        self.name = settings.name
        self.settings = settings
        self.database = settings.state_db
        there = client.get_database(
            settings.state_db,
            read_preference=ReadPreference.PRIMARY,
            write_concern=MAJORITY,
            read_concern=ReadConcern("majority"),
        )
        self._there = there
        self.syncs: Collection[Any] = there["syncs"]
        self.lanes: Collection[Any] = there["lanes"]
        self.fences: Collection[Any] = there["fences"]
        self._collections: Collection[Any] = there["collections"]
        self._copies: Collection[Any] = there["copies"]
        self._indexes: Collection[Any] = there["indexes"]
        self._gone: Collection[Any] = there["gone"]
        self.ranges: Collection[Any] = there["ranges"]

    @property
    def deployment(self) -> MongoClient[Any] | Cluster:
        """The target, as catalogues and verifications read it."""
        return self.cluster or self.client

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self) -> SyncDocument | None:
        """The sync's document; ``None`` where there is no such sync."""
        found = answered("read the state of the sync", lambda: self.syncs.find_one({"_id": self.name}))
        return None if found is None else document_of(found)

    def collections(self) -> dict[bytes, SyncedCollection]:
        """The collections on the target, by their UUIDs on the source."""
        found = answered("read the collections of the sync", lambda: list(self._collections.find(self._of_this)))
        with undamaged(f"what is noted about a collection of the sync {self.name!r}"):
            return {bytes(one["_id"]["uuid"]): synced_collection(one) for one in found}

    def copies(self) -> dict[bytes, dict[str, Any]]:
        """What is noted of each collection that is being copied, by UUID."""
        found = answered("read the copies of the sync", lambda: list(self._copies.find(self._of_this)))
        with undamaged(f"what is noted about a copy of the sync {self.name!r}"):
            for one in found:
                for name, types in _COPY_TYPES.items():
                    typed(one, name, *types)
            return {bytes(one["_id"]["uuid"]): one for one in found}

    def indexes(self) -> list[dict[str, Any]]:
        """What is noted of indexes that are not yet on the target as they are on the source."""
        found = answered("read the indexes of the sync", lambda: list(self._indexes.find(self._of_this)))
        with undamaged(f"what is noted about an index of the sync {self.name!r}"):
            for one in found:
                typed(one["_id"], "name", str)
                typed(one, "spec", bytes)
                typed(one, "there", bool)
        return found

    def gone(self) -> set[bytes]:
        """The UUIDs, on the source, of collections that were dropped lately: other shards may still change them."""
        found = answered("read the dropped collections of the sync", lambda: list(self._gone.find(self._of_this)))
        return {bytes(one["_id"]["uuid"]) for one in found}

    @property
    def _of_this(self) -> dict[str, Any]:
        return {"_id.sync": self.name}

    # -- beginning --------------------------------------------------------------------------------------------------

    def begin(
        self,
        time: ClusterTime,
        *,
        members: Mapping[str, str],
        witness: Witness | None,
        phase: str = "copy",
        hold: ClusterTime | None = None,
        extra: Mapping[str, Any] = {},
    ) -> None:
        """Make the state of a sync that begins at ``time``. Raises UsageError where there is one of that name."""
        self._create_collections()
        document = {
            "_id": self.name,
            "format": _FORMAT,
            "epoch": Int64(0),
            "owner": None,
            "expiresAt": None,
            "phase": phase,
            "time": time.to_timestamp(),
            "hold": (time if hold is None else hold).to_timestamp(),
            "batch": Int64(0),
            "stamp": "",
            "members": [{"name": name, "host": host} for name, host in members.items()],
            "witness": None if witness is None else witness.to_document(),
            "barrier": None,
            "commits": [],
            **extra,
        }
        with answering("begin the sync"):
            try:
                self.syncs.insert_one(document)
            except OperationFailure as error:
                if error.code != 11000:
                    raise
                raise UsageError(f"the target already has a sync {self.name!r}") from None

    def forget(self) -> None:
        """Remove the state of this sync. Of others nothing changes."""
        with answering("remove the state of the sync"):
            self.syncs.delete_one({"_id": self.name})
            kept = (self.lanes, self.fences, self._collections, self._copies, self._indexes, self.ranges, self._gone)
            for one in kept:
                one.delete_many(self._of_this)

    def _create_collections(self) -> None:
        """Transactions of 4.4 make no collections in parallel."""
        names = ("syncs", "lanes", "fences", "collections", "copies", "indexes", "ranges", "gone")

        def make() -> None:
            for name in names:
                try:
                    self._there.create_collection(name)
                except CollectionInvalid:
                    continue
                except OperationFailure as error:
                    if error.code != _NAMESPACE_EXISTS:
                        raise
            self.fences.create_index("closes", unique=True)

        answered("make the database of the sync", make)

    # -- changing it in a transaction -------------------------------------------------------------------------------

    def set_collection(self, collection: SyncedCollection, session: ClientSession) -> None:
        """Note a collection, or what changed of it."""
        document = {
            "_id": self._id(collection.uuid),
            "namespace": collection.namespace,
            "target": collection.target,
            "targetUuid": Binary(collection.target_uuid, 4),
            "pending": collection.pending,
            "filled": collection.filled,
            "capped": collection.capped,
            "asOf": None if not collection.as_of else collection.as_of.to_timestamp(),
        }
        self._collections.replace_one({"_id": document["_id"]}, document, upsert=True, session=session)

    def forget_collection(self, uuid: bytes, at: ClusterTime, session: ClientSession) -> None:
        """The collection is gone since ``at``, or no longer synced."""
        self._gone.replace_one({"_id": self._id(uuid)}, {"at": at.to_timestamp()}, upsert=True, session=session)
        old = ClusterTime.of(max(0, at.seconds - _GONE_S), 0).to_timestamp()
        self._gone.delete_many({**self._of_this, "at": {"$lt": old}}, session=session)
        self._collections.delete_one({"_id": self._id(uuid)}, session=session)
        self._copies.delete_one({"_id": self._id(uuid)}, session=session)
        self.ranges.delete_many({**self._of_this, "_id.uuid": Binary(uuid, 4)}, session=session)
        self._indexes.delete_many({**self._of_this, "_id.uuid": Binary(uuid, 4)}, session=session)

    def set_copy(self, uuid: bytes, fields: Mapping[str, Any], session: ClientSession) -> None:
        """Note how far the copy of a collection is."""
        self._copies.replace_one({"_id": self._id(uuid)}, dict(fields), upsert=True, session=session)

    def forget_copy(self, uuid: bytes, session: ClientSession) -> None:
        """The copy of a collection is done."""
        self._copies.delete_one({"_id": self._id(uuid)}, session=session)

    def note_index(self, uuid: bytes, name: str, fields: Mapping[str, Any], session: ClientSession) -> None:
        """Note an index that is not yet as it is on the source: built later, or its TTL held."""
        key = {**self._id(uuid), "name": name}
        self._indexes.replace_one({"_id": key}, dict(fields), upsert=True, session=session)

    def forget_index(self, uuid: bytes, name: str, session: ClientSession) -> None:
        """The index is as on the source, or gone."""
        self._indexes.delete_one({"_id": {**self._id(uuid), "name": name}}, session=session)

    def _id(self, uuid: bytes) -> dict[str, Any]:
        return {"sync": self.name, "uuid": Binary(uuid, 4)}


_FIELDS: Final = frozenset(
    [
        "_id",
        "format",
        "epoch",
        "owner",
        "expiresAt",
        "phase",
        "time",
        "hold",
        "batch",
        "stamp",
        "members",
        "witness",
        "barrier",
        "commits",
        "sessions",
    ]
)


#: Copy, catch up, follow, cut over; and a way back whose state is not whole yet.
_PHASES: Final = frozenset(["copy", "catchUp", "follow", "cutOver", "begun"])
_BARRIER: Final = {"time": (Timestamp,), "command": (str,), "namespace": (str,)}
#: What may be there besides.
_EXTRA_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "stamp": (str,),
    "sessions": (list,),
    "prepared": (bool,),
    "making": (list,),
    "copied": (Timestamp,),
    "paused": (bool,),
    "settings": (dict,),
    "deployment": (dict,),
    "request": (dict, NONE),
    "cutOver": (dict,),
}
_COPY_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "specs": (list,),
    "collated": (bool,),
    "capped": (bool,),
    "options": (bytes,),
    "idIndex": (bytes, NONE),
}


def document_of(found: Mapping[str, Any]) -> SyncDocument:
    """The state of a sync from its document. Raises SinkError where that is damaged."""
    with undamaged(f"the document of the sync {found.get('_id')!r}"):
        if typed(found, "format", int) != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        if typed(found, "phase", str) not in _PHASES:
            raise ValueError(f"its phase is {found['phase']!r}")
        check_types(found, _EXTRA_TYPES)
        barrier, witness = typed(found, "barrier", dict, NONE), typed(found, "witness", dict, NONE)
        if barrier is not None:
            for name, types in _BARRIER.items():
                typed(barrier, name, *types)
        return SyncDocument(
            name=str(found["_id"]),
            epoch=int(typed(found, "epoch", int)),
            owner=typed(found, "owner", str, NONE),
            expires_at=typed(found, "expiresAt", datetime, NONE),
            phase=found["phase"],
            time=ClusterTime.from_timestamp(typed(found, "time", Timestamp)),
            hold=ClusterTime.from_timestamp(typed(found, "hold", Timestamp)),
            batch=int(typed(found, "batch", int)),
            members={typed(one, "name", str): typed(one, "host", str) for one in typed(found, "members", list)},
            witness=None if witness is None else Witness.from_document(witness),
            barrier=barrier,
            commits=[
                Committed(ClusterTime.from_timestamp(one["time"]), ClusterTime.from_timestamp(one["at"]))
                for one in typed(found, "commits", list)
            ],
            extra={name: value for name, value in found.items() if name not in _FIELDS},
        )


def synced_collection(found: Mapping[str, Any]) -> SyncedCollection:
    """What is noted of a collection. Raises LookupError, TypeError or ValueError where that is damaged."""
    as_of = typed(found, "asOf", Timestamp, NONE) if "asOf" in found else None
    return SyncedCollection(
        uuid=bytes(typed(found["_id"], "uuid", bytes)),
        namespace=typed(found, "namespace", str),
        target=typed(found, "target", str),
        target_uuid=bytes(typed(found, "targetUuid", bytes)),
        pending=typed(found, "pending", bool),
        filled=typed(found, "filled", str),
        capped=typed(found, "capped", bool),
        as_of=ZERO if as_of is None else ClusterTime.from_timestamp(as_of),
    )
