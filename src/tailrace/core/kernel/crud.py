"""The change event of one insert, update, replace or delete, in compiled code: what ``Transform`` makes of it.

The operation lies in the job's ``TABLE``; its times and its session are the job's own slots, so that an operation from
a transaction is like any other. The rules are those of semantics 2.4.
"""

from __future__ import annotations

from tailrace.core.kernel import delta as delta_module
from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.delta import FALL_BACK, NO_ROOM, put_update_description
from tailrace.core.kernel.event_parts import note_parts
from tailrace.core.kernel.event_record import (
    CLUSTER_TIME,
    END,
    ENTRY,
    KEY_END,
    KEY_START,
    NS_END,
    NS_START,
    RECORD_SIZE,
    SPLICE,
    TOKEN_END,
    TOKEN_START,
    UUID_FIRST,
    UUID_LAST,
)
from tailrace.core.kernel.event_record import IMAGE_INDEX as RECORD_IMAGE_INDEX
from tailrace.core.kernel.event_record import IMAGE_TIME as RECORD_IMAGE_TIME
from tailrace.core.kernel.event_record import OBJECT as RECORD_OBJECT
from tailrace.core.kernel.event_record import OPERATION as RECORD_OPERATION
from tailrace.core.kernel.event_record import START as EVENT_START
from tailrace.core.kernel.fragments import (
    COLL,
    COLLECTION_UUID,
    DB,
    DOCUMENT_KEY,
    FULL_DOCUMENT,
    ID,
    IDENTIFIER_DELETE,
    IDENTIFIER_INSERT,
    IDENTIFIER_REPLACE,
    IDENTIFIER_UPDATE,
    KEY_INDEX,
    KEY_MIDDLE_V1,
    KEY_MIDDLE_V2,
    NS,
    OPERATION_DELETE,
    OPERATION_INSERT,
    OPERATION_REPLACE,
    OPERATION_UPDATE,
    RAW_UPDATE_DESCRIPTION,
    TXN_NUMBER,
    UPDATE_DESCRIPTION,
    WALL_TIME,
)
from tailrace.core.kernel.fragments import LSID as LSID_NAME
from tailrace.core.kernel.job import (
    DELTA,
    EVENT_MAX,
    EVENT_NEXT,
    EVENT_TIME,
    EVENT_WALL,
    EVENTS,
    EVENTS_END,
    FIXED_PARTS,
    FLAGS,
    FRAGMENTS,
    IMAGE_INDEX,
    IMAGE_TIME,
    INDEX,
    KEY_DOCUMENT,
    KEY_DOCUMENT_MAX,
    KEY_STRING,
    LSID,
    OP_INDEX,
    RAW,
    RAW_UPDATES,
    RECORD_NEXT,
    RECORDS_END,
    REFUSES_OLD_UPDATES,
    REPLACEMENTS_MAY_HAVE_V,
    STACK,
    TABLE,
    VERSION_2,
    WITH_COLLECTION_UUID,
    WITH_WALL_TIME,
    WRITER,
)
from tailrace.core.kernel.job import TXN_NUMBER as TXN_NUMBER_VALUE
from tailrace.core.kernel.key_string import (
    put_bits,
    put_byte,
    put_bytes,
    put_document,
    put_integer,
    writer_next,
    writer_open,
)
from tailrace.core.kernel.memory import copy, load8, load32, load64, store8, store32, store64
from tailrace.core.kernel.memory import store64_big_endian as store_time
from tailrace.core.kernel.namespace import first_dot
from tailrace.core.kernel.oplog_entry import (
    DIFF,
    NAMESPACE,
    OBJECT_1,
    OBJECT_2,
    SET,
    TIME,
    UNSET,
    UUID,
    VERSION,
    WALL,
    find_id,
    read_update,
)
from tailrace.core.kernel.oplog_entry import ID as ID_ELEMENT
from tailrace.core.kernel.scan import INT32, OBJECT, load_signed32, value_end
from tailrace.core.kernel.token_element import put_constant, put_token_element

_INSERT = 1
_UPDATE = 2
_REPLACE = 3
_DELETE = 4

_LETTER_I = 0x69
_LETTER_U = 0x75


@inner
def put_fragment(out: int, job: int, fragment: tuple[int, int]) -> int:
    """Copy one of the job's fragments, ``(offset, size)``, to ``out``; gives the place after it."""
    return put_constant(out, load64(job + FRAGMENTS), fragment)


