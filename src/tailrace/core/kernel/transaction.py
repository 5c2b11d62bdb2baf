"""Transactions in compiled code: the operations of an ``applyOps`` entry as events, alone or as a part of a chain.

One primitive, ``_put_operations``, handles the operations of one array, with what they take from the entry that commits
them. An entry that stands alone and a chain whose entries are all in the batch are done here whole or not at all; for a
chain that reaches further back, the Python side brings one entry after the other (``put_piece``).
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.crud import put_crud, take_times
from tailrace.core.kernel.definition import put_definition
from tailrace.core.kernel.delta import FALL_BACK, NO_ROOM
from tailrace.core.kernel.job import (
    CHAIN,
    CHAIN_ENTRY,
    CHAIN_MAX,
    COMMIT,
    ENTRY_STARTS,
    ENTRY_TABLE,
    EVENT,
    EVENT_NEXT,
    EVENT_TIME,
    FIRST,
    FLAGS,
    IMAGE_INDEX,
    IMAGE_TIME,
    INDEX,
    INDEX_BASE,
    KINDS,
    LSID,
    MEMBER_ENTRY,
    MEMBER_TABLE,
    MULTI_OP_IS_NO_TRANSACTION,
    OP_INDEX,
    OPERATION_TABLE,
    PLAIN,
    POSITION,
    RECORD_NEXT,
    SCOPE,
    SCOPE_KIND,
    SCOPE_SIZE,
    SKIPPED,
    TABLE,
    TIMES,
    TXN_NUMBER,
    UNWINDS_WITHOUT_SESSION,
)
from tailrace.core.kernel.memory import load8, load32, load64, store8, store64
from tailrace.core.kernel.namespace import IN_SCOPE, OUT_OF_SCOPE, command_in_scope, in_scope
from tailrace.core.kernel.oplog_entry import (
    APPLY_OPS,
    COMMIT_TRANSACTION,
    FROM_MIGRATE,
    MULTI_OP,
    NAMESPACE,
    OBJECT_1,
    OPERATION,
    PARTIAL_TXN,
    PREPARE,
    TIME,
    previous_time,
    read_command,
    read_entry,
    read_operation,
)
from tailrace.core.kernel.oplog_entry import LSID as ENTRY_LSID
from tailrace.core.kernel.oplog_entry import TXN_NUMBER as ENTRY_TXN_NUMBER
from tailrace.core.kernel.scan import (
    ARRAY,
    BOOL,
    DOUBLE,
    INT32,
    INT64,
    OBJECT,
    document_end,
    load_signed32,
    read_element,
)

_SIGN = -0x8000000000000000
_DOUBLE_ONE = 0x3FF0000000000000
_LETTER_C = 0x63
_LETTER_D = 0x64
_LETTER_I = 0x69
_LETTER_U = 0x75
#: From an element called ``applyOps`` to its value, and for ``commitTransaction``, ``prepare`` and ``partialTxn``.
_APPLY_OPS_VALUE = 10
_COMMIT_VALUE = 19
_PREPARE_VALUE = 9
_PARTIAL_VALUE = 12

_ODD = -1


@inner
def is_earlier(left: int, right: int) -> bool:
    """Whether one packed cluster time is before another: 64 bits without a sign."""
    return left ^ _SIGN < right ^ _SIGN


@inner
def _take_session(job: int, table: int) -> None:
    """Events show the session of the entry in ``table``, where it has one."""
    session = load64(table + ENTRY_LSID)
    store64(job + LSID, session)
    store64(job + TXN_NUMBER, load64(load64(table + ENTRY_TXN_NUMBER)) if session != 0 else 0)


@inner
def _put_operation(job: int, start: int, end: int, position: int) -> int:
    """The event of one operation, if it is in scope. 0, ``FALL_BACK`` or ``NO_ROOM``."""
    table = load64(job + OPERATION_TABLE)
    if not read_operation(table, start, end):
        return FALL_BACK
    name, namespace, migrate = load64(table + OPERATION), load64(table + NAMESPACE), load64(table + FROM_MIGRATE)
    letter = load8(name + 4)
    if load32(name) != 2 or letter not in (_LETTER_I, _LETTER_U, _LETTER_D, _LETTER_C):
        return FALL_BACK
    if migrate != 0 and load8(migrate) == 1:
        return 0
    first, last = namespace + 4, namespace + 3 + load32(namespace)
    kind, scope, scope_size = load64(job + SCOPE_KIND), load64(job + SCOPE), load64(job + SCOPE_SIZE)
    if letter == _LETTER_C:
        return 0 if command_in_scope(first, last, kind, scope, scope_size) == OUT_OF_SCOPE else FALL_BACK
    answer = in_scope(first, last, kind, scope, scope_size)
    if answer != IN_SCOPE:
        return 0 if answer == OUT_OF_SCOPE else FALL_BACK
    store64(job + OP_INDEX, load64(job + INDEX_BASE) + position)
    store64(job + IMAGE_INDEX, position)
    return put_crud(job, letter)


@inner
def _put_operations(job: int, array: int, first: int) -> int:
    """The events of the operations from number ``first`` on. 0, ``FALL_BACK`` or ``NO_ROOM``; ``POSITION`` is where it
    ended: the number of an operation."""
    store64(job + TABLE, load64(job + OPERATION_TABLE))
    limit = array + load32(array) - 1
    pos = array + 4
    position, status = 0, 0
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0 or load8(pos) != OBJECT:
            status = FALL_BACK
            break
        if position >= first:
            status = _put_operation(job, nul + 1, after, position)
            if status != 0:
                break
        position += 1
        pos = after
    store64(job + POSITION, position)
    return status


@inner
def _array_of(table: int) -> int:
    """The ``applyOps`` array of the entry in ``table``; 0 where it is not there as a server writes it."""
    name, document = load64(table + OPERATION), load64(table + OBJECT_1)
    if load32(name) != 2 or load8(name + 4) != _LETTER_C or document == 0 or not read_command(table, document):
        return 0
    element = load64(table + APPLY_OPS)
    return 0 if element == 0 or load8(element) != ARRAY else element + _APPLY_OPS_VALUE


@inner
def _find(job: int, time: int) -> int:
    """The number of the entry of that cluster time, before the one at hand in the batch; -1 where there is none."""
    times = load64(job + TIMES)
    low, high = 0, load64(job + INDEX)
    while low < high:
        middle = (low + high) >> 1
        if is_earlier(load64(times + 8 * middle), time):
            low = middle + 1
        else:
            high = middle
    return low if low < load64(job + INDEX) and load64(times + 8 * low) == time else -1


@inner
def _find_chain(job: int, previous: int) -> int:
    """Put the numbers of a chain's earlier entries into ``CHAIN``, the newest first. Their count; or minus a kind."""
    table, starts, chain = load64(job + MEMBER_TABLE), load64(job + ENTRY_STARTS), load64(job + CHAIN)
    time, count = load64(job + EVENT_TIME), 0
    while previous != 0:
        if previous < 0 or not is_earlier(previous, time):
            return -PLAIN
        index = _find(job, previous)
        if index < 0 or count == CHAIN_MAX:
            return -CHAIN_ENTRY
        start, end = load64(starts + 8 * index), load64(starts + 8 * index + 8)
        if document_end(start, end) != end or not read_entry(table, start, end):
            return -PLAIN
        store64(chain + 8 * count, index)
        count += 1
        time, previous = previous, previous_time(table)
    return count


