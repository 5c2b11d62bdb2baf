"""Oplog entries to change events, in compiled code: OplogMatch, UnwindTransaction and Transform for what is common.

The rules are those of semantics 2.1-2.4 and 4. Everything that is not the common case ends as ``PLAIN``: the plain
stages do it.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.crud import put_crud, take_times
from tailrace.core.kernel.delta import FALL_BACK, NO_ROOM
from tailrace.core.kernel.job import (
    COMMIT,
    COUNT,
    ENTRY_STARTS,
    ENTRY_TABLE,
    EVENT,
    IMAGE_INDEX,
    INDEX,
    KINDS,
    LSID,
    OP_INDEX,
    PLAIN,
    SCOPE,
    SCOPE_KIND,
    SCOPE_SIZE,
    SKIPPED,
    START,
    TABLE,
    TIMES,
)
from tailrace.core.kernel.memory import load8, load32, load64, store8, store64
from tailrace.core.kernel.namespace import OUT_OF_SCOPE, UNDECIDED, in_scope
from tailrace.core.kernel.oplog_entry import (
    FROM_MIGRATE,
    NAMESPACE,
    OBJECT_2,
    OPERATION,
    TIME,
    may_end_transaction,
    read_entry,
)
from tailrace.core.kernel.scan import document_end
from tailrace.core.kernel.transaction import is_earlier, put_command, put_piece

_LETTER_C = 0x63
_LETTER_D = 0x64
_LETTER_I = 0x69
_LETTER_N = 0x6E
_LETTER_U = 0x75


@inner
def _entry(job: int, start: int, end: int) -> int:
    """One entry: its kind, or ``NO_ROOM``. The events of kind ``EVENT`` are written and counted in."""
    table, index = load64(job + ENTRY_TABLE), load64(job + INDEX)
    store64(job + TABLE, table)
    times = load64(job + TIMES) + 8 * index
    store64(times, load64(times - 8) if index > 0 else 0)
    if document_end(start, end) != end or not read_entry(table, start, end):
        return PLAIN
    time = load64(load64(table + TIME))
    store64(times, time)
    if is_earlier(time, load64(job + START)):
        return SKIPPED
    migrate, name = load64(table + FROM_MIGRATE), load64(table + OPERATION)
    if load32(name) != 2:
        return PLAIN
    letter = load8(name + 4)
    if letter not in (_LETTER_I, _LETTER_U, _LETTER_D, _LETTER_N, _LETTER_C):
        return PLAIN
    if migrate != 0 and load8(migrate) == 1:
        return SKIPPED
    if letter == _LETTER_C:
        return put_command(job)
    second = load64(table + OBJECT_2)
    if letter == _LETTER_N and second != 0 and may_end_transaction(second):
        return PLAIN
    namespace = load64(table + NAMESPACE)
    answer = in_scope(
        namespace + 4,
        namespace + 3 + load32(namespace),
        load64(job + SCOPE_KIND),
        load64(job + SCOPE),
        load64(job + SCOPE_SIZE),
    )
    if answer == OUT_OF_SCOPE:
        return SKIPPED
    if answer == UNDECIDED:
        return PLAIN
    if letter == _LETTER_N:
        # It announces something, or the plain stage counts it.
        return PLAIN if second != 0 else SKIPPED
    take_times(job, table)
    store64(job + LSID, 0)
    store64(job + OP_INDEX, 0)
    store64(job + IMAGE_INDEX, 0)
    status = put_crud(job, letter)
    if status == 0:
        return EVENT
    return PLAIN if status == FALL_BACK else NO_ROOM


def _make_frame(sources: int) -> Callable[[int, int, int, int], int]:
    @entry_point("int64(int64, int64, int64, int64)")
    def frame(start: int, end: int, starts: int, room: int) -> int:
        """The number of documents in [start, end). Their addresses, and ``end`` after them, go to ``starts`` as far as
        there is room for that many.

        Where a length leads astray, the rest of the buffer counts as one document, which is then found corrupt.
        """
        if sources == 0:
            return 0
        count, pos = 0, start
        while pos < end:
            if count < room:
                store64(starts + 8 * count, pos)
            count += 1
            after = document_end(pos, end)
            pos = end if after < 0 else after
        if count < room:
            store64(starts + 8 * count, end)
        return count

    return frame


def _make_transform(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def transform(job: int) -> int:
        """Work through a job from its ``INDEX`` on. 0: done. 1: no room for events or records, give more of it."""
        if sources == 0:
            return 0
        if load64(job + COMMIT) != 0:
            put_piece(job)
            return 0
        starts, kinds = load64(job + ENTRY_STARTS), load64(job + KINDS)
        for index in range(load64(job + INDEX), load64(job + COUNT)):
            store64(job + INDEX, index)
            kind = _entry(job, load64(starts + 8 * index), load64(starts + 8 * index + 8))
            if kind == NO_ROOM:
                return 1
            store8(kinds + index, kind)
        return 0

    return transform


frame = _make_frame(fingerprint(__name__))
transform = _make_transform(fingerprint(__name__))
