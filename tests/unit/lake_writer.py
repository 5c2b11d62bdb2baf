"""A process that appends to a lake and compacts it until its input ends, for tests of readers beside it.

python -m tests.unit.lake_writer LAKE PAUSE_SECONDS
"""

from __future__ import annotations

import select
import sys
import time
from itertools import count
from pathlib import Path

from tailrace.lake import CompactionPolicy, compact
from tailrace.lake.store.compaction import compact_after
from tests.unit.lake_events import begin, make, put, stage

#: The first event's number: the lake's first day ends after some hundred events.
FIRST = 86_400 - 500


def main(root: Path, pause: float) -> None:
    claim = make(root, root.with_name("checkpoint")).claim
    begin(root.with_name("checkpoint"))
    policy = CompactionPolicy(every=16, fan_in=4)
    for number in count():
        start = FIRST + number * 10
        commit = put(root, claim, number, stage(root, range(start, start + 10), stem=str(number)))
        assert commit is not None
        compact_after(root, commit, policy)
        if number % 50 == 49:
            compact(root)
        if select.select([sys.stdin], [], [], 0)[0]:
            return
        time.sleep(pause)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
