"""AddPreImage and AddPostImage on blocks of events: asked for in bulk, put into the events in one pass.

What cannot be done in bulk is left to the plain stages: a required image that is missing, a look-up that fails, a delta
that does not fit its image. They ask again, and raise at that event.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from tailrace.core import raw_bson
from tailrace.core.event.event_block import OPERATION_TYPES, Bytes, Offsets
from tailrace.core.event.image import CollectionLookups, DocumentRuns, FoundDocuments, PreImageKeys
from tailrace.core.kernel import event_record, fragments, image_splice, post_image
from tailrace.core.kernel.batch import KernelBatch, KernelStep, address
from tailrace.core.kernel.lent import lend
from tailrace.core.oplog.update_delta import apply_diff
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.conjuncts import BEFORE_CHANGE, FULL_DOCUMENT
from tailrace.core.plan.request import Answer, AnswerTooLargeError, NeedDocuments, NeedPreImages, Request
from tailrace.errors import OplogFormatError, TailraceError, invariant

ChosenRows = npt.NDArray[np.bool_]

#: At most this many images are asked for at a time, and at most this many bytes, judged by the size of earlier ones. A
#: stream first asks for few, since nothing is known about their size. Where documents have grown so much that a source
#: gives up (``source.lookup``), or that those of all collections are more than ``_FOUND_BYTES_MAX``, proportionally
#: fewer are asked for.
_ASKED_MAX: Final = 4_000
_ASKED_BYTES: Final = 16 << 20
_FOUND_BYTES_MAX: Final = 64 << 20
_FEWER: Final = 8
_ASKED_FIRST: Final = 8
_UPDATE: Final = OPERATION_TYPES.index("update")
_HAVE_PRE_IMAGES: Final = [OPERATION_TYPES.index(name) for name in ("update", "replace", "delete")]
_ENTRY: Final = event_record.ENTRY // 8
_UUID: Final = slice(event_record.UUID_FIRST // 8, event_record.UUID_LAST // 8 + 1)
_NS: Final = slice(event_record.NS_START // 8, event_record.NS_END // 8 + 1)
_KEY_START: Final = event_record.KEY_START // 8
_KEY_END: Final = event_record.KEY_END // 8
_TIME: Final = event_record.CLUSTER_TIME // 8
_LOGGED: Final = re.compile(rb"\x03preImageOpTime\x00")
_TEXT = np.frombuffer(fragments.TEXT, np.uint8)
_NOTHING: Bytes = np.zeros(1, np.uint8)


#: A stream's step, kept from batch to batch, since it knows how large the images are.
_KEPT: WeakKeyDictionary[ChangeStreamPipeline, AddImages] = WeakKeyDictionary()


def image_steps(pipeline: ChangeStreamPipeline) -> list[KernelStep] | None:
    """The step that looks images up and puts them into the events, where the stream has any. ``None``: pre-images are
    entries of the oplog, which only the plain stages ask for."""
    if not pipeline.pushdown.looks_up:
        return []
    if BEFORE_CHANGE in pipeline.pushdown.looks_up and pipeline.plan.reads_logged_images:
        return None
    step = _KEPT.get(pipeline)
    if step is None:
        step = _KEPT[pipeline] = AddImages(pipeline)
    return [step]


class AddImages:
    """Fills ``fullDocument`` of updates and ``fullDocumentBeforeChange``. Works on pieces of a batch, so that what is
    looked up at a time is bounded: ``pieces`` cuts them, each to be given before the next one is asked for. Where the
    images of a piece are too many bytes, the call raises ``AnswerTooLargeError``, and the next piece is a part of it.
    """

    def __init__(self, pipeline: ChangeStreamPipeline) -> None:
        options, profile = pipeline.plan.options, pipeline.plan.profile
        looks_up = pipeline.pushdown.looks_up
        self._before = BEFORE_CHANGE in looks_up
        self._before_required = options.full_document_before_change == "required"
        self._after = FULL_DOCUMENT in looks_up
        self._after_required = options.full_document == "required"
        self._current = options.full_document == "updateLookup"
        #: For servers without images of their own: the image is the stored document, not what a server would show.
        self._stored = not profile.expanded_events_and_images
        self._logged = pipeline.plan.finds_logged_images and (self._before or not self._current)
        self._by_uuid = profile.looks_up_by_uuid
        self._images_come_last = profile.places == "none"
        self._match_uuid = self._by_uuid or options.match_collection_uuid_for_update_lookup
        self._asked = _ASKED_FIRST
        self._gave_up = False
        self._one_namespace = options.scope.kind == "collection"
        self._names: dict[bytes, tuple[str, str]] = {}

    def pieces(self, made: KernelBatch) -> Iterator[KernelBatch]:
        """The batch in pieces of whole entries. An entry with too many images goes to the plain stages, and so does all
        that needs images where one of them is an entry of the oplog."""
        asks = self._asks(made)
        counts = np.bincount(made.entry_number[asks], minlength=made.kind.size)
        made = made.left_plain(counts > _ASKED_MAX)
        if self._logged and _LOGGED.search(made.raw.data) is not None:
            made = made.left_plain_by_event(self._asks(made))
        entries = made.entry_number[self._asks(made)]
        first, last, size = 0, -1, made.kind.size
        while last < size:
            asked = int(np.searchsorted(entries, first)) + self._asked
            last = int(entries[asked - 1]) + 1 if asked < entries.size else size
            yield _entries(made, first, last)
            if self._gave_up:
                self._gave_up, last = False, -1
            else:
                first = last

    def __call__(self, made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
        asks = self._asks(made)
        if not asks.any():
            return made
        updates = made.column(event_record.OPERATION) == _UPDATE
        before, after = Field.absent(len(made)), Field.absent(len(made))
        refused: ChosenRows = np.zeros(len(made), np.bool_)
        try:
            if self._before:
                before = yield from _pre_images(made, asks)
                refused |= before.missing & self._before_required
            if self._after and self._current:
                after = yield from self._documents(made, updates)
            elif self._after:
                images = before.of(updates) if self._before else (yield from _pre_images(made, updates))
                after, wrong = after_deltas(made, images, stored=self._stored)
                refused |= wrong | (after.missing & self._after_required)
        except AnswerTooLargeError:
            if np.unique(made.entry_number[asks]).size == 1:
                return made.left_plain_by_event(asks)
            self._gave_up, self._asked = True, max(1, self._asked // _FEWER)
            raise
        except TailraceError:
            return made.left_plain_by_event(asks)
        found = int(before.size + after.size)
        self._asked = min(_ASKED_MAX, max(1, _ASKED_BYTES * int(asks.sum()) // max(found, 1)))
        entries = np.zeros(made.kind.size, np.bool_)
        entries[made.entry_number[refused]] = True
        kept = ~entries[made.entry_number]
        return _spliced(
            made.left_plain(entries),
            before.of(kept, cut=True),
            after.of(kept, cut=True),
            comes_last=self._images_come_last,
        )

    def _asks(self, made: KernelBatch) -> ChosenRows:
        """The events that an image is asked for."""
        operation = made.column(event_record.OPERATION)
        asks: ChosenRows = np.isin(operation, _HAVE_PRE_IMAGES) if self._before else operation == _UPDATE
        return asks

    def _documents(self, made: KernelBatch, updates: ChosenRows) -> Generator[Request, Answer, Field]:
        """The current documents, asked for collection by collection."""
        numbers = np.flatnonzero(updates)
        records = made.records[numbers]
        keys = DocumentRuns(made.events, records[:, _KEY_START], records[:, _KEY_END])
        times = records[:, _TIME].astype(np.uint64)
        parts: list[tuple[Offsets, Sequence[bytes | None]]] = []
        left = _FOUND_BYTES_MAX
        for namespace, uuid, chosen in self._collections(made.events, records):
            of_one = keys if chosen.size == len(keys) else DocumentRuns(keys.data, keys.start[chosen], keys.end[chosen])
            uuid_ = uuid if self._match_uuid else None
            answer = yield NeedDocuments(
                CollectionLookups(*self._name_of(namespace), of_one, times[chosen], uuid_, self._by_uuid)
            )
            found = FoundDocuments.of(_checked(answer, len(of_one)))
            parts.append((numbers[chosen], found))
            left -= found.data.size
            if left < 0:
                raise AnswerTooLargeError
        return Field.holding(len(made), parts)

    def _collections(self, events: Bytes, records: Offsets) -> Iterator[tuple[bytes, bytes, Offsets]]:
        """The namespaces and UUIDs, each with the places of its records."""
        uuids = np.ascontiguousarray(records[:, _UUID])
        together = uuids.tobytes()
        if self._one_namespace and len(records) and bool((uuids == uuids[0]).all()):
            start, end = records[0, _NS]
            yield events[start:end].tobytes(), together[:16], np.arange(len(records))
            return
        places: dict[tuple[bytes, bytes], list[int]] = {}
        for index, (start, end) in enumerate(records[:, _NS].tolist()):
            name = events[start:end].tobytes(), together[16 * index : 16 * index + 16]
            places.setdefault(name, []).append(index)
        for (namespace, uuid), chosen in places.items():
            yield namespace, uuid, np.array(chosen)

    def _name_of(self, namespace: bytes) -> tuple[str, str]:
        """Database and collection of the document ``ns``."""
        name = self._names.get(namespace)
        if name is None:
            texts = [raw_bson.value(namespace, element)[4:-1] for element in raw_bson.elements(namespace)]
            name = self._names[namespace] = texts[0].decode("utf-8", "replace"), texts[1].decode("utf-8", "replace")
        return name


class Field(NamedTuple):
    """One of the two image fields of ``m`` events.

    ``data``   uint8: the images
    ``start``  int64[m], and ``end``: offsets into ``data``; -1 where an event has no such field, start and end the same
               where it is null
    """

    data: Bytes
    start: Offsets
    end: Offsets

    @classmethod
    def absent(cls, count: int) -> Field:
        """The field of ``count`` events, none of which has it."""
        return cls(_NOTHING, np.full(count, -1, np.int64), np.full(count, -1, np.int64))

    @classmethod
    def holding(cls, count: int, parts: Sequence[tuple[Offsets, Sequence[bytes | None]]]) -> Field:
        """The field of ``count`` events: the images of those with these numbers, part by part."""
        found = FoundDocuments.gathered(count, parts)
        asked = np.zeros(count, np.bool_)
        for numbers, _ in parts:
            asked[numbers] = True
        is_null = asked & (found.start < 0)
        return cls(found.data, np.where(is_null, 0, found.start), np.where(is_null, 0, found.end))

    def of(self, events: ChosenRows, *, cut: bool = False) -> Field:
        """The field for these events alone; with ``cut`` there are no others any more."""
        if cut:
            return Field(self.data, self.start[events], self.end[events])
        return Field(self.data, np.where(events, self.start, -1), np.where(events, self.end, -1))

    @property
    def missing(self) -> ChosenRows:
        """bool[m]: the field is there and null."""
        found: ChosenRows = (self.start >= 0) & (self.start == self.end)
        return found

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return int((self.end - self.start).sum())


def _entries(made: KernelBatch, first: int, last: int) -> KernelBatch:
    """The entries [first, last) of a batch, and their events."""
    if first == 0 and last == made.kind.size:
        return made
    start, end = np.searchsorted(made.entry_number, (first, last))
    records = made.records[start:end].copy()
    records[:, _ENTRY] -= first
    return replace(
        made,
        kind=made.kind[first:last],
        entry_start=made.entry_start[first:last],
        entry_end=made.entry_end[first:last],
        records=records,
    )


def _pre_images(made: KernelBatch, events: ChosenRows) -> Generator[Request, Answer, Field]:
    numbers = np.flatnonzero(events)
    if not numbers.size:
        return Field.absent(len(made))
    records = made.records[numbers]
    times = records[:, event_record.IMAGE_TIME // 8].astype(np.uint64)
    keys = PreImageKeys(records[:, _UUID], times, records[:, event_record.IMAGE_INDEX // 8])
    answer = yield NeedPreImages(keys)
    return Field.holding(len(made), [(numbers, _checked(answer, len(keys)))])


def after_deltas(made: KernelBatch, images: Field, *, stored: bool = False) -> tuple[Field, ChosenRows]:
    """The post-images of the updates whose pre-images are ``images``; and for which events (bool[m]) there is none,
    because the delta has an error. ``stored``: as the document is stored; rare cases then have none either."""
    numbers = np.flatnonzero(images.start >= 0)
    start, end = images.start[numbers], images.end[numbers]
    objects = made.column(event_record.OBJECT)[numbers]
    sizes = _lengths(made.raw, objects)
    out = lend(int((end - start + sizes).sum()) + post_image.ROOM)
    starts, ends = np.empty(numbers.size, np.int64), np.empty(numbers.size, np.int64)
    scratch: Bytes = np.empty(post_image.SCRATCH_SIZE, np.uint8)
    slots: dict[int, npt.NDArray[np.generic]] = {
        post_image.IMAGES: images.data,
        post_image.START: start,
        post_image.END: end,
        post_image.RAW: made.raw,
        post_image.OBJECTS: objects,
        post_image.OUT: out,
        post_image.OUT_START: starts,
        post_image.OUT_ENDS: ends,
        post_image.SCRATCH: scratch,
    }
    job = _job(post_image.JOB_SIZE, slots)
    job[post_image.COUNT // 8] = numbers.size
    job[post_image.OUT_END // 8] = address(out) + out.size
    job[post_image.STRICT // 8] = stored
    written = post_image.apply_deltas(address(job))
    data, wrong = [out[:written]], np.zeros(len(made), np.bool_)
    if stored:
        is_first = [out[starts + 5 + place] == byte for place, byte in enumerate(b"_id\0")]
        starts[(start != end) & ~np.logical_and.reduce(is_first)] = -1
    for index in np.flatnonzero(starts < 0).tolist():
        if stored:
            starts[index], ends[index], wrong[numbers[index]] = 0, 0, True
            continue
        before = images.data[start[index] : end[index]].tobytes()
        try:
            image = apply_diff(before, _delta_of(made.raw.data, int(objects[index])))
        except TailraceError:
            wrong[numbers[index]] = True
            continue
        starts[index], ends[index] = written, written + len(image)
        written += len(image)
        data.append(np.frombuffer(image, np.uint8))
    field = Field.absent(len(made))
    field.start[numbers], field.end[numbers] = starts, ends
    return field._replace(data=np.concatenate(data) if len(data) > 1 else data[0]), wrong


def _lengths(raw: Bytes, places: Offsets) -> Offsets:
    """The lengths of the documents that begin at these places."""
    found: Offsets = sum(
        (raw[places + place].astype(np.int64) << 8 * place for place in range(4)), np.zeros(places.size, np.int64)
    )
    return found


def _delta_of(raw: memoryview, place: int) -> bytes:
    """The delta of the update whose ``o`` begins at ``place``. Raises ``OplogFormatError`` where it has none."""
    update = bytes(raw[place : place + int.from_bytes(raw[place : place + 4], "little")])
    diff = raw_bson.find(update, b"diff")
    if diff is None or diff.type != raw_bson.OBJECT:
        raise OplogFormatError("a post-image is asked of an update entry without a delta")
    return raw_bson.value(update, diff)


def _checked(answer: Answer, count: int) -> Sequence[bytes | None]:
    invariant(answer is not None and len(answer) == count, "a request for images was not answered in full")
    return answer or []


def _job(size: int, arrays: dict[int, npt.NDArray[np.generic]]) -> Offsets:
    """A job's slots with where these arrays lie."""
    job = np.zeros(size // 8, np.int64)
    for slot, array in arrays.items():
        job[slot // 8] = address(array)
    return job


def _spliced(made: KernelBatch, before: Field, after: Field, *, comes_last: bool) -> KernelBatch:
    """The batch with the images in its events; with ``comes_last`` ``fullDocument`` at the end of each."""
    records = made.records.copy()
    size = int((made.end - made.start).sum()) + before.size + after.size
    size += image_splice.BEFORE_ROOM * int((before.start >= 0).sum())
    size += image_splice.AFTER_ROOM * int((after.start >= 0).sum())
    out = lend(size)
    slots: dict[int, npt.NDArray[np.generic]] = {
        image_splice.RECORDS: records,
        image_splice.EVENTS: made.events,
        image_splice.OUT: out,
        image_splice.FRAGMENTS: _TEXT,
        image_splice.AFTER: after.data,
        image_splice.AFTER_START: after.start,
        image_splice.AFTER_END: after.end,
        image_splice.BEFORE: before.data,
        image_splice.BEFORE_START: before.start,
        image_splice.BEFORE_END: before.end,
    }
    job = _job(image_splice.JOB_SIZE, slots)
    job[image_splice.COUNT // 8] = len(records)
    job[image_splice.COMES_LAST // 8] = comes_last
    written = image_splice.splice(address(job))
    invariant(written == size, "the events with their images are not of the size that was computed")
    return made.rewritten(out, records)
