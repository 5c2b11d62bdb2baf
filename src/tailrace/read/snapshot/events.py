"""The events of a copy one by one, and after each of them the place where another reader can continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tailrace.core import raw_bson
from tailrace.core.expression.stages.pipeline import CompiledPipeline
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.stage.user_stages import check_id
from tailrace.errors import UsageError
from tailrace.read.snapshot.chunk import id_alone, order_of
from tailrace.read.snapshot.reader import SnapshotChunk, SnapshotProgress, SnapshotReader
from tailrace.read.snapshot.state import SnapshotState


class SnapshotEvents:
    """What ``reader`` copies, as events that went through the user's ``stages``. Belongs to one thread.

    ``chunk``  how many chunks of the copy were given before, from ``place_of``
    """

    def __init__(self, reader: SnapshotReader, stages: CompiledPipeline, chunk: int = 0) -> None:
        self._reader = reader
        self._stages = stages
        self._number = chunk
        self._chunks: Iterator[SnapshotChunk] | None = None
        #: The chunk whose events are being given, and those that are left of it, each with its document's number.
        self._chunk: SnapshotChunk | None = None
        self._left: list[tuple[int, bytes]] = []
        #: How many documents of the chunk were given.
        self._given = 0

    def next(self) -> bytes | None:
        """The next event; ``None`` where there is none left, nothing of the next chunk is shown, or the reader was
        stopped. An error leaves everything as it was: the next call tries again."""
        if not self._left and not self._next_chunk():
            return None
        number, event = self._left.pop()
        self._given = number + 1
        if not self._left:
            self._finish_chunk()
        return event

    def _next_chunk(self) -> bool:
        """Read a chunk; whether there are events of it."""
        self._finish_chunk()
        try:
            if self._chunks is None:
                self._chunks = iter(self._reader)
            chunk = next(self._chunks, None)
            if chunk is None:
                self._chunks = None
                return False
            self._begin_chunk(chunk)
        except BaseException:
            self._chunks = None
            raise
        if not self._left:
            self._finish_chunk()
        return bool(self._left)

    @property
    def at_hand(self) -> bool:
        """Whether the next event was read already."""
        return bool(self._left)

    @property
    def start(self) -> ClusterTime:
        """The snapshot's time."""
        return self._reader.state.start

    @property
    def is_complete(self) -> bool:
        """Whether every event was given."""
        return self._chunk is None and self._reader.state.is_complete

    @property
    def progress(self) -> SnapshotProgress:
        """How far the copy has come."""
        return self._reader.progress

    def _begin_chunk(self, chunk: SnapshotChunk) -> None:
        if not chunk.in_order:
            chunk = replace(chunk, documents=tuple(sorted(chunk.documents, key=order_of)))
        shown = [(number, self._shown(event)) for number, event in enumerate(chunk.events(self._number))]
        self._left = [(number, event) for number, event in reversed(shown) if event is not None]
        self._chunk, self._given = chunk, 0

    def _finish_chunk(self) -> None:
        if self._chunk is not None:
            self._reader.done(self._chunk)
            self._chunk = None
            self._number += 1

    def _shown(self, event: bytes) -> bytes | None:
        shown = self._stages.apply(event)
        if shown is not None and shown is not event:
            token = raw_bson.find(event, b"_id")
            assert token is not None
            check_id(raw_bson.value(event, token), shown)
        return shown

    def place(self) -> dict[str, Any]:
        """Where it goes on after the last event given: a document that ``place_of`` reads."""
        state = self._reader.state
        chunk, given = self._chunk, self._given
        if chunk is None:
            return _place(state, self._number)
        # One _id may be there on several shards, against all rules. They are given again together.
        while not chunk.in_order and given and order_of(chunk.documents[given - 1]) == order_of(chunk.documents[given]):
            given -= 1
        copy = state.collections[chunk.collection]
        if not given or copy.uuid != chunk.uuid or copy.outcome is not None:
            return _place(state, self._number)
        if chunk.in_order:
            moved = copy.before(chunk.number, id_alone(chunk.documents[given]), given)
        else:
            moved = copy.within(chunk.number, chunk.to, id_alone(chunk.documents[given - 1]), given)
        return _place(state.having(chunk.collection, moved), self._number)


def _place(state: SnapshotState, number: int) -> dict[str, Any]:
    return {"chunk": number, **state.to_document()}


def place_of(document: Any) -> tuple[SnapshotState, int]:
    """The state, and the number of the chunk that comes next. Raises UsageError where it is something else."""
    number = document.get("chunk") if isinstance(document, Mapping) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UsageError(
            "the resume token holds a snapshot's place that cannot be read: it has no chunk number",
            hint="Pass the token on as it came from the stream, or begin the snapshot again",
        )
    return SnapshotState.from_document(document), number
