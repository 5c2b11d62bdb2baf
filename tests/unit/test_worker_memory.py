"""Spark's workers keep the memory of one batch for the next."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tailrace.lake.spark.worker_daemon import keep_memory_by

_PROGRAM = """
import resource, numpy
from tailrace.lake.spark.worker_daemon import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [numpy.ones(16 << 20, numpy.uint8) for _ in range(4)]
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
first = faults()
kept = keep_memory()
faults()
print(kept, first, faults())
"""


def test_a_batch_after_another_touches_no_new_pages() -> None:
    """64 MB are 16,384 pages; each was touched anew for each batch, which was a sixth of a worker's time. The benchmark
    showed this only once page faults were counted."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True)
    kept, before, after = done.stdout.split()
    if kept != "True":
        pytest.skip("no mallopt on this system")
    # Where the system gives large pages there are few faults before, too.
    assert int(after) <= min(100, int(before))


@pytest.mark.parametrize(("largest", "sizes"), [(64 << 20, [64 << 20]), (32 << 20, [32 << 20]), (0, [])])
def test_an_allocator_that_takes_no_large_size_is_left_as_it_was(largest: int, sizes: list[int]) -> None:
    """Older glibc refuses more than 32 MB. Then only the other number was set, which stops this one from adapting, so
    that each array was mapped separately: worse than nothing. The tests' systems accept 64 MB."""
    found: dict[int, list[int]] = {-1: [], -3: []}

    def mallopt(option: int, size: int) -> int:
        if option == -3 and size > largest:
            return 0
        found[option].append(size)
        return 1

    assert keep_memory_by(mallopt) == bool(sizes)
    assert found == {-3: sizes, -1: [256 << 20] if sizes else []}
