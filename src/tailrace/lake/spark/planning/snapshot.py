"""Plans the copy of a stream with ``startingFrom=snapshot``: which chunks the next micro-batch reads.

This module only finds bounds, by walking the ``_id`` index; the workers read the documents. The collections of a
micro-batch are checked again when the next one is planned: a collection that was dropped meanwhile is finished, and if
another one has its name (its UUID differs), that one is copied from its beginning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SourceError
from tailrace.lake.spark.planning.input_partition import SnapshotSlice
from tailrace.lake.spark.planning.planner import Limits
from tailrace.lake.spark.query.snapshot_position import PlannedChunk, SnapshotPosition
from tailrace.read.snapshot import begin
from tailrace.read.snapshot.chunk import ChunkReader
from tailrace.read.snapshot.places import Placement
from tailrace.read.snapshot.reader import places_of
from tailrace.read.snapshot.state import CollectionCopy, SnapshotState, key_ranges
from tailrace.read.source.connection import RETRY_SECONDS
from tailrace.read.source.topology import Cluster

#: About how many bytes of documents a chunk holds; a worker has it in memory.
CHUNK_BYTES: Final = 16 << 20
#: About how many bytes a micro-batch of the copy holds at most: what is read again after a crash in it.
BATCH_BYTES: Final = 256 << 20
_CHUNKS_MAX: Final = 128
#: How often a collection may be replaced by another of the same name while it is copied.
_TRIES: Final = 20
_AVERAGE: Final = 1024

_log = logging.getLogger("tailrace.spark")


class SnapshotPlanner:
    """The copy of one scope, from the driver's side. Belongs to one thread.

    ``deployment``  the replica set's client, or the cluster
    ``selection``   the collections in the scope that are copied; ``None``: all of them
    ``per_second``  how many documents are planned in a second at most; ``None``: no limit
    """

    def __init__(
        self,
        deployment: MongoClient[Any] | Cluster,
        scope: Scope,
        per_second: float | None,
        selection: Selection | None = None,
    ) -> None:
        self._deployment = deployment
        self._scope = scope
        self._selection = selection
        self._places = places_of(deployment, RETRY_SECONDS)
        self._reader = ChunkReader(retry_seconds=RETRY_SECONDS)
        self._per_second = per_second
        self._free_at = 0.0
        self._begun = (time.monotonic(), 0)

    def begin(self) -> SnapshotPosition:
        """A copy of which nothing is planned yet."""
        return SnapshotPosition(begin(self._deployment, self._scope, selection=self._selection))

    def next(self, position: SnapshotPosition, limits: Limits | None) -> SnapshotPosition | None:
        """The position after the chunks of the next micro-batch; ``None`` if nothing is left to copy. Raises
        SourceError and ServerError."""
        state = self._checked(position)
        documents, size = self._budget(limits)
        chunks: list[PlannedChunk] = []
        index = 0
        while index < len(state.collections) and documents > 0 and size > 0 and len(chunks) < _CHUNKS_MAX:
            copy = state.collections[index]
            placement = None if copy.outcome else self._placement(copy)
            if copy.outcome:
                index += 1
                continue
            if placement is None:
                state = state.having(index, self._successor(copy))
                continue
            average = self._average(placement)
            wanted = next(one for one in copy.ranges if not one.done)
            number = copy.ranges.index(wanted)
            count = max(1, min(documents, min(CHUNK_BYTES, size) // average))
            to = self._reader.bound(placement, wanted, state.start, count)
            chunk = PlannedChunk(position.next_number + len(chunks), copy.namespace, copy.uuid, replace(wanted, to=to))
            chunks.append(chunk)
            if to == wanted.to:
                count = max(0, min(count, copy.estimate - copy.documents))
            state = state.having(index, copy.advanced(number, to, count))
            documents, size = documents - max(1, count), size - max(1, count) * average
        if not chunks:
            return None
        planned = SnapshotPosition(state, tuple(chunks), position.next_number)
        self._tell(position, planned)
        return planned

    def _budget(self, limits: Limits | None) -> tuple[int, int]:
        documents, size = 1 << 62, BATCH_BYTES
        if limits is not None:
            documents = documents if limits.events is None else limits.events
            size = size if limits.bytes is None else min(size, limits.bytes)
        if self._per_second is not None:
            documents = min(documents, max(1, int(self._per_second)))
        return documents, size

    def _tell(self, before: SnapshotPosition, after: SnapshotPosition) -> None:
        """Log how far the copy has come; with a limit, wait until the next micro-batch is due."""
        if self._per_second is not None:
            time.sleep(max(0.0, self._free_at - time.monotonic()))
            self._free_at = time.monotonic() + (after.documents - before.documents) / self._per_second
        if not before.planned and not before.chunks:
            self._begun = (time.monotonic(), before.documents)
        seconds, copied = time.monotonic() - self._begun[0], before.documents - self._begun[1]
        left = f", about {seconds / copied * (after.estimate - before.documents):.0f} s left" if copied > 0 else ""
        _log.info("copied %s of about %s documents%s", f"{before.documents:,}", f"{after.estimate:,}", left)

    # -- collections that come and go ---------------------------------------------------------------------------------

    def _checked(self, position: SnapshotPosition) -> SnapshotState:
        """The state, after checking that the collections of the last micro-batch were there until its end."""
        state = position.state
        for uuid in {chunk.uuid: None for chunk in position.chunks}:
            for index, copy in enumerate(state.collections):
                if copy.uuid == uuid and self._placement(copy) is None:
                    state = state.having(index, self._successor(copy))
        return state

    def _placement(self, copy: CollectionCopy) -> Placement | None:
        return self._places.placement(copy.uuid, copy.namespace.partition(".")[0])

    def _successor(self, copy: CollectionCopy) -> CollectionCopy:
        """What is left to copy of a collection that is gone."""
        found = self._places.named(copy.namespace)
        if found is None or found.uuid == copy.uuid:
            _log.warning("%s was dropped before all of it was copied", copy.namespace)
            return copy.ended("dropped")
        if copy.restarts >= _TRIES:
            raise SourceError(
                f"{copy.namespace} was replaced by another collection {copy.restarts} times while it was copied",
                hint="Begin a snapshot when the collection is no longer being replaced",
            )
        _log.warning("%s is another collection now: it is copied from its beginning", copy.namespace)
        return replace(
            copy, uuid=found.uuid, ranges=key_ranges(()), outcome=None, restarts=copy.restarts + 1, documents=0
        )

    def _average(self, placement: Placement) -> int:
        """About how large a document is."""
        database, _, name = placement.namespace.partition(".")
        for client in placement.members.values():
            try:
                stats = client[database].command("collStats", name)
            except PyMongoError:
                continue  # who may read a collection need not be allowed to ask
            if stats.get("avgObjSize"):
                return max(64, int(stats["avgObjSize"]))
        return _AVERAGE


def snapshot_slices(position: SnapshotPosition, parts: int) -> Sequence[SnapshotSlice]:
    """The chunks of a micro-batch, neighbours joined so that there are at most ``parts`` slices."""
    chunks = position.chunks
    parts = max(1, min(parts, len(chunks)))
    edges = [len(chunks) * part // parts for part in range(parts + 1)]
    return [SnapshotSlice(position.start, chunks[low:high]) for low, high in pairwise(edges) if low < high]
