"""CheckInvalidate: after the event that ends what a stream watches comes the invalidate event (semantics 6.1)."""

from __future__ import annotations

from typing import Self

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import encode_event_token
from tailrace.core.plan.plan import Plan
from tailrace.core.stage.setup import ShardSetup, ShardStage


class CheckInvalidate(ShardStage):
    """Adds the invalidate event after its cause and lets nothing pass after it.

    The invalidate that a stream is started after does not end it: it passes once, marked, so that the resume search
    finds it. Another shard of the merged stream may log the same drop later, with another token: whatever it is, the
    first invalidate of a stream that is started after one is left out.

    With ``goes_on`` an invalidate does not end the part: before 6.0 a shard leaves that to mongos.
    """

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.plan, goes_on=setup.goes_on)

    def __init__(self, plan: Plan, *, goes_on: bool = False) -> None:
        self._goes_on = goes_on
        # By its type alone, whatever the filter lets through: the server does not look at the name again, so the drop
        # of "c\n", which its pattern takes for "c" too, ends the stream on "c" (6.0.27).
        self._ending = plan.options.scope.ending_operations
        start = plan.start_token
        self._started_after = start if start is not None and start.from_invalidate else None

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            out.append(event)
            if event.operation_type not in self._ending:
                continue
            invalidate = self._invalidate_event(event)
            started_after, self._started_after = self._started_after, None
            if started_after is None:
                out.append(invalidate)
                if not self._goes_on:
                    return
            elif invalidate.token == started_after:
                invalidate.swallow = True
                out.append(invalidate)

    def _invalidate_event(self, cause: ChangeEvent) -> ChangeEvent:
        """The invalidate: the cause's token with fromInvalidate set, its times, and nothing else."""
        token = cause.token
        document = encode_event_token(
            token.cluster_time,
            version=token.version,
            txn_op_index=token.txn_op_index,
            from_invalidate=True,
            uuid=token.uuid,
            identifier=token.event_identifier,
        )
        event = ChangeEvent("invalidate", cause.cluster_time, document)
        event.wall_time_ms = cause.wall_time_ms
        event.from_invalidate = True
        return event