@inner
def put_document_value(out: int, document: int) -> int:
    """Copy the document at ``document`` to ``out``; gives the place after it."""
    size = load32(document)
    copy(out, document, size)
    return out + size


@inner
def put_string_value(out: int, start: int, end: int) -> int:
    """A BSON string value with the bytes in [start, end)."""
    size = end - start
    store32(out, size + 1)
    copy(out + 4, start, size)
    store8(out + 4 + size, 0)
    return out + 5 + size


@inner
def put_names(  # noqa: PLR0917
    out: int, job: int, database: int, database_end: int, collection: int, collection_end: int
) -> int:
    """The document ``{db, coll}`` of two names."""
    document = out
    out = put_string_value(put_fragment(out + 4, job, DB), database, database_end)
    out = put_string_value(put_fragment(out, job, COLL), collection, collection_end)
    store8(out, 0)
    store32(document, out + 1 - document)
    return out + 1


@inner
def _put_namespace(out: int, job: int, namespace: int) -> int:
    """The element ``ns: {db, coll}`` from the value of the entry's ``ns``."""
    start, end = namespace + 4, namespace + 3 + load32(namespace)
    dot = first_dot(start, end)
    return put_names(put_fragment(out, job, NS), job, start, dot, dot + 1, end)


@inner
def _put_operation(out: int, job: int, operation: int) -> int:
    if operation == _INSERT:
        return put_fragment(out, job, OPERATION_INSERT)
    if operation == _UPDATE:
        return put_fragment(out, job, OPERATION_UPDATE)
    if operation == _REPLACE:
        return put_fragment(out, job, OPERATION_REPLACE)
    return put_fragment(out, job, OPERATION_DELETE)


@inner
def _identifier(job: int, writer: int, operation: int) -> None:
    """What precedes the document key's fields in a version 2 token."""
    fragment = IDENTIFIER_DELETE
    if operation == _INSERT:
        fragment = IDENTIFIER_INSERT
    elif operation == _UPDATE:
        fragment = IDENTIFIER_UPDATE
    elif operation == _REPLACE:
        fragment = IDENTIFIER_REPLACE
    put_bytes(writer, load64(job + FRAGMENTS) + fragment[0], fragment[1])


@inner
def open_key_string(job: int) -> None:
    """A token's key string in the job's scratch memory, up to the UUID (semantics 1.6)."""
    writer, table = load64(job + WRITER), load64(job + TABLE)
    version_2 = load64(job + FLAGS) & VERSION_2 != 0
    writer_open(writer, load64(job + KEY_STRING))
    put_byte(writer, 0x82)
    store_time(writer_next(writer), load64(job + EVENT_TIME))
    store64(writer, writer_next(writer) + 8)
    middle = KEY_MIDDLE_V2 if version_2 else KEY_MIDDLE_V1
    constants, index = load64(job + FRAGMENTS) + middle[0], load64(job + OP_INDEX)
    if index == 0:
        put_bytes(writer, constants, middle[1])
    else:
        put_bytes(writer, constants, KEY_INDEX)
        put_integer(writer, index)
        put_bytes(writer, constants + KEY_INDEX + 1, middle[1] - KEY_INDEX - 1)
    put_bytes(writer, load64(table + UUID) + 5, 16)


@inner
def _key_string(job: int, operation: int, key: int) -> bool:
    """The token's key string of an operation on a document; false if the plain stages must make the key."""
    writer = load64(job + WRITER)
    version_2 = load64(job + FLAGS) & VERSION_2 != 0
    open_key_string(job)
    if version_2:
        _identifier(job, writer, operation)
        put_bits(writer, 0, 7)
    else:
        put_byte(writer, 0x46)
        put_bits(writer, 0, 6)
    if not put_document(writer, key, key + load32(key), load64(job + STACK)):
        return False
    if version_2:
        put_byte(writer, 0)
    put_byte(writer, 0x04)
    return True


@inner
def put_token(out: int, job: int) -> int:
    """The element ``_id`` from the key string."""
    return put_token_element(out, load64(job + FRAGMENTS), load64(job + WRITER), load64(job + KEY_STRING))


