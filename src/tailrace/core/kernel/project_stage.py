"""One of the user's stages over a block of events: the entry point of ``project`` and ``project_finish``."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.memory import load8, load64, store8, store64
from tailrace.core.kernel.project import (
    EXTERNALS,
    FRAMES,
    NO_ROOM,
    ROOT,
    ROOT_END,
    TYPE,
    UNKNOWN,
    put_expression,
    put_projected,
    put_run,
)
from tailrace.core.kernel.project_finish import check_given, put_places, put_stripped
from tailrace.core.kernel.scan import OBJECT, document_end

# Slots of a job, as byte offsets.
OPERATION = 0
TARGET = 8  # a node, an expression, or the table of names of ``SET_PLACES``
PLACES_MODE = 16  # SET_PLACES: the flags of ``put_places``
STATE = 24
BASE = 32  # of the events that come
GIVEN = 40  # int64[count + 1], from BASE
COUNT = 48
VERDICTS = 56  # uint8[count]: events that do not pass are left out; those that are not known become UNKNOWN
OUT = 64  # where the events go
NEXT = 72
OFFSETS = 80  # int64[count + 1], from OUT
INDEX = 88  # the event to go on with
TOKENS = 96  # int64[2 * count]: where each token is, its start and its end; 0 where this is not the last stage
TOKEN_BASE = 104
PLACES = 112  # int64[4 * count]: where the token and ``ns`` are, from OUT
EXTERNAL_ROWS = 120  # int64[count, n, 3]: what the plain code has computed for each event
EXTERNAL_ROW = 128  # the size of one event's
JOB_SLOTS = 17

# Operations.
PROJECT = 0
REPLACE = 1
SET_PLACES = 2
STRIP = 3
COPY = 4

# Verdicts.
FAILS = 0
PASSES = 1
NOT_KNOWN = 2


@inner
def _made(job: int, index: int, state: int, start: int, end: int, out: int) -> int:  # noqa: PLR0917
    """The event after the stage."""
    operation, target = load64(job + OPERATION), load64(job + TARGET)
    store64(state + EXTERNALS, load64(job + EXTERNAL_ROWS) + index * load64(job + EXTERNAL_ROW))
    store64(state + ROOT, start)
    store64(state + ROOT_END, end)
    if operation == PROJECT:
        return put_projected(target, state, out, start, end)
    if operation == REPLACE:
        out = put_expression(target, state, out, state + FRAMES)
        return UNKNOWN if out >= 0 and load64(state + TYPE) != OBJECT else out
    if operation == SET_PLACES:
        return put_places(target, load64(job + PLACES_MODE), state, out, start, end)
    if operation == STRIP:
        return put_stripped(state, out, start, end)
    return put_run(state, out, start, end)


@inner
def _is_given(job: int, index: int, start: int, end: int) -> bool:
    tokens = load64(job + TOKENS)
    if tokens == 0:
        return True
    token = load64(tokens + 16 * index)
    size = load64(tokens + 16 * index + 8) - token
    places = load64(job + PLACES) + 32 * index
    return check_given(
        load64(job + STATE), start, end, load64(job + TOKEN_BASE) + token, size, load64(job + OUT), places
    )


def _make_stage(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def stage(job: int) -> int:
        """Work through a job from its ``INDEX`` on. 0: done. 1: there is no room for the next event's result."""
        if sources == 0:
            return 0
        state, base, verdicts = load64(job + STATE), load64(job + BASE), load64(job + VERDICTS)
        given, offsets, target = load64(job + GIVEN), load64(job + OFFSETS), load64(job + OUT)
        out = load64(job + NEXT)
        for index in range(load64(job + INDEX), load64(job + COUNT)):
            store64(offsets + 8 * index, out - target)
            if load8(verdicts + index) != PASSES:
                continue
            start, end = base + load64(given + 8 * index), base + load64(given + 8 * index + 8)
            after = UNKNOWN
            if document_end(start, end) == end:
                after = _made(job, index, state, start, end, out)
            if after == NO_ROOM:
                store64(job + INDEX, index)
                store64(job + NEXT, out)
                return 1
            if after < 0 or not _is_given(job, index, out, after):
                store8(verdicts + index, NOT_KNOWN)
            else:
                out = after
        store64(offsets + 8 * load64(job + COUNT), out - target)
        store64(job + NEXT, out)
        return 0

    return stage


stage = _make_stage(fingerprint(__name__))
