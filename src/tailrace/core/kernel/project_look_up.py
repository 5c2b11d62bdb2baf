"""Paths looked up in many events at once, for expressions that plain code evaluates."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint
from tailrace.core.kernel.memory import load64, store64
from tailrace.core.kernel.project import CHILD_END, CHILD_START, CHILD_TYPE, MISSING, follow_documents
from tailrace.core.kernel.scan import document_end

#: The type of a value that has to be looked up in plain code: bytes that do not hold together; and, less the number of
#: names that are left, where there is an array on the way: then it is the array that was found.
NOT_FOUND_OUT = -1

PATH_SIZE = 16
VALUE_SIZE = 24


def _make_look_up(sources: int) -> Callable[[int], None]:
    @entry_point("void(int64)")
    def look_up(job: int) -> None:
        """``job`` is int64[8]: state, paths (how many names, the address of their table), how many paths, base, starts,
        ends, how many events; then the target, int64[events, paths, 3]: the type of the value (``MISSING`` for none),
        and where it starts and ends in its event."""
        if sources == 0:
            return
        state, paths, count = load64(job), load64(job + 8), load64(job + 16)
        base, starts, ends, target = load64(job + 24), load64(job + 32), load64(job + 40), load64(job + 56)
        for i in range(load64(job + 48)):
            start, end = base + load64(starts + 8 * i), base + load64(ends + 8 * i)
            whole = document_end(start, end) == end
            for j in range(count):
                path = paths + PATH_SIZE * j
                left = follow_documents(load64(path + 8), load64(path), state, start, end) if whole else NOT_FOUND_OUT
                type_ = load64(state + CHILD_TYPE) if left == 0 else NOT_FOUND_OUT
                if left > 0:
                    type_ = MISSING if load64(state + CHILD_TYPE) == MISSING else NOT_FOUND_OUT - left
                store64(target, type_)
                store64(target + 8, load64(state + CHILD_START) - start)
                store64(target + 16, load64(state + CHILD_END) - start)
                target += VALUE_SIZE

    return look_up


look_up = _make_look_up(fingerprint(__name__))