@inner
def _put_chain(job: int, count: int, array: int) -> int:
    """The events of a chain of ``count`` earlier entries and the one at hand, whose ``applyOps`` is ``array`` (0:
    none). 0, ``FALL_BACK`` or ``NO_ROOM``."""
    table, starts, chain = load64(job + MEMBER_TABLE), load64(job + ENTRY_STARTS), load64(job + CHAIN)
    store64(job + INDEX_BASE, 0)
    for place in range(count - 1, -1, -1):
        index = load64(chain + 8 * place)
        if not read_entry(table, load64(starts + 8 * index), load64(starts + 8 * index + 8)):
            return FALL_BACK
        earlier = _array_of(table)
        if earlier == 0:
            return FALL_BACK
        store64(job + IMAGE_TIME, load64(load64(table + TIME)))
        status = _put_operations(job, earlier, 0)
        if status != 0:
            return status
        store64(job + INDEX_BASE, load64(job + INDEX_BASE) + load64(job + POSITION))
    store64(job + IMAGE_TIME, load64(job + EVENT_TIME))
    return _put_operations(job, array, 0) if array != 0 else 0


@inner
def _put_transaction(job: int, previous: int, array: int) -> int:
    """The kind of an entry that commits a transaction, or ``NO_ROOM``; its events, all of them or none, are written."""
    event, record = load64(job + EVENT_NEXT), load64(job + RECORD_NEXT)
    count = _find_chain(job, previous)
    if count < 0:
        return -count
    status = _put_chain(job, count, array)
    if status == 0:
        kinds, chain = load64(job + KINDS), load64(job + CHAIN)
        for place in range(count):
            index = load64(chain + 8 * place)
            if load8(kinds + index) == MEMBER_ENTRY:
                store8(kinds + index, SKIPPED)
        return EVENT
    store64(job + EVENT_NEXT, event)
    store64(job + RECORD_NEXT, record)
    return PLAIN if status == FALL_BACK else NO_ROOM