@inner
def _update_operation(table: int, flags: int) -> int:
    """Replacement or update (2.4), or -1 where the plain stages must look; the modifiers' types are checked too."""
    if not read_update(table, load64(table + OBJECT_1)):
        return FALL_BACK
    if flags & REPLACEMENTS_MAY_HAVE_V != 0 and load64(table + ID_ELEMENT) != 0:
        return _REPLACE
    version = load64(table + VERSION)
    number = 0
    if version != 0:
        if load8(version) != INT32:
            return FALL_BACK
        number = load_signed32(version + 4)
    if flags & REFUSES_OLD_UPDATES != 0 and number != 2 and (version != 0 or load64(table + ID_ELEMENT) == 0):
        return FALL_BACK
    if number != 2 and load64(table + ID_ELEMENT) != 0:
        return _REPLACE
    if version != 0 and number not in (1, 2):
        return FALL_BACK
    diff, set_, unset = load64(table + DIFF), load64(table + SET), load64(table + UNSET)
    if number == 2:
        return _UPDATE if diff != 0 and load8(diff) == OBJECT else FALL_BACK
    if (set_ != 0 and load8(set_) != OBJECT) or (unset != 0 and load8(unset) != OBJECT):
        return FALL_BACK
    return _UPDATE


@inner
def _key_of_insert(job: int, table: int) -> int:
    """The document key of an insert: ``o2``, or ``{_id: o._id}`` built in scratch memory; 0 where there is none."""
    key = load64(table + OBJECT_2)
    if key != 0:
        return key
    document = load64(table + OBJECT_1)
    start = find_id(document)
    if start <= 0:
        return 0
    key = load64(job + KEY_DOCUMENT)
    size = value_end(load8(start), start + 5, document + load32(document) - 1) - start
    if size > KEY_DOCUMENT_MAX - 5:
        return 0
    copy(key + 4, start, size)
    store8(key + 4 + size, 0)
    store32(key, size + 5)
    return key


@inner
def _put_update(out: int, job: int, table: int) -> int:
    """The element ``updateDescription`` or ``rawUpdateDescription``, and room for the event's NUL; or a status."""
    document = load64(table + OBJECT_1)
    end = load64(job + EVENTS_END)
    if load64(job + FLAGS) & RAW_UPDATES != 0:
        if load32(document) + FIXED_PARTS > end - out:
            return NO_ROOM
        return put_document_value(put_fragment(out, job, RAW_UPDATE_DESCRIPTION), document)
    state = load64(job + DELTA)
    out = put_fragment(out, job, UPDATE_DESCRIPTION)
    store64(state + delta_module.OUT, out)
    store64(state + delta_module.OUT_END, end - 1)
    version, set_, unset = load64(table + VERSION), load64(table + SET), load64(table + UNSET)
    if version != 0 and load_signed32(version + 4) == 2:
        status = put_update_description(state, load64(table + DIFF) + 6, 0, 0)
    else:
        status = put_update_description(state, 0, set_ + 6 if set_ != 0 else 0, unset + 8 if unset != 0 else 0)
    return load64(state + delta_module.OUT) if status == 0 else status


@inner
def _put_session(out: int, job: int) -> int:
    """The elements ``txnNumber`` and ``lsid`` of an event out of a transaction."""
    session = load64(job + LSID)
    if session == 0:
        return out
    out = put_fragment(out, job, TXN_NUMBER)
    store64(out, load64(job + TXN_NUMBER_VALUE))
    return put_document_value(put_fragment(out + 8, job, LSID_NAME), session)


@inner
def put_times(out: int, job: int) -> int:
    """From the cluster time's value to the wall time, with the collection's UUID in between if it is shown."""
    flags = load64(job + FLAGS)
    store64(out, load64(job + EVENT_TIME))
    out += 8
    if flags & WITH_COLLECTION_UUID != 0:
        out = put_fragment(out, job, COLLECTION_UUID)
        copy(out, load64(load64(job + TABLE) + UUID) + 5, 16)
        out += 16
    if flags & WITH_WALL_TIME != 0:
        out = put_fragment(out, job, WALL_TIME)
        store64(out, load64(load64(job + EVENT_WALL)))
        out += 8
    return out


