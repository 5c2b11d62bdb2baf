"""How much processor time each test takes: a plugin of pytest, for looking at what ``make test`` is short of.

    COSTS=costs.tsv .venv/bin/python -m pytest -m "not slow" -n 6 --dist loadfile -p tests.processor_time

A line of ``$COSTS`` has the seconds that the test's process and everything it started used meanwhile, servers included,
the seconds that went by, the test's marks, and its name. What a test starts for later ones is counted with it. The
plugin makes a run a third longer, since it reads /proc around each test.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_OUT = Path(os.environ.get("COSTS", "costs.tsv"))


def used(root: int) -> float:
    """Seconds of processor of the process and of those below it, ended children included."""
    below: dict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        below[int(fields[1])].append(int(directory.name))
        seconds[int(directory.name)] = sum(map(int, fields[11:15])) / _TICKS
    total, rest = 0.0, [root]
    while rest:
        one = rest.pop()
        total += seconds.get(one, 0.0)
        rest += below[one]
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before, begin = used(os.getpid()), time.monotonic()
    try:
        return (yield)
    finally:
        cost, took = used(os.getpid()) - before, time.monotonic() - begin
        marks = ",".join(sorted({mark.name for mark in item.iter_markers()}))
        with _OUT.open("a") as file:
            file.write(f"{cost:.2f}\t{took:.2f}\t{marks}\t{item.nodeid}\n")
