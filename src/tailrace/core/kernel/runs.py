"""Runs of bytes copied to where they are wanted, in compiled code."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint
from tailrace.core.kernel.memory import copy, load64


def _make_copy_runs(sources: int) -> Callable[[int], None]:
    @entry_point("void(int64)")
    def copy_runs(job: int) -> None:
        """Copy runs of bytes. ``job`` is int64[6]: their count, base, starts, ends; then the target and the place there
        of each run."""
        if sources == 0:
            return
        base, starts, ends = load64(job + 8), load64(job + 16), load64(job + 24)
        target, places = load64(job + 32), load64(job + 40)
        for i in range(load64(job)):
            start = load64(starts + 8 * i)
            copy(target + load64(places + 8 * i), base + start, load64(ends + 8 * i) - start)

    return copy_runs


copy_runs = _make_copy_runs(fingerprint(__name__))