@inner
def _put_event(job: int, operation: int, key: int) -> int:
    """The event at ``EVENT_NEXT``; gives its end, ``FALL_BACK`` or ``NO_ROOM``."""
    table, start = load64(job + TABLE), load64(job + EVENT_NEXT)
    if load32(key) > KEY_DOCUMENT_MAX or not _key_string(job, operation, key):
        return FALL_BACK
    document = load64(table + OBJECT_1)
    full = operation in (_INSERT, _REPLACE)
    needed = 2 * (writer_next(load64(job + WRITER)) - load64(job + KEY_STRING)) + load32(key) + FIXED_PARTS
    needed += load32(load64(table + NAMESPACE)) + (load32(document) if full else 0)
    needed += load32(load64(job + LSID)) if load64(job + LSID) != 0 else 0
    if needed > load64(job + EVENTS_END) - start or load64(job + RECORD_NEXT) >= load64(job + RECORDS_END):
        return NO_ROOM
    record, events = load64(job + RECORD_NEXT), load64(job + EVENTS)
    store64(record + EVENT_START, start - events)
    out = _put_session(start + 4, job)
    store64(record + TOKEN_START, out + ID[1] - events)
    out = put_token(out, job)
    store64(record + TOKEN_END, out - events)
    out = put_times(_put_operation(out, job, operation), job)
    store64(record + SPLICE, out - events)
    if full:
        out = put_document_value(put_fragment(out, job, FULL_DOCUMENT), document)
    store64(record + NS_START, out + NS[1] - events)
    out = _put_namespace(out, job, load64(table + NAMESPACE))
    store64(record + NS_END, out - events)
    store64(record + KEY_START, out + DOCUMENT_KEY[1] - events)
    out = put_document_value(put_fragment(out, job, DOCUMENT_KEY), key)
    store64(record + KEY_END, out - events)
    if operation == _UPDATE:
        out = _put_update(out, job, table)
        if out < 0:
            return out
    if out - start >= EVENT_MAX:
        return FALL_BACK
    store8(out, 0)
    store32(start, out + 1 - start)
    finish_record(job, record, operation, out + 1)
    return out + 1


@inner
def finish_record(job: int, record: int, operation: int, end: int) -> None:
    """Fill in what the record holds besides the places in the event, and then the places of the parts."""
    table = load64(job + TABLE)
    uuid = load64(table + UUID) + 5
    store64(record + ENTRY, load64(job + INDEX))
    store64(record + END, end - load64(job + EVENTS))
    store64(record + CLUSTER_TIME, load64(job + EVENT_TIME))
    store64(record + RECORD_OPERATION, operation)
    store64(record + UUID_FIRST, load64(uuid))
    store64(record + UUID_LAST, load64(uuid + 8))
    store64(record + RECORD_IMAGE_TIME, load64(job + IMAGE_TIME))
    store64(record + RECORD_IMAGE_INDEX, load64(job + IMAGE_INDEX))
    store64(record + RECORD_OBJECT, load64(table + OBJECT_1) - load64(job + RAW))
    note_parts(job, record, operation)


@inner
def _crud(job: int, letter: int) -> int:
    """The event of an entry in scope; its end, ``FALL_BACK`` or ``NO_ROOM``."""
    table = load64(job + TABLE)
    document, second = load64(table + OBJECT_1), load64(table + OBJECT_2)
    if document == 0 or load64(table + UUID) == 0:
        return FALL_BACK
    if load64(job + EVENT_WALL) == 0 and load64(job + FLAGS) & WITH_WALL_TIME != 0:
        return FALL_BACK
    if letter == _LETTER_I:
        operation, key = _INSERT, _key_of_insert(job, table)
    elif letter == _LETTER_U:
        operation, key = _update_operation(table, load64(job + FLAGS)), second
    else:
        operation, key = _DELETE, document
    if operation < 0 or key == 0:
        return FALL_BACK
    return _put_event(job, operation, key)


@inner
def put_crud(job: int, letter: int) -> int:
    """Write the event of an operation in scope, whose table is ``TABLE``, and count it in. 0, ``FALL_BACK`` or
    ``NO_ROOM``."""
    after = _crud(job, letter)
    if after < 0:
        return after
    store64(job + EVENT_NEXT, after)
    store64(job + RECORD_NEXT, load64(job + RECORD_NEXT) + RECORD_SIZE)
    return 0


@inner
def take_times(job: int, table: int) -> None:
    """Events take their times from the entry in ``table``."""
    time = load64(load64(table + TIME))
    store64(job + EVENT_TIME, time)
    store64(job + EVENT_WALL, load64(table + WALL))
    store64(job + IMAGE_TIME, time)


@inner
def is_sound_identifier(job: int, document: int) -> bool:
    """Whether a document may be in a token: the plain stages would not refuse it there."""
    writer = load64(job + WRITER)
    if load32(document) > KEY_DOCUMENT_MAX:
        return False
    writer_open(writer, load64(job + KEY_STRING))
    return put_document(writer, document, document + load32(document), load64(job + STACK))
