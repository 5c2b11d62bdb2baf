"""The event of a command that defines a collection, in compiled code: what ``Transform`` makes of drop, rename, create
and of the building of indexes. Whatever ends a stream, and the rarer commands, are left to the plain stages.
"""

from __future__ import annotations

from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.crud import (
    finish_record,
    is_sound_identifier,
    open_key_string,
    put_document_value,
    put_fragment,
    put_names,
    put_times,
    put_token,
    take_times,
)
from tailrace.core.kernel.delta import FALL_BACK, NO_ROOM
from tailrace.core.kernel.event_record import KEY_END, KEY_START, NS_END, NS_START, RECORD_SIZE, SPLICE, TOKEN_END
from tailrace.core.kernel.event_record import START as EVENT_START
from tailrace.core.kernel.event_record import TOKEN_START as RECORD_TOKEN_START
from tailrace.core.kernel.fragments import (
    FIRST_ELEMENT,
    ID,
    INDEXES,
    NS,
    NS_TYPE_COLLECTION,
    OPERATION_CREATE,
    OPERATION_CREATE_INDEXES,
    OPERATION_DESCRIPTION,
    OPERATION_DROP,
    OPERATION_RENAME,
    OPERATION_TYPE_REST,
    TO,
)
from tailrace.core.kernel.job import (
    EVENT,
    EVENT_NEXT,
    EVENTS,
    EVENTS_END,
    FIXED_PARTS,
    FLAGS,
    IMAGE_INDEX,
    KEY_DOCUMENT,
    KEY_DOCUMENT_MAX,
    KEY_STRING,
    LSID,
    OP_INDEX,
    PLAIN,
    RECORD_NEXT,
    RECORDS_END,
    SCOPE,
    SCOPE_KIND,
    SCOPE_SIZE,
    SKIPPED,
    STACK,
    TABLE,
    VERSION_2,
    WITH_COLLECTION_UUID,
    WITH_NS_TYPE,
    WITH_WALL_TIME,
    WRITER,
)
from tailrace.core.kernel.key_string import put_bits, put_byte, put_document, writer_next
from tailrace.core.kernel.memory import copy, load8, load32, load64, store8, store32, store64
from tailrace.core.kernel.namespace import (
    COLLECTION,
    IN_SCOPE,
    OUT_OF_SCOPE,
    UNDECIDED,
    collection_in_scope,
    command_in_scope,
    first_dot,
    in_scope,
)
from tailrace.core.kernel.oplog_entry import (
    CREATE,
    CREATE_INDEXES,
    DROP,
    DROP_INDEXES,
    MODIFY,
    NAMESPACE,
    OBJECT_2,
    RENAME,
    UUID,
    WALL,
    definition_of,
    is_time_series,
    only_definition,
)
from tailrace.core.kernel.scan import STRING, find_nul, name_word, read_element, value_end, word_of

#: Places in ``OPERATION_TYPES``.
_DROP = 6
_RENAME = 7
_CREATE = 9
_CREATE_INDEXES = 10

_TO = word_of(b"to")
_STAY_TEMP = word_of(b"stayTemp")
_INDEXES = word_of(b"indexes")
#: From an element called ``to`` to its value.
_TO_VALUE = 4
#: A description of a larger command might not fit into the scratch memory.
_COMMAND_MAX = KEY_DOCUMENT_MAX - 512


@inner
def _only_field(document: int, name: int, size: int) -> int:
    """The one element of that name (as a word, at most eight bytes) in a checked document; 0: none, -1: several."""
    limit = document + load32(document) - 1
    pos, found = document + 4, 0
    while pos < limit:
        nul, after = read_element(pos, limit)
        if nul - pos - 1 == size and name_word(pos + 1, size) == name:
            if found != 0:
                return -1
            found = pos
        pos = after
    return found


@inner
def _put_others(out: int, document: int, element: int) -> int:
    """A checked document without one of its elements."""
    size, limit = load32(document), document + load32(document) - 1
    after = value_end(load8(element), find_nul(element + 1, limit) + 1, limit)
    before = element - document
    copy(out, document, before)
    copy(out + before, after, document + size - after)
    store32(out, size - (after - element))
    return out + size - (after - element)


@inner
def _put_indexes(out: int, job: int, document: int, element: int) -> int:
    """``{indexes: [{...}]}`` of the one index that ``createIndexes`` describes."""
    description = out
    array = put_fragment(out + 4, job, INDEXES)
    out = _put_others(put_fragment(array + 4, job, FIRST_ELEMENT), document, element)
    store8(out, 0)
    store32(array, out + 1 - array)
    store8(out + 1, 0)
    store32(description, out + 2 - description)
    return out + 2


