"""One oplog of a merged stream: the shard's stages, the events that wait for the merge, and the shard's promise.

A shard's *promise* is the cluster time up to which nothing more will come from it. An event that waits is a promise
too: whatever follows it is later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Final

from tailrace.errors import TailraceError
from tailrace.event.change_event import ChangeEvent
from tailrace.event.resume_token import ResumeToken
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.pipeline.shard import ChangeStreamPipeline
from tailrace.plan.plan import Plan
from tailrace.plan.request import Answer, Emit, OplogBatch, Request
from tailrace.stage.split_large_event import approximate_bytes

#: What an event costs beside its documents.
_EVENT_BYTES: Final = 1_000


class ShardStream:
    """A participant of the merge.

    ``order``           ties between participants are broken by it
    ``events``          finished but for the router's stages, in order; ``buffered_bytes`` is about what they take
    ``promised``        everything at or before this cluster time has come
    ``failure``         what ended the shard's part; it stands after the events that wait
    ``closed``          nothing more will come, so the merge does not wait for it
    ``invalidated_by``  the token of the invalidate that ended the part, if one did

    With ``topology`` the events are the config server's: for the merge, none of the user's.
    """

    def __init__(self, name: str, plan: Plan, order: int, *, mid_stream: bool = False, topology: bool = False) -> None:
        self.name = name
        self.order = order
        self.events: deque[ChangeEvent] = deque()
        self.buffered_bytes = 0
        self.failure: TailraceError | None = None
        self.closed = False
        self.invalidated_by: ResumeToken | None = None
        self._pipeline = ChangeStreamPipeline(plan, mid_stream=mid_stream, shard_part=True, on_shard=not topology)
        self._topology = topology
        self.promised = self._pipeline.high_water

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be taken from the shard."""
        return self.closed or self.failure is not None

    @property
    def holds_back(self) -> bool:
        """Whether the merge has to wait for this shard's promise: it may still give something, and nothing waits."""
        return not self.closed and not self.events

    @property
    def unknown_operations(self) -> dict[str, int]:
        return self._pipeline.unknown_operations

    def process(self, batch: OplogBatch) -> Generator[Request | Emit, Answer, None]:
        """Run a batch through the shard's stages. Yields requests, and an empty ``Emit`` whenever events were added.

        Raises nothing: an error is kept in ``failure``, after the events before it.
        """
        running = self._pipeline.process(batch)
        answer: Answer = None
        failure: TailraceError | None = None
        try:
            while not self.is_over:
                try:
                    request = running.send(answer) if failure is None else running.throw(failure)
                except StopIteration:
                    self._finish(batch.high_water)
                    return
                except TailraceError as error:
                    self.failure = error
                    return
                answer = failure = None
                if isinstance(request, Emit):
                    self._add(request.events)
                    request = Emit([])
                try:
                    answer = yield request
                except TailraceError as error:
                    failure = error
        finally:
            running.close()

    def promise(self, cluster_time: ClusterTime) -> None:
        """Nothing at or before ``cluster_time`` will come that was not processed."""
        self.promised = max(self.promised, cluster_time)

    def discard(self) -> None:
        """Nothing of this part is wanted any more."""
        self.closed = True
        self.events.clear()
        self.buffered_bytes = 0

    def pop(self) -> ChangeEvent:
        event = self.events.popleft()
        self.buffered_bytes -= _EVENT_BYTES + approximate_bytes(event)
        return event

    def _add(self, events: list[ChangeEvent]) -> None:
        for event in events:
            event.bypasses |= self._topology
            self.buffered_bytes += _EVENT_BYTES + approximate_bytes(event)
        self.events.extend(events)

    def _finish(self, high_water: ClusterTime) -> None:
        if not self._pipeline.invalidated:
            self.promise(high_water)
            return
        self.closed = True
        if not self._topology:
            self.invalidated_by = self._pipeline.resume_token
