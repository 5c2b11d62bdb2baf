"""Capped collections, whose documents lie in the order in which they came: copied as a whole, as they were at one time.

No transaction writes to them, and the order must not depend on what was copied when. So a capped collection is read
from its first document to the one that was the last at a time, ``as_of``. The follower leaves out what the source
changed up to that time, and appends what came later. One whose copy was interrupted is created again: nobody knows how
much of the last write arrived.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from pymongo import MongoClient
from pymongo.client_session import ClientSession

from tailrace.act.sync import indexes
from tailrace.act.sync.capped_changes import CappedWriter
from tailrace.act.sync.catalog import CatalogCollection, version_of
from tailrace.act.sync.commands import TargetCommands
from tailrace.act.sync.fold import CappedChange
from tailrace.act.sync.natural import AGAIN, in_natural_order, last_inserted
from tailrace.act.sync.ownership import SyncOwnership
from tailrace.act.sync.state import SyncedCollection, SyncState
from tailrace.act.sync.target import answered
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, SourceError
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import RETRY_SECONDS, collection_of
from tailrace.read.source.topology import Cluster
from tailrace.read.window.apply import INSERT

_TRIES: Final = 20
_PAUSE_S: Final = 0.5
#: How many bytes of documents one command writes; a larger document goes alone.
_BYTES: Final = 4 << 20
_UNAUTHORIZED: Final = 13


class CappedCopy:
    """Copies capped collections of one sync."""

    def __init__(self, source: MongoClient[Any] | Cluster, state: SyncState, ownership: SyncOwnership) -> None:
        self._source = source
        self._state = state
        self._ownership = ownership
        self._writer = CappedWriter(TargetCommands(ownership))

    def copy(self, known: SyncedCollection, kept: Mapping[str, Any]) -> int:
        """Copy a collection, of which ``kept`` is noted in the state. Returns how many documents it had. Raises
        SourceError, SinkError and LeaseLost."""
        for left in reversed(range(_TRIES)):
            places = places_of(self._source, RETRY_SECONDS)
            placement = places.placement(known.uuid, known.namespace.partition(".")[0])
            known, at = self._emptied(known, kept), places.now()
            count = 0
            if placement is None:
                break  # dropped, as the follower will see
            client = next(iter(placement.members.values()))
            try:
                count, at = self._all(known, client, placement.namespace.partition(".")[0], at)
                break
            except SourceError as error:
                if not left or error.code not in AGAIN:
                    raise
            time.sleep(_PAUSE_S)
        done = SyncedCollection(known.uuid, known.namespace, known.target, known.target_uuid, capped=True, as_of=at)

        def note(session: ClientSession) -> None:
            self._state.set_collection(done, session)
            self._state.set_copy(known.uuid, {**_fields(kept), "whole": True}, session)

        self._ownership.run(note, what=f"note the copy of {known.target}")
        return count

    def _all(
        self, known: SyncedCollection, client: MongoClient[Any], database: str, now: ClusterTime
    ) -> tuple[int, ClusterTime]:
        """Copy every document that was there at a time. Returns how many, and the time."""
        last, at = last_inserted(client, database, known.uuid, now)
        together: list[bytes] = []
        size = count = 0
        for record, document in in_natural_order(client, database, known.uuid, at):
            if record > last:
                break
            if together and size + len(document) > _BYTES:
                self._write(known, together)
                together, size = [], 0
            together.append(document)
            size += len(document)
            count += 1
        if together:
            self._write(known, together)
        return count, at

    def _emptied(self, known: SyncedCollection, kept: Mapping[str, Any]) -> SyncedCollection:
        """The collection without documents: made again where a process that died has left some."""
        database, _, name = known.target.partition(".")
        there = collection_of(self._state.client[database], name)
        if answered(f"read {known.target}", lambda: there.find_one({}, {"_id": 1})) is None:
            return known
        indexes.drop(self._state.client, known.target, ownership=self._ownership)
        version = version_of(self._state.deployment)
        id_index = None if kept["idIndex"] is None else bytes(kept["idIndex"])
        specs = tuple(bytes(one) for one in kept["specs"])
        made = CatalogCollection(known.target, "collection", known.uuid, bytes(kept["options"]), id_index, specs)
        uuid = indexes.create(self._state.client, made, version, ownership=self._ownership)
        indexes.build_early(self._state.client, made, version, check=self._ownership.check)
        again = SyncedCollection(known.uuid, known.namespace, known.target, uuid, capped=True)
        self._ownership.run(lambda session: self._state.set_collection(again, session), what="note a new collection")
        return again

    def _write(self, known: SyncedCollection, documents: list[bytes]) -> None:
        """Write documents in their order, after the check of the fence."""
        changes = [CappedChange(known.uuid, INSERT, _id_of(one), one, 0) for one in documents]
        try:
            self._writer.write(changes, {known.uuid: known})
        except SinkError as error:
            if error.code != _UNAUTHORIZED:
                raise
            raise SinkError(
                f"{known.target} is capped, and the target's user may not write to it as a sync has to (applyOps)",
                code=error.code,
                hint="Grant it the role restore, and the actions applyOps, forceUUID and useUUID on the cluster; "
                "or leave the collection out (--except)",
            ) from None


def _id_of(document: bytes) -> bytes:
    element = raw_bson.find(document, b"_id")
    if element is None:
        raise SourceError("a document without _id")
    return document[element.start : element.end]


def _fields(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kept.items() if name != "_id"}
