"""The match after the transform: without showExpandedEvents only the classic types of event remain (semantics 2.2)."""

from __future__ import annotations

from typing import Final

from tailrace.event.change_event import ChangeEvent

CLASSIC_TYPES: Final = frozenset(
    (
        "delete",
        "drop",
        "dropDatabase",
        "insert",
        "invalidate",
        "kNewShardDetected",
        "rename",
        "replace",
        "reshardBegin",
        "reshardDoneCatchUp",
        "update",
    )
)


class MatchClassicEvents:
    """Drops the events that only showExpandedEvents shows."""

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        out.extend(event for event in events if event.operation_type in CLASSIC_TYPES)
