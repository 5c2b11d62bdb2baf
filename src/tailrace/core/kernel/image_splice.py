"""Images put into finished events, in compiled code.

``fullDocument`` goes to the place that the event's record names, ``fullDocumentBeforeChange`` to the event's end; where
images come last, ``fullDocument`` goes after that.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.core.kernel import event_record as record_slots
from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.event_parts import note_images
from tailrace.core.kernel.fragments import FULL_DOCUMENT, FULL_DOCUMENT_BEFORE_CHANGE
from tailrace.core.kernel.memory import copy, load64, store8, store32, store64
from tailrace.core.kernel.scan import NULL

# Slots of a job, as byte offsets.
COUNT = 0
RECORDS = 8  # rows of ``event_record``; they are changed to where the events are then
EVENTS = 16
OUT = 24
FRAGMENTS = 32
#: The images, and int64[count] each, offsets from there: -1 where the field is not there, start and end the same where
#: it is null.
AFTER = 40
AFTER_START = 48
AFTER_END = 56
BEFORE = 64
BEFORE_START = 72
BEFORE_END = 80
COMES_LAST = 88  # 1: ``fullDocument`` goes to the end
JOB_SIZE = 96

#: The element's bytes without its document.
AFTER_ROOM = FULL_DOCUMENT[1]
BEFORE_ROOM = FULL_DOCUMENT_BEFORE_CHANGE[1]


@inner
def _put_image(out: int, fragment: int, fragment_size: int, image: int, size: int) -> int:
    """The element of an image, null where it is empty; gives the address after it."""
    copy(out, fragment, fragment_size)
    if size == 0:
        store8(out, NULL)
    copy(out + fragment_size, image, size)
    return out + fragment_size + size


@inner
def _put_after(job: int, slot: int, out: int) -> int:
    """The element ``fullDocument``, where the event gets one; gives the address after it."""
    image = load64(load64(job + AFTER_START) + slot)
    if image < 0:
        return out
    size = load64(load64(job + AFTER_END) + slot) - image
    fragment = load64(job + FRAGMENTS) + FULL_DOCUMENT[0]
    return _put_image(out, fragment, FULL_DOCUMENT[1], load64(job + AFTER) + image, size)


@inner
def _move(record: int, slot: int, distance: int) -> None:
    store64(record + slot, load64(record + slot) + distance)


@inner
def _event(job: int, index: int, out: int) -> int:
    """One event with its images at ``out``; gives the address after it."""
    record = load64(job + RECORDS) + record_slots.RECORD_SIZE * index
    events, fragments = load64(job + EVENTS), load64(job + FRAGMENTS)
    start, end = load64(record + record_slots.START), load64(record + record_slots.END)
    splice = load64(record + record_slots.SPLICE)
    begin = out
    copy(out, events + start, splice - start)
    out += splice - start
    place, slot, comes_last = out, 8 * index, load64(job + COMES_LAST) != 0
    if not comes_last:
        out = _put_after(job, slot, out)
    grown = out - place
    copy(out, events + splice, end - 1 - splice)
    out += end - 1 - splice
    place = out
    image = load64(load64(job + BEFORE_START) + slot)
    if image >= 0:
        size = load64(load64(job + BEFORE_END) + slot) - image
        fragment = fragments + FULL_DOCUMENT_BEFORE_CHANGE[0]
        out = _put_image(out, fragment, FULL_DOCUMENT_BEFORE_CHANGE[1], load64(job + BEFORE) + image, size)
    before, place = out - place, out
    if comes_last:
        out = _put_after(job, slot, out)
    last = out - place
    store8(out, 0)
    store32(begin, out + 1 - begin)
    distance = begin - load64(job + OUT) - start
    store64(record + record_slots.START, start + distance)
    store64(record + record_slots.END, out + 1 - load64(job + OUT))
    _move(record, record_slots.TOKEN_START, distance)
    _move(record, record_slots.TOKEN_END, distance)
    _move(record, record_slots.SPLICE, distance)
    _move(record, record_slots.NS_START, distance + grown)
    _move(record, record_slots.NS_END, distance + grown)
    _move(record, record_slots.KEY_START, distance + grown)
    _move(record, record_slots.KEY_END, distance + grown)
    note_images(record, splice - start, grown, before, last)
    return out + 1


def _make_splice(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def splice(job: int) -> int:
        """Write all events of a job anew with their images; gives how many bytes were written."""
        if sources == 0:
            return 0
        out = load64(job + OUT)
        for index in range(load64(job + COUNT)):
            out = _event(job, index, out)
        return out - load64(job + OUT)

    return splice


splice = _make_splice(fingerprint(__name__))
