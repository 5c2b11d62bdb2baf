"""The process that Spark's Python workers are forked from, with the stages, kernel and Arrow loaded already.

Spark starts it as ``python -m tailrace.lake.spark.worker_daemon`` where ``spark.python.daemon.module`` says so
(``local_session`` does). A worker that loads them itself takes 0.6 to 1.2 s before its first event, and a query is
again and again given workers that have not read before (measured on two cores: Spark keeps any idle ones). Nothing that
is loaded here starts a thread, opens a connection or reads a clock, so a fork is safe.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Final

import pyspark.daemon

import tailrace.lake.spark.reading.slice_reader
import tailrace.lake.spark.store.source
import tailrace.lake.store.part_writer  # noqa: F401
from tailrace.core import kernel

#: glibc's parameters of ``mallopt``, and their values: how much free memory at the heap's end is kept, and from which
#: size on a block is mapped separately and goes back to the system at once.
_TRIM_THRESHOLD: Final = -1, 256 << 20
#: The second one is the largest that glibc's manual allows: older versions refuse a larger one.
_MMAP_THRESHOLDS: Final = (-3, 64 << 20), (-3, 32 << 20)


def keep_memory() -> bool:
    """Let this process, and those forked from it, use the memory of one batch again for the next.

    glibc gives it back to the system between two batches, and a page that is touched for the first time is expensive in
    a virtual machine: 0.4 to 0.8 µs of 4 an event. The two numbers limit what a process keeps. Returns whether it was
    done: the allocators of other systems behave differently.
    """
    if sys.platform != "linux":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and keep_memory_by(set_option)


def keep_memory_by(set_option: Callable[[int, int], int]) -> bool:
    """``keep_memory`` with the system's ``mallopt``. The trim threshold is set only if the other one was: alone it
    would leave blocks of 128 KB and more to the system for good."""
    return any(set_option(*size) == 1 for size in _MMAP_THRESHOLDS) and set_option(*_TRIM_THRESHOLD) == 1


if __name__ == "__main__":
    keep_memory()
    if kernel.comes_compiled():
        kernel.warm_up()
    pyspark.daemon.manager()
