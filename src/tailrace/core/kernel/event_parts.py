"""The parts of a change event from which columns are made, and the places that the kernel notes for them.

``columns.locate`` finds the parts of any event, and is the reference. Of an event that the kernel wrote it need not
look: the event's record has a word for each part, its start in the lower half and its end in the upper one, counted
from the event's first byte. So the words stay right wherever the event is copied. A word is 0 where the event has no
such part. A record without a place for the token means that nothing was noted; then ``locate`` searches.

The places follow from those that the record has anyway and from the constant bytes between them (``fragments``), so
``note_parts`` notes them all, after the last byte of an event.
"""

from __future__ import annotations

from tailrace.core.kernel import fragments
from tailrace.core.kernel.compiled import inner
from tailrace.core.kernel.event_record import (
    END,
    KEY_END,
    KEY_START,
    NS_END,
    NS_START,
    PLACES,
    SPLICE,
    START,
    TOKEN_END,
    TOKEN_START,
)
from tailrace.core.kernel.job import EVENTS, FLAGS, RAW_UPDATES, WITH_WALL_TIME
from tailrace.core.kernel.memory import load8, load32, load64, store64
from tailrace.core.kernel.scan import INT64

# The parts, in the order of their places in a record and in what ``locate`` gives.
TOKEN = 0  # the bytes of _id._data
OPERATION_TYPE = 1  # the bytes of the string
CLUSTER_TIME = 2  # a number: ``locate`` gives it in place of a start
WALL_TIME = 3  # milliseconds, in place of a start
DATABASE = 4  # the bytes of ns.db
COLLECTION = 5  # the bytes of ns.coll
DOCUMENT_KEY = 6
FULL_DOCUMENT = 7
FULL_DOCUMENT_BEFORE_CHANGE = 8
UPDATE_DESCRIPTION = 9
SESSION = 10  # the 16 bytes of the UUID lsid.id; noted is the whole document lsid
TXN_NUMBER = 11  # the number in place of a start
TO_DATABASE = 12  # the bytes of to.db
TO_COLLECTION = 13  # the bytes of to.coll
PARTS = 14
#: Bytes of a row of noted places.
ROW = 8 * PARTS

#: The place of ``update`` in ``OPERATION_TYPES``.
_UPDATE = 2
#: From the token to the text of the operation's type.
_OPERATION_HEAD = len(b"\x02operationType\0") + 4
#: From the document ``_id`` to the text of ``_data``; from a document ``{db, coll}`` to the text of ``db``, and from
#: the end of that to the text of ``coll``.
_DATA_HEAD = 4 + fragments.DATA[1] + 4
DB_HEAD = 4 + fragments.DB[1] + 4
_COLL_HEAD = 1 + fragments.COLL[1] + 4


@inner
def _note(record: int, part: int, start: int, end: int) -> None:
    store64(record + PLACES + 8 * part, start | end << 32)


@inner
def _text_end(event: int, text: int) -> int:
    """Where the string ends whose bytes begin at a place of the event: at its NUL."""
    return text + load32(event + text - 4) - 1


@inner
def _note_names(record: int, event: int, part: int, document: int, end: int) -> None:
    """The two parts of a document ``{db, coll}``, of which ``part`` is the first."""
    database = document + DB_HEAD
    database_end = _text_end(event, database)
    _note(record, part, database, database_end)
    _note(record, part + 1, database_end + _COLL_HEAD, end - 2)


@inner
def _note_before_token(record: int, event: int, end: int) -> None:
    """What an event has before ``_id``: the transaction, or the target of a rename."""
    if end == 4:
        return
    if load8(event + 4) == INT64:
        number = 4 + fragments.TXN_NUMBER[1]
        _note(record, TXN_NUMBER, number, number + 8)
        _note(record, SESSION, number + 8 + fragments.LSID[1], end)
    else:
        _note_names(record, event, TO_DATABASE, 4 + fragments.TO[1], end)


@inner
def note_parts(job: int, record: int, operation: int) -> None:
    """Note the parts of an event that is written, and whose record has everything else."""
    start, flags = load64(record + START), load64(job + FLAGS)
    event = load64(job + EVENTS) + start
    for part in range(PARTS):
        store64(record + PLACES + 8 * part, 0)
    token, splice = load64(record + TOKEN_START) - start, load64(record + SPLICE) - start
    _note_before_token(record, event, token - fragments.ID[1])
    _note(record, TOKEN, token + _DATA_HEAD, _text_end(event, token + _DATA_HEAD))
    text = load64(record + TOKEN_END) - start + _OPERATION_HEAD
    text_end = _text_end(event, text)
    time = text_end + 1 + fragments.OPERATION_TYPE_REST
    _note(record, OPERATION_TYPE, text, text_end)
    _note(record, CLUSTER_TIME, time, time + 8)
    if flags & WITH_WALL_TIME != 0:
        _note(record, WALL_TIME, splice - 8, splice)
    namespace = load64(record + NS_START) - start
    if namespace - fragments.NS[1] != splice:
        _note(record, FULL_DOCUMENT, splice + fragments.FULL_DOCUMENT[1], namespace - fragments.NS[1])
    _note_names(record, event, DATABASE, namespace, load64(record + NS_END) - start)
    key_end = load64(record + KEY_END) - start
    if load64(record + KEY_START) != 0:
        _note(record, DOCUMENT_KEY, load64(record + KEY_START) - start, key_end)
    if operation == _UPDATE and flags & RAW_UPDATES == 0:
        description = key_end + fragments.UPDATE_DESCRIPTION[1]
        _note(record, UPDATE_DESCRIPTION, description, load64(record + END) - start - 1)


@inner
def _move(record: int, part: int, distance: int) -> None:
    word = load64(record + PLACES + 8 * part)
    if word != 0:
        store64(record + PLACES + 8 * part, word + (distance | distance << 32))


@inner
def note_images(record: int, splice: int, after: int, before: int, last: int) -> None:
    """Images have been put into a noted event: ``fullDocument`` with ``after`` bytes at the place ``splice`` or, with
    ``last`` bytes, at its end; ``before`` bytes in front of that; 0 where there is no such image. An empty one is null.
    """
    if load64(record + PLACES + 8 * TOKEN) == 0:
        return
    if after != 0:
        _note(record, FULL_DOCUMENT, splice + fragments.FULL_DOCUMENT[1], splice + after)
        _move(record, DATABASE, after)
        _move(record, COLLECTION, after)
        _move(record, DOCUMENT_KEY, after)
        _move(record, UPDATE_DESCRIPTION, after)
    end = load64(record + END) - load64(record + START) - 1
    if last != 0:
        _note(record, FULL_DOCUMENT, end - last + fragments.FULL_DOCUMENT[1], end)
    end -= last
    if before != 0:
        _note(record, FULL_DOCUMENT_BEFORE_CHANGE, end - before + fragments.FULL_DOCUMENT_BEFORE_CHANGE[1], end)
