"""Where the fields of an oplog entry lie, in compiled code: the counterpart of ``tailrace.core.oplog.entry``.

A *table* is a block of int64 slots, one for each field: the address of its value, or 0 where it is missing. Fields
whose type is not what the server writes, and names that occur twice, make the entry one for the plain stages.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.memory import load8, load32, load64, store64
from tailrace.core.kernel.scan import (
    BINARY,
    BOOL,
    DATE,
    INT32,
    INT64,
    OBJECT,
    STRING,
    TIMESTAMP,
    find_nul,
    name_word,
    read_element,
    word_of,
)

# Slots of the table, as byte offsets: the entry's own fields ...
TIME = 0
OPERATION = 8
NAMESPACE = 16
UUID = 24
OBJECT_1 = 32  # o
OBJECT_2 = 40  # o2
WALL = 48
FROM_MIGRATE = 56
LSID = 64
TXN_NUMBER = 72
PREV_OP_TIME = 80
MULTI_OP = 88  # multiOpType
_ENTRY_FIELDS = 12
# ... those of an update's ``o``: the address of the *element*, or 0 ...
ID = 96
VERSION = 104
DIFF = 112
SET = 120
UNSET = 128
_UPDATE_END = 136
# ... and those of a command's.
APPLY_OPS = 136
COMMIT_TRANSACTION = 144
PREPARE = 152
PARTIAL_TXN = 160
TABLE_SIZE = 168

_UNKNOWN = -1
_LETTER_N = 0x6E

_TS = word_of(b"ts")
_OP = word_of(b"op")
_NS = word_of(b"ns")
_UI = word_of(b"ui")
_O = word_of(b"o")
_O2 = word_of(b"o2")
_WALL = word_of(b"wall")
_LSID = word_of(b"lsid")
_TXN_NUMBER = word_of(b"txnNumber")
_PREV_OP_TIME = word_of(b"prevOpTime")
_FROM_MIGRATE = word_of(b"fromMigrate")
_ID = word_of(b"_id")
_V = word_of(b"$v")
_DIFF = word_of(b"diff")
_SET = word_of(b"$set")
_UNSET = word_of(b"$unset")
_MULTI_OP_TYPE = word_of(b"multiOpType")
_APPLY_OPS = word_of(b"applyOps")
_COMMIT = word_of(b"commitTransaction")
_COMMIT_MIDDLE = word_of(b"ansactio")
_PREPARE = word_of(b"prepare")
_PARTIAL_TXN = word_of(b"partialTxn")
# The names by which a command tells what it does to a collection; of longer names the first eight bytes.
_DROP = word_of(b"drop")
_DROP_DATABASE = word_of(b"dropDatabase")
_DROP_INDEXES = word_of(b"dropIndexes")
_RENAME = word_of(b"renameCollection")
_CREATE = word_of(b"create")
_CREATE_INDEXES = word_of(b"createIndexes")
_COMMIT_INDEX_BUILD = word_of(b"commitIndexBuild")
_MODIFY = word_of(b"collMod")
_END_OF_TRANSACTION = word_of(b"endOfTransaction")
_TIME_SERIES = word_of(b"timeseries")
_TAIL_TIME_SERIES = int.from_bytes(b"ries", "little")

# The last four bytes of the longer names.
_TAIL_NUMBER = int.from_bytes(b"mber", "little")
_TAIL_TIME = int.from_bytes(b"Time", "little")
_TAIL_MIGRATE = int.from_bytes(b"rate", "little")
_TAIL_TYPE = int.from_bytes(b"Type", "little")
_TAIL_PARTIAL = int.from_bytes(b"lTxn", "little")
# The last eight bytes of these commands.
_TAIL_DROP_INDEXES = word_of(b"pIndexes")
_TAIL_CREATE_INDEXES = word_of(b"eIndexes")
_TAIL_RENAME = word_of(b"llection")
_TAIL_COMMIT_INDEX_BUILD = word_of(b"dexBuild")

# What a command does to a collection.
DROP = 1
RENAME = 2
CREATE = 3
CREATE_INDEXES = 4
COMMIT_INDEX_BUILD = 5
DROP_INDEXES = 6
MODIFY = 7


@inner
def _slot_of(name: int, size: int) -> int:
    """The slot of a field of an oplog entry by its name, or -1."""
    if size > 11:
        return _UNKNOWN
    word = name_word(name, size)
    if size <= 2:
        if word == _TS:
            return TIME
        if word == _OP:
            return OPERATION
        if word == _NS:
            return NAMESPACE
        if word == _UI:
            return UUID
        if word == _O:
            return OBJECT_1
        return OBJECT_2 if word == _O2 else _UNKNOWN
    if size == 4:
        if word == _WALL:
            return WALL
        return LSID if word == _LSID else _UNKNOWN
    if size < 9:
        return _UNKNOWN
    tail = load32(name + size - 4)
    if size == 9:
        return TXN_NUMBER if word == _TXN_NUMBER and tail == _TAIL_NUMBER else _UNKNOWN
    if size == 10:
        return PREV_OP_TIME if word == _PREV_OP_TIME and tail == _TAIL_TIME else _UNKNOWN
    if word == _MULTI_OP_TYPE:
        return MULTI_OP if tail == _TAIL_TYPE else _UNKNOWN
    return FROM_MIGRATE if word == _FROM_MIGRATE and tail == _TAIL_MIGRATE else _UNKNOWN


@inner
def _type_fits(slot: int, type_: int, value: int) -> bool:
    if slot in (OBJECT_1, OBJECT_2, LSID, PREV_OP_TIME):
        return type_ == OBJECT
    if slot in (OPERATION, NAMESPACE):
        return type_ == STRING
    if slot == TIME:
        return type_ == TIMESTAMP
    if slot == WALL:
        return type_ == DATE
    if slot == UUID:
        return type_ == BINARY and load32(value) == 16 and load8(value + 4) == 4
    if slot == FROM_MIGRATE:
        return type_ == BOOL
    return type_ == INT32 if slot == MULTI_OP else type_ == INT64


@inner
def well_formed(document: int) -> bool:
    """Whether the elements of a document (its outer length checked) follow each other to its end."""
    limit = document + load32(document) - 1
    pos = document + 4
    while pos < limit:
        _, pos = read_element(pos, limit)
        if pos < 0:
            return False
    return True


@inner
def read_operation(table: int, start: int, end: int) -> bool:
    """Fill the table from an operation in [start, end), its outer length checked. False: one for the plain stages.

    True means that operation and namespace are there and every field of the table has its type.
    """
    for slot in range(_ENTRY_FIELDS):
        store64(table + 8 * slot, 0)
    limit = end - 1
    pos = start + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return False
        slot = _slot_of(pos + 1, nul - pos - 1)
        if slot >= 0:
            if load64(table + slot) != 0 or not _type_fits(slot, load8(pos), nul + 1):
                return False
            store64(table + slot, nul + 1)
        pos = after
    return load64(table + OPERATION) != 0 and load64(table + NAMESPACE) != 0


@inner
def read_entry(table: int, start: int, end: int) -> bool:
    """As ``read_operation``, for an entry: its time is there too, and ``prevOpTime`` holds together."""
    if not read_operation(table, start, end):
        return False
    previous = load64(table + PREV_OP_TIME)
    if previous != 0 and not well_formed(previous):
        return False
    return load64(table + TIME) != 0


@inner
def previous_time(table: int) -> int:
    """The cluster time in ``prevOpTime``, packed; 0 where no entry is before this one, -1 for the plain stages."""
    document = load64(table + PREV_OP_TIME)
    if document == 0:
        return 0
    limit = document + load32(document) - 1
    pos, found = document + 4, -1
    while pos < limit:
        nul, after = read_element(pos, limit)
        if nul - pos == 3 and name_word(pos + 1, 2) == _TS:
            if load8(pos) != TIMESTAMP or found >= 0:
                return -1
            found = load64(nul + 1)
            if found < 0:
                return -1
        pos = after
    return found


@inner
def _command_slot_of(name: int, size: int) -> int:
    """The slot of a field of a command that has to do with transactions, or -1."""
    if size not in (7, 8, 10, 17):
        return _UNKNOWN
    word = name_word(name, size)
    if size == 7:
        return PREPARE if word == _PREPARE else _UNKNOWN
    if size == 8:
        return APPLY_OPS if word == _APPLY_OPS else _UNKNOWN
    if size == 10:
        return PARTIAL_TXN if word == _PARTIAL_TXN and load32(name + 6) == _TAIL_PARTIAL else _UNKNOWN
    if word == _COMMIT and name_word(name + 8, 8) == _COMMIT_MIDDLE and load8(name + 16) == _LETTER_N:
        return COMMIT_TRANSACTION
    return _UNKNOWN


@inner
def read_command(table: int, document: int) -> bool:
    """Find the fields of a command's ``o`` that have to do with transactions. False: corrupt, or a name twice."""
    for slot in range(_UPDATE_END // 8, TABLE_SIZE // 8):
        store64(table + 8 * slot, 0)
    limit = document + load32(document) - 1
    pos = document + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return False
        slot = _command_slot_of(pos + 1, nul - pos - 1)
        if slot >= 0:
            if load64(table + slot) != 0:
                return False
            store64(table + slot, pos)
        pos = after
    return True


@inner
def _is_definition(name: int, size: int) -> bool:
    """Whether a command of this name may give an event: whether ``Transform`` knows it."""
    if size < 4 or size > 16:
        return False
    word = name_word(name, size)
    return word in (
        _DROP,
        _DROP_DATABASE,
        _RENAME,
        _CREATE,
        _CREATE_INDEXES,
        _COMMIT_INDEX_BUILD,
        _DROP_INDEXES,
        _MODIFY,
    )


@inner
def only_definition(document: int) -> int:
    """The one element of a command's ``o`` (its elements are checked) that tells what it does; 0 where it has none, -1
    where it has several."""
    limit = document + load32(document) - 1
    pos, found = document + 4, 0
    while pos < limit:
        nul, after = read_element(pos, limit)
        if _is_definition(pos + 1, nul - pos - 1):
            if found != 0:
                return -1
            found = pos
        pos = after
    return found


@inner
def definition_of(element: int, limit: int) -> int:
    """Which definition that element names, by its whole name; 0 where the name only begins like one."""
    name = element + 1
    size = find_nul(name, limit) - name
    word = name_word(name, size)
    if size == 4:
        return DROP if word == _DROP else 0
    if size == 6:
        return CREATE if word == _CREATE else 0
    if size == 7:
        return MODIFY if word == _MODIFY else 0
    tail = load64(name + size - 8) if size >= 8 else 0
    if size == 11:
        return DROP_INDEXES if word == _DROP_INDEXES and tail == _TAIL_DROP_INDEXES else 0
    if size == 13:
        return CREATE_INDEXES if word == _CREATE_INDEXES and tail == _TAIL_CREATE_INDEXES else 0
    if size != 16:
        return 0
    if word == _RENAME:
        return RENAME if tail == _TAIL_RENAME else 0
    return COMMIT_INDEX_BUILD if word == _COMMIT_INDEX_BUILD and tail == _TAIL_COMMIT_INDEX_BUILD else 0


@inner
def may_end_transaction(document: int) -> bool:
    """Whether a no-op's ``o2`` may say where a transaction ends, whatever the entry's namespace; also true where it is
    corrupt."""
    limit = document + load32(document) - 1
    pos = document + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0 or name_word(pos + 1, nul - pos - 1) == _END_OF_TRANSACTION:
            return True
        pos = after
    return False


@inner
def is_time_series(document: int) -> bool:
    """Whether a command (its elements are checked) has the field ``timeseries``."""
    limit = document + load32(document) - 1
    pos = document + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        name, size = pos + 1, nul - pos - 1
        if size == 10 and name_word(name, size) == _TIME_SERIES and load32(name + 6) == _TAIL_TIME_SERIES:
            return True
        pos = after
    return False


@inner
def read_update(table: int, document: int) -> bool:
    """Find the fields of an ``o`` that tell a replacement from an update. False: corrupt, or a name twice."""
    for slot in range(_ENTRY_FIELDS, _UPDATE_END // 8):
        store64(table + 8 * slot, 0)
    limit = document + load32(document) - 1
    pos = document + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return False
        size = nul - pos - 1
        if size <= 6:
            word = name_word(pos + 1, size)
            slot = _UNKNOWN
            if word == _ID:
                slot = ID
            elif word == _V:
                slot = VERSION
            elif word == _DIFF:
                slot = DIFF
            elif word == _SET:
                slot = SET
            elif word == _UNSET:
                slot = UNSET
            if slot >= 0:
                if load64(table + slot) != 0:
                    return False
                store64(table + slot, pos)
        pos = after
    return True


@inner
def find_id(document: int) -> int:
    """The address of the ``_id`` element of a document (its outer length checked); 0 when missing, -1 when corrupt."""
    limit = document + load32(document) - 1
    pos = document + 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if after < 0:
            return -1
        if nul - pos == 4 and name_word(pos + 1, 3) == _ID:
            return pos
        pos = after
    return 0