@inner
def _put_built(out: int, document: int) -> int:
    """``{indexes: [...]}`` as in ``commitIndexBuild``; or ``FALL_BACK``."""
    limit = document + load32(document) - 1
    element = _only_field(document, _INDEXES, 7)
    if element < 0:
        return FALL_BACK
    size = value_end(load8(element), element + 9, limit) - element if element > 0 else 0
    copy(out + 4, element, size)
    store8(out + 4 + size, 0)
    store32(out, size + 5)
    return out + 5 + size


@inner
def _put_renamed(out: int, job: int, document: int, element: int, to: int) -> int:
    """What ``renameCollection`` says besides the old name, the new name as ``{db, coll}``."""
    limit = document + load32(document) - 1
    description, pos = out, document + 4
    out += 4
    while pos < limit:
        nul, after = read_element(pos, limit)
        if pos == to:
            start, end = to + _TO_VALUE + 4, after - 1
            dot = first_dot(start, end)
            out = put_names(put_fragment(out, job, TO), job, start, dot, dot + 1, end)
        elif pos != element and not (nul - pos == 9 and name_word(pos + 1, 8) == _STAY_TEMP):
            copy(out, pos, after - pos)
            out += after - pos
        pos = after
    store8(out, 0)
    store32(description, out + 1 - description)
    return out + 1


@inner
def _put_operation_type(out: int, job: int, command: int) -> int:
    """The element ``operationType``, and after it the head of ``clusterTime``."""
    if command == DROP:
        return put_fragment(out, job, OPERATION_DROP)
    if command == RENAME:
        return put_fragment(out, job, OPERATION_RENAME)
    if command == CREATE:
        return put_fragment(out, job, OPERATION_CREATE)
    return put_fragment(out, job, OPERATION_CREATE_INDEXES)


@inner
def _put_identifier(job: int, command: int, document: int, element: int, to: int) -> int:
    """The event identifier in the job's scratch memory, ``{operationType[, operationDescription]}``; gives where the
    description is in it, 0 where there is none, or ``FALL_BACK``."""
    identifier = load64(job + KEY_DOCUMENT)
    out = _put_operation_type(identifier + 4, job, command) - OPERATION_TYPE_REST
    description = 0
    if command != DROP:
        out = put_fragment(out, job, OPERATION_DESCRIPTION)
        description = out
        if command == CREATE:
            out = _put_others(out, document, element)
        elif command == CREATE_INDEXES:
            out = _put_indexes(out, job, document, element)
        elif command == RENAME:
            out = _put_renamed(out, job, document, element, to)
        else:
            out = _put_built(out, document)
        if out < 0:
            return FALL_BACK
    store8(out, 0)
    store32(identifier, out + 1 - identifier)
    return description


@inner
def _key_string(job: int, command: int) -> bool:
    """The token's key string; false if the plain stages must make the identifier. In version 1 a drop and a rename have
    none."""
    writer, identifier = load64(job + WRITER), load64(job + KEY_DOCUMENT)
    open_key_string(job)
    if load64(job + FLAGS) & VERSION_2 != 0 or command not in (DROP, RENAME):
        put_byte(writer, 0x46)
        put_bits(writer, 0, 6)
        if not put_document(writer, identifier, identifier + load32(identifier), load64(job + STACK)):
            return False
    put_byte(writer, 0x04)
    return True


@inner
def _number(command: int) -> int:
    if command == DROP:
        return _DROP
    if command == RENAME:
        return _RENAME
    return _CREATE if command == CREATE else _CREATE_INDEXES


@inner
def _put_event(job: int, command: int, document: int, element: int, to: int) -> int:
    """The event at ``EVENT_NEXT``; gives its end, ``FALL_BACK`` or ``NO_ROOM``."""
    description = _put_identifier(job, command, document, element, to)
    if description < 0 or not _key_string(job, command):
        return FALL_BACK
    start, flags = load64(job + EVENT_NEXT), load64(job + FLAGS)
    namespace = load64(load64(job + TABLE) + NAMESPACE)
    needed = 2 * (writer_next(load64(job + WRITER)) - load64(job + KEY_STRING)) + 3 * load32(document)
    needed += load32(namespace) + 2 * FIXED_PARTS
    if needed > load64(job + EVENTS_END) - start or load64(job + RECORD_NEXT) >= load64(job + RECORDS_END):
        return NO_ROOM
    record, events = load64(job + RECORD_NEXT), load64(job + EVENTS)
    limit = document + load32(document) - 1
    name = find_nul(element + 1, limit) + 5
    name_end = value_end(STRING, name - 4, limit) - 1
    database, database_end = namespace + 4, first_dot(namespace + 4, namespace + 3 + load32(namespace))
    out = start + 4
    if command == RENAME:
        database, database_end = name, first_dot(name, name_end)
        name = database_end + 1
        target, target_end = to + _TO_VALUE + 4, value_end(STRING, to + _TO_VALUE, limit) - 1
        dot = first_dot(target, target_end)
        out = put_names(put_fragment(out, job, TO), job, target, dot, dot + 1, target_end)
    store64(record + EVENT_START, start - events)
    store64(record + RECORD_TOKEN_START, out + ID[1] - events)
    out = put_token(out, job)
    store64(record + TOKEN_END, out - events)
    out = put_times(_put_operation_type(out, job, command), job)
    store64(record + SPLICE, out - events)
    store64(record + NS_START, out + NS[1] - events)
    out = put_names(put_fragment(out, job, NS), job, database, database_end, name, name_end)
    store64(record + NS_END, out - events)
    store64(record + KEY_START, 0)
    store64(record + KEY_END, 0)
    if flags & WITH_COLLECTION_UUID != 0:
        if description != 0:
            out = put_document_value(put_fragment(out, job, OPERATION_DESCRIPTION), description)
        if command == CREATE and flags & WITH_NS_TYPE != 0:
            out = put_fragment(out, job, NS_TYPE_COLLECTION)
    store8(out, 0)
    store32(start, out + 1 - start)
    finish_record(job, record, _number(command), out + 1)
    return out + 1


