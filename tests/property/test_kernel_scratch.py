"""The kernel stays inside its scratch memory: between its parts are bytes that nothing may change.

Compiled code does not check bounds by itself, and what it writes past a part lands in the next one, which need not show
in any comparison of events: with a bound planted too high, every other test passed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import bson
import numpy as np
import pytest
from bson import Binary, Int64, Timestamp

from tailrace.core.kernel import KernelSettings, batch, transform_batch
from tailrace.core.kernel.job import KEY_DOCUMENT_MAX
from tests.amounts import amount
from tests.property import random_entries
from tests.property.test_kernel_events import plan_of

ZONE = 4096
MARK = 0xA5
WALL = datetime(2026, 11, 26)
#: For each job, where a part that is too small would end: whatever the kernel writes there is noticed.
TOO_SMALL = {"key_document": 8192, "key_string": 8192, "areas": 8192, "writer": 8, "table": 64}


class Zones:
    """The scratch memory of each job with a zone after each of its parts."""

    def __init__(self, patch: pytest.MonkeyPatch, sizes: dict[str, int] | None = None) -> None:
        parts: dict[str, int] = {}
        for name, size in batch._SCRATCH_PARTS.items():
            parts[name] = (sizes or {}).get(name, size)
            parts[f"after {name}"] = ZONE
            if sizes and name in sizes:  # the rest of the part exists, so the process is not harmed
                parts[f"after {name}"] += size
        self._made: list[tuple[dict[str, int], Any, int]] = []
        right: Callable[..., Any] = batch._scratch

        def scratch(settings: KernelSettings) -> Any:
            memory, places = right(settings)
            start = batch.address(memory)
            for name, place in places.items():
                if name.startswith("after "):
                    memory[place - start : place - start + parts[name]] = MARK
            self._made.append((places, memory, start))
            return memory, places

        self._parts = parts
        patch.setattr(batch, "_SCRATCH_PARTS", parts)
        patch.setattr(batch, "_scratch", scratch)

    def touched(self) -> set[str]:
        """The parts after which something was written, since the last call."""
        found = set()
        for places, memory, start in self._made:
            for name, place in places.items():
                if name.startswith("after "):
                    zone = memory[place - start : place - start + self._parts[name]]
                    if np.any(zone != MARK):
                        found.add(name.removeprefix("after "))
        assert self._made
        self._made.clear()
        return found


def written(operation: str, time: int, **parts: Any) -> bytes:
    entry = {"op": operation, "ns": "shop.orders", "ui": Binary(bytes(16), 4), **parts}
    return bson.encode({**entry, "ts": Timestamp(time, 1), "t": Int64(1), "v": Int64(2), "wall": WALL})


def entries_at_the_limits() -> Iterator[bytes]:
    """Keys and names as long as scratch memory takes them, and a little longer and shorter."""
    time = 10
    for size in (
        100,
        4000,
        9000,
        *(KEY_DOCUMENT_MAX - less for less in (200, 64, 40, 25, 18, 17, 16, 12, 8, 1, 0, -8)),
    ):
        for key in ("x" * size, "\0" * size, Binary(b"\xff" * size), {"a": "\0" * size}, [0] * (size // 7)):
            time += 1
            identity = (
                {"_id": key} if not isinstance(key, list) else {"_id": dict.fromkeys(map(str, range(size // 7)), 0)}
            )
            yield written("i", time, o=identity)
            yield written("i", time, o=identity, o2=identity)
            yield written("d", time, o=identity)
            yield written("u", time, o={"$v": 2, "diff": {"u": {"a": 1}}}, o2=identity)
    for size in (1000, 9000, 32_000, *((1 << 16) - less for less in (64, 40, 33, 32, 16, 1, 0, -1))):
        name = "n" * size
        for diff in ({"d": {name: False}}, {"u": {name: 1}}, {f"s{name}": {"a": True, "l": 3, "u0": 1}}):
            time += 1
            yield written("u", time, o={"$v": 2, "diff": diff}, o2={"_id": 1})
            yield written("u", time, o={"$v": 2, "diff": {f"s{name}": {"d": {name: False, "b": False}}}}, o2={"_id": 1})
    for count in (100, 2000, 6000):
        diff = {"d": dict.fromkeys((f"name{number}" for number in range(count)), False)}
        yield written("u", time + 1, o={"$v": 2, "diff": diff}, o2={"_id": 1})


def entries_of_all_kinds() -> list[bytes]:
    rng = random.Random(33)
    return [random_entries.entry(rng, time) for time in range(10, 10 + amount(400, 6000))]


@pytest.mark.parametrize("v2", [False, True])
def test_nothing_is_written_between_the_parts_of_scratch_memory(v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zones = Zones(monkeypatch)
    for options in ({}, {"showExpandedEvents": True}):
        _, settings = plan_of(None, v2=v2, **options)
        for entries in (entries_of_all_kinds(), list(entries_at_the_limits())):
            made = transform_batch(b"".join(entries), settings)
            assert len(made.kind) == len(entries)
            assert zones.touched() == set()


@pytest.mark.parametrize("part", TOO_SMALL)
def test_a_bound_that_is_too_high_would_be_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the part is smaller than the compiled code assumes."""
    zones = Zones(monkeypatch, {part: TOO_SMALL[part]})
    _, settings = plan_of(None, showExpandedEvents=True)
    transform_batch(b"".join([*entries_of_all_kinds(), *entries_at_the_limits()]), settings)
    assert part in zones.touched()
