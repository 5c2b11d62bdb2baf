"""The match after the transform: without showExpandedEvents only the classic types of event remain (semantics 2.2)."""

from __future__ import annotations

from typing import Final

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.stage.setup import ShardSetup, ShardStage

CLASSIC_TYPES: Final = frozenset(
    (
        "delete",
        "drop",
        "dropDatabase",
        "insert",
        "invalidate",
        "kNewShardDetected",
        "migrateChunkToNewShard",
        "rename",
        "replace",
        "reshardBegin",
        "reshardBlockingWrites",
        "reshardDoneCatchUp",
        "update",
    )
)


class MatchClassicEvents(ShardStage):
    """Drops the events that only showExpandedEvents shows."""

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return not setup.plan.options.show_expanded_events

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        out.extend(event for event in events if event.operation_type in CLASSIC_TYPES)