@inner
def _scope_of(job: int, command: int, document: int, element: int, to: int) -> int:
    """Whether the stream reads a definition: the answer for its collection's name; for a rename, for either name."""
    kind, scope, scope_size = load64(job + SCOPE_KIND), load64(job + SCOPE), load64(job + SCOPE_SIZE)
    limit = document + load32(document) - 1
    value = find_nul(element + 1, limit) + 1
    start, end = value + 4, value_end(STRING, value, limit) - 1
    if command != RENAME:
        return collection_in_scope(start, end, kind, scope, scope_size)
    target, target_end = to + _TO_VALUE + 4, value_end(STRING, to + _TO_VALUE, limit) - 1
    if end in (start, first_dot(start, end)) or target_end in (target, first_dot(target, target_end)):
        return UNDECIDED
    source = in_scope(start, end, kind, scope, scope_size)
    other = in_scope(target, target_end, kind, scope, scope_size)
    if UNDECIDED in (source, other):
        return UNDECIDED
    return IN_SCOPE if IN_SCOPE in (source, other) else OUT_OF_SCOPE


@inner
def _is_hidden(job: int, table: int, command: int, document: int) -> bool:
    """Whether a definition that only ``showExpandedEvents`` shows can be passed over. The plain stages would still make
    its token, and say what is wrong with the description."""
    second = load64(table + OBJECT_2)
    if command in (DROP_INDEXES, MODIFY):
        return second == 0 or is_sound_identifier(job, second)
    return is_sound_identifier(job, document)


@inner
def put_definition(job: int, table: int, document: int) -> int:
    """The kind of a command that has nothing to do with transactions, or ``NO_ROOM``; its event is written. It is
    skipped if it is out of scope, or if the stream does not show it."""
    namespace, flags = load64(table + NAMESPACE), load64(job + FLAGS)
    kind, scope, scope_size = load64(job + SCOPE_KIND), load64(job + SCOPE), load64(job + SCOPE_SIZE)
    answer = command_in_scope(namespace + 4, namespace + 3 + load32(namespace), kind, scope, scope_size)
    if answer != IN_SCOPE:
        return SKIPPED if answer == OUT_OF_SCOPE else PLAIN
    element = only_definition(document)
    if element != document + 4:
        return PLAIN  # which counts it if its kind, as the first field says it, is not known
    command, to = definition_of(element, document + load32(document) - 1), 0
    if command == 0 or load8(element) != STRING or load32(document) > _COMMAND_MAX:
        return PLAIN
    if command == CREATE and flags & WITH_NS_TYPE != 0 and is_time_series(document):
        return PLAIN
    if command == RENAME:
        to = _only_field(document, _TO, 2)
        if to <= 0 or load8(to) != STRING:
            return PLAIN
    answer = _scope_of(job, command, document, element, to)
    if answer != IN_SCOPE:
        return SKIPPED if answer == OUT_OF_SCOPE else PLAIN
    if load64(table + WALL) == 0 and flags & WITH_WALL_TIME != 0:
        return PLAIN
    if flags & WITH_COLLECTION_UUID == 0 and command not in (DROP, RENAME):
        return SKIPPED if _is_hidden(job, table, command, document) else PLAIN
    # These end what a stream on one collection watches.
    ends = kind == COLLECTION and command in (DROP, RENAME)
    if ends or command in (DROP_INDEXES, MODIFY) or load64(table + UUID) == 0:
        return PLAIN
    take_times(job, table)
    store64(job + LSID, 0)
    store64(job + OP_INDEX, 0)
    store64(job + IMAGE_INDEX, 0)
    after = _put_event(job, command, document, element, to)
    if after < 0:
        return PLAIN if after == FALL_BACK else NO_ROOM
    store64(job + EVENT_NEXT, after)
    store64(job + RECORD_NEXT, load64(job + RECORD_NEXT) + RECORD_SIZE)
    return EVENT
