"""A report's differences as cases: its entries through our stream, beside the server's event in the report.

    python -m tests.compare.replay report.json      says of each case whether it is met now

A case that a user has sent in becomes a test by ``cases`` and ``Case.difference``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.watch.compare.report import read_report
from tests.differential.first_difference import first_difference
from tests.golden.recording import entry_time
from tests.golden.replay import MemoryOplog, OurStream


@dataclass(frozen=True)
class Case:
    """One difference of a report: what the oplog had, and what the server made of it."""

    server: str
    scope: tuple[str | None, str | None]
    stage: dict[str, Any]
    expected: bytes
    entries: tuple[bytes, ...]
    pre_images: tuple[bytes, ...]

    def difference(self) -> str | None:
        """How ours differs from the server's event; ``None`` where one of ours is that event."""
        database, collection = self.scope
        start = entry_time(self.entries[0]).to_timestamp()
        stage: dict[str, Any] = {**self.stage, "startAtOperationTime": start}
        if database is None:
            stage["allChangesForCluster"] = True
        command = {"aggregate": 1 if collection is None else collection, "pipeline": [{"$changeStream": stage}]}
        oplog = MemoryOplog(self.entries, self.pre_images, lambda lookups: [None] * len(lookups))
        # The oplog is meant to begin earlier: the report does not have the entry at which the server's own clock stood.
        ours = OurStream(oplog, database or "admin", command, server=self.server)
        ours.advance(ClusterTime(entry_time(self.entries[-1]) + 1))
        if self.expected in ours.events:
            return None
        if not ours.events:
            return f"no event (error {ours.error})"
        path, theirs, mine = first_difference(self.expected, ours.events[0])
        return f"at {path}:\n  server {theirs}\n  ours   {mine}"


def cases(report: dict[str, Any]) -> Iterator[Case]:
    """The differences of a report that hold everything a stream needs, shard by shard: none where a user's stages made
    the events."""
    for difference in report["differences"]:
        if not difference["replayable"]:
            continue
        entries: dict[str, list[bytes]] = {}
        for one in difference["entries"]:
            entries.setdefault(one["shard"], []).append(bytes(one["entry"]["bson"]))
        for of_shard in entries.values():
            yield Case(
                report["server"],
                (report["scope"]["database"], report["scope"]["collection"]),
                report["stage"],
                bytes(difference["server"]["bson"]),
                tuple(of_shard),
                tuple(bytes(one["bson"]) for one in difference["preImages"]),
            )


def replay_report(path: Path) -> int:
    """How many cases of the report are met. Raises AssertionError for the first that is not."""
    count = 0
    for case in cases(read_report(path)):
        difference = case.difference()
        assert difference is None, difference
        count += 1
    return count


def main(arguments: list[str]) -> int:
    """Says of each case of the report whether it is met; 1 where one is not."""
    found = [case.difference() for case in cases(read_report(Path(arguments[0])))]
    for number, difference in enumerate(found, 1):
        print(f"case {number}: {'met' if difference is None else difference}")
    print(f"{len(found)} cases, {sum(one is not None for one in found)} not met")
    return 1 if any(one is not None for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
