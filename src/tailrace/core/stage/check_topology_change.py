"""CheckTopologyChange: what a shard says about the cluster reaches the merge whatever the user's pipeline is.

This happens only in a shard's part of a merged stream. The server passes such an event around the rest of the shard's
stages; here it is marked, and the user's stages let it pass.
"""

from __future__ import annotations

from typing import Final

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.stage.setup import ShardSetup, ShardStage

#: The event of a chunk that moves to a shard without one: by its name up to 6.0, and by that of 7.0.
NEW_SHARD_DETECTED: Final = frozenset(("kNewShardDetected", "migrateChunkToNewShard"))


class CheckTopologyChange(ShardStage):
    """Marks the events that are for ``HandleTopologyChange`` and not for the user."""

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return setup.plan.options.needs_merge

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            if event.operation_type in NEW_SHARD_DETECTED:
                event.bypasses = True
            out.append(event)
