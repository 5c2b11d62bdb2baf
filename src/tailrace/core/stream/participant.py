"""One oplog of a merged stream: the shard's stages at work, the events that wait for the merge, the shard's promise.

A participant's *promise* is the cluster time up to which nothing more will come from it. An event that waits is a
promise too: what comes after it is later.
"""

from __future__ import annotations

from tailrace.core.event.event_block import EventBlock
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.pipeline.task import Need, Task
from tailrace.core.pipeline.waiting import Place, WaitingEvents, block_is_surely_small, events_of
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import Emit, OplogBatch
from tailrace.core.stage.split_large_event import is_surely_small
from tailrace.core.stream.kernel_choice import KernelUse, working_on
from tailrace.errors import TailraceError


class Participant:
    """A shard, or with ``topology`` the config server: its events are for the merge, none of the user's.

    ``events``          finished but for the router's stages
    ``promised``        nothing at or before this cluster time will come that did not come yet
    ``failure``         what ended the participant's part; it stands after the events that wait
    ``closed``          nothing more will come, so the merge does not wait for it
    ``invalidated_by``  the token of the invalidate that ended the part, if one did
    """

    def __init__(self, name: str, plan: Plan, *, mid_stream: bool, kernel: KernelUse, topology: bool = False) -> None:
        self.name = name
        self.events = WaitingEvents()
        self.failure: TailraceError | None = None
        self.closed = False
        self.invalidated_by: ResumeToken | None = None
        self.task = Task(name)
        self.pipeline = ChangeStreamPipeline(plan, mid_stream=mid_stream, shard_part=True, on_shard=not topology)
        self._topology = topology
        # A block knows an event's token by its ``_id``.
        self._guards = self.pipeline.user_stages.replaces_id
        self._kernel: KernelUse = "never" if topology else kernel
        self._high_water = self.promised = self.pipeline.high_water

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be taken from it."""
        return self.closed or self.failure is not None

    @property
    def holds_back(self) -> bool:
        """Whether the merge has to wait for its promise: it may still give something, and nothing waits."""
        return not self.closed and not self.events

    @property
    def bound(self) -> Place | None:
        """Up to where nothing of it is missing; ``None``: nothing is, nor will be."""
        if self.closed:
            return None
        promised = Place.after(self.promised)
        return max(promised, self.events.last) if self.events else promised

    def feed(self, batch: OplogBatch) -> None:
        self._high_water = batch.high_water
        self.task.start(working_on(self.pipeline, batch, self._kernel))

    def work(self, bytes_max: int) -> Need | None:
        """Go on with the batch until it is done or enough waits, or until something is needed. Raises nothing: an error
        is kept after the events before it."""
        if self.is_over:
            self.task.drop()
        while self.task.can_go_on and self.events.bytes < bytes_max:
            try:
                out = self.task.step()
            except TailraceError as error:
                self.failure = self.failure or error
                return None
            if isinstance(out, Need):
                return out
            if out is None:
                self._finish()
            else:
                self._add(out)
            if self.is_over:
                self.task.drop()
        return None

    def promise(self, cluster_time: ClusterTime) -> None:
        """Nothing at or before ``cluster_time`` will come that was not fed."""
        self.promised = max(self.promised, cluster_time)

    def discard(self) -> None:
        """Nothing of this part is wanted any more."""
        self.closed = True
        self.events.clear()
        self.task.drop()

    def _add(self, out: EventBlock | Emit) -> None:
        if isinstance(out, EventBlock):
            self.events.add(out if block_is_surely_small(out) else events_of(out))
        elif self._topology:
            for event in out.events:
                event.bypasses = True
            self.events.add(out.events)
        elif self._guards or any(event.bypasses or not is_surely_small(event) for event in out.events):
            self.events.add(out.events)
        elif out.events:
            self.events.add(EventBlock.of(out.events))

    def _finish(self) -> None:
        if not self.pipeline.invalidated:
            self.promise(self._high_water)
            return
        self.closed = True
        if not self._topology:
            self.invalidated_by = self.pipeline.resume_token