@inner
def _truth(element: int, value: int) -> int:
    """Whether a field is true; ``_ODD`` where it is no boolean."""
    if element == 0:
        return 0
    return load8(element + value) if load8(element) == BOOL else _ODD


@inner
def _is_one(element: int) -> bool:
    """Whether ``commitTransaction`` is the number one."""
    type_, value = load8(element), element + _COMMIT_VALUE
    if type_ == INT32:
        return load_signed32(value) == 1
    if type_ == INT64:
        return load64(value) == 1
    return type_ == DOUBLE and load64(value) == _DOUBLE_ONE


@inner
def _holds_alone(document: int, apply_ops: int) -> bool:
    """Whether a command holds its ``applyOps`` array, and nothing else."""
    end = apply_ops + _APPLY_OPS_VALUE + load32(apply_ops + _APPLY_OPS_VALUE)
    return apply_ops == document + 4 and end == document + load32(document) - 1


@inner
def put_command(job: int) -> int:
    """The kind of a command entry (in ``ENTRY_TABLE``), or ``NO_ROOM``; its events are written."""
    table, flags = load64(job + ENTRY_TABLE), load64(job + FLAGS)
    document = load64(table + OBJECT_1)
    if document == 0 or not read_command(table, document):
        return PLAIN
    apply_ops, commit = load64(table + APPLY_OPS), load64(table + COMMIT_TRANSACTION)
    if apply_ops == 0 and commit == 0:
        return put_definition(job, table, document)
    session, number = load64(table + ENTRY_LSID), load64(table + ENTRY_TXN_NUMBER)
    if apply_ops != 0:
        prepare = _truth(load64(table + PREPARE), _PREPARE_VALUE)
        partial = _truth(load64(table + PARTIAL_TXN), _PARTIAL_VALUE)
        if load8(apply_ops) != ARRAY or _ODD in (prepare, partial):
            return PLAIN
        if 1 in (prepare, partial):
            return MEMBER_ENTRY if session != 0 else SKIPPED
        if session == 0 and number == 0 and flags & UNWINDS_WITHOUT_SESSION == 0:
            # Operations without anything else are an entry of a later version, which the plain stage refuses.
            return PLAIN if _holds_alone(document, apply_ops) else SKIPPED
    elif session == 0 or not _is_one(commit):
        return PLAIN
    if (session == 0) != (number == 0):
        return PLAIN
    multi_op, previous = load64(table + MULTI_OP), previous_time(table)
    is_multi_op = multi_op != 0 and load_signed32(multi_op) == 1
    if is_multi_op and flags & MULTI_OP_IS_NO_TRANSACTION == 0:
        return PLAIN  # of a later version too
    take_times(job, table)
    _take_session(job, table)
    if is_multi_op:
        # Its prevOpTime leads to the session's earlier statements, which are not a part of it.
        previous = 0
        store64(job + LSID, 0)
    if apply_ops == 0:
        return PLAIN if previous == 0 or is_multi_op else _put_transaction(job, previous, 0)
    if session == 0 and previous != 0:
        return PLAIN
    return _put_transaction(job, previous, apply_ops + _APPLY_OPS_VALUE)


@inner
def put_piece(job: int) -> None:
    """The operations of the batch's one entry from number ``FIRST`` on, as far as they can be done: up to ``POSITION``.
    They are committed by the entry at ``COMMIT``. The kind is ``EVENT`` where all of them were done, else ``PLAIN``."""
    table, member, starts = load64(job + ENTRY_TABLE), load64(job + MEMBER_TABLE), load64(job + ENTRY_STARTS)
    commit, start, end = load64(job + COMMIT), load64(starts), load64(starts + 8)
    store8(load64(job + KINDS), PLAIN)
    store64(job + POSITION, load64(job + FIRST))
    if not read_entry(table, commit, commit + load32(commit)):
        return
    if document_end(start, end) != end or not read_entry(member, start, end):
        return
    array = _array_of(member)
    if array == 0:
        return
    take_times(job, table)
    _take_session(job, table)
    store64(job + IMAGE_TIME, load64(load64(member + TIME)))
    if _put_operations(job, array, load64(job + FIRST)) == 0:
        store8(load64(job + KINDS), EVENT)
