"""How far the copy of a stream with ``startingFrom=snapshot`` has come, as its offsets hold it.

    {"chunks": [{"at": {...}, "collection": 0, "to": {...}, ...}], "planned": 12, "state": {...}}

``state`` is the snapshot's (``tailrace.read.snapshot.state``): its time, and what is left of each collection.
``chunks`` are those of the micro-batch that ends here, in their order, so that it can be read again as it was planned;
``planned`` is how many there were before them. A chunk's number among all of them is in its rows' tokens, which
therefore ascend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bson import json_util
from bson.binary import Binary

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.snapshot.state import KeyRange, SnapshotState, bound_document, bound_of


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """The documents of one collection with ``_id`` in a range.

    ``number``     among all chunks of the copy, from 0 on
    ``namespace``  the collection's name in the stream; ``uuid`` (16 bytes) identifies it
    """

    number: int
    namespace: str
    uuid: bytes
    range: KeyRange

    def to_document(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace,
            "uuid": Binary(self.uuid, 4),
            "at": bound_document(self.range.at),
            "to": bound_document(self.range.to),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], number: int) -> PlannedChunk:
        uuid = document["uuid"]
        return cls(
            number,
            str(document["namespace"]),
            bytes(getattr(uuid, "bytes", uuid)),
            KeyRange(bound_of(document["at"]), bound_of(document["to"])),
        )


@dataclass(frozen=True, slots=True)
class SnapshotPosition:
    """See the module's description. ``state`` is that after ``chunks``."""

    state: SnapshotState
    chunks: tuple[PlannedChunk, ...] = ()
    planned: int = 0

    @property
    def start(self) -> ClusterTime:
        """The snapshot's time: the copy holds what happened up to there, and the stream after it what came later."""
        return self.state.start

    @property
    def next_number(self) -> int:
        return self.planned + len(self.chunks)

    @property
    def documents(self) -> int:
        """About how many documents are copied."""
        return sum(one.documents for one in self.state.collections)

    @property
    def estimate(self) -> int:
        """About how many documents there are."""
        return sum(one.documents if one.outcome else max(one.estimate, one.documents) for one in self.state.collections)

    def to_json(self) -> dict[str, Any]:
        """Keys in sorted order, on every level: Spark compares offsets as texts."""
        document = {
            "chunks": [chunk.to_document() for chunk in self.chunks],
            "planned": self.planned,
            "state": self.state.to_document(),
        }
        text = json_util.dumps(document, json_options=json_util.RELAXED_JSON_OPTIONS, sort_keys=True)
        result: dict[str, Any] = json.loads(text)
        return result

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SnapshotPosition:
        """Raises UsageError, KeyError, TypeError, ValueError or AttributeError if it is something else."""
        document = json_util.loads(json.dumps(value))
        planned = int(document["planned"])
        chunks = [PlannedChunk.from_document(one, planned + place) for place, one in enumerate(document["chunks"])]
        return cls(SnapshotState.from_document(document["state"]), tuple(chunks), planned)
