"""AddPreImage and AddPostImage on blocks of events: asked for in bulk, put into the events in one pass.

What cannot be done in bulk is left to the plain stages: an image that is required and not there, a look-up that fails,
a delta that does not fit its image. They ask again, and raise at the event that it is about.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tailrace import raw_bson
from tailrace.errors import OplogFormatError, TailraceError, invariant
from tailrace.event.event_block import OPERATION_TYPES
from tailrace.kernel import event_record, fragments, image_splice
from tailrace.kernel.batch import Bytes, KernelBatch, Offsets, Step, address
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.update_delta import apply_diff
from tailrace.pipeline.shard import ChangeStreamPipeline
from tailrace.plan.conjuncts import BEFORE_CHANGE, FULL_DOCUMENT
from tailrace.plan.request import Answer, DocumentLookup, NeedDocuments, NeedPreImages, PreImageKey, Request

Chosen = npt.NDArray[np.bool_]
Images = Sequence[bytes | None]

#: Images are asked for this many at a time at the most, and as many fewer as make this many bytes, judged by the size
#: of those that came before. The first ones of a batch are few, since nothing is known of them.
_ASKED_MAX: Final = 1_000
_ASKED_BYTES: Final = 16 << 20
_ASKED_FIRST: Final = 32
_UPDATE: Final = OPERATION_TYPES.index("update")
_INSERT: Final = OPERATION_TYPES.index("insert")
_ENTRY: Final = event_record.ENTRY // 8
_UUID: Final = slice(event_record.UUID_FIRST // 8, event_record.UUID_LAST // 8 + 1)
#: How the ``o`` of nearly every update begins, up to the delta.
_DELTA: Final = b"\x10$v\x00\x02\x00\x00\x00\x03diff\x00"
_TEXT = np.frombuffer(fragments.TEXT, np.uint8)


def image_steps(pipeline: ChangeStreamPipeline) -> list[Step]:
    """The step that looks images up and puts them into the events, where the stream has any."""
    return [AddImages(pipeline)] if pipeline.pushdown.looks_up else []


class AddImages:
    """Fills ``fullDocument`` of updates and ``fullDocumentBeforeChange``. Works on pieces of a batch, so that what is
    looked up at a time is bounded: ``pieces`` cuts them, each to be given before the next one is asked for."""

    def __init__(self, pipeline: ChangeStreamPipeline) -> None:
        options, profile = pipeline.plan.options, pipeline.plan.profile
        looks_up = pipeline.pushdown.looks_up
        self._before = BEFORE_CHANGE in looks_up
        self._before_required = options.full_document_before_change == "required"
        self._after = FULL_DOCUMENT in looks_up
        self._after_required = options.full_document == "required"
        self._current = options.full_document == "updateLookup"
        self._by_uuid = profile.looks_up_by_uuid
        self._match_uuid = self._by_uuid or options.match_collection_uuid_for_update_lookup
        self._asked = _ASKED_FIRST
        self._names: dict[bytes, tuple[str, str]] = {}

    def pieces(self, made: KernelBatch) -> Iterator[KernelBatch]:
        """The batch in pieces of whole entries. An entry with too many images goes to the plain stages."""
        asks = self._asks(made)
        counts = np.bincount(made.entry_number[asks], minlength=made.kind.size)
        made = made.left_plain(counts > _ASKED_MAX)
        entries = made.entry_number[self._asks(made)]
        first, asked = 0, 0
        while asked + self._asked < entries.size:
            last = int(entries[asked + self._asked - 1]) + 1
            asked = int(np.searchsorted(entries, last))
            yield _entries(made, first, last)
            first = last
        yield _entries(made, first, made.kind.size)

    def __call__(self, made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
        asks = self._asks(made)
        if not asks.any():
            return made
        found = _Images(len(made))
        try:
            if self._before:
                yield from self._add_pre_images(made, found)
            if self._after:
                yield from self._add_post_images(made, found)
        except TailraceError:
            return made.left_plain_by_event(asks)
        self._asked = min(_ASKED_MAX, max(1, _ASKED_BYTES * int(asks.sum()) // max(found.size, 1)))
        entries = np.zeros(made.kind.size, np.bool_)
        entries[made.entry_number[found.refused]] = True
        return _spliced(made.left_plain(entries), found, ~entries[made.entry_number])

    def _asks(self, made: KernelBatch) -> Chosen:
        """The events that an image is asked for."""
        operation = made.column(event_record.OPERATION)
        asks: Chosen = operation != _INSERT if self._before else operation == _UPDATE
        return asks

    def _add_pre_images(self, made: KernelBatch, found: _Images) -> Generator[Request, Answer, None]:
        asks = self._asks(made)
        found.before.images = yield from _pre_images(made, asks)
        found.before.put(asks)
        if self._before_required:
            found.refused |= found.before.missing()

    def _add_post_images(self, made: KernelBatch, found: _Images) -> Generator[Request, Answer, None]:
        updates = made.column(event_record.OPERATION) == _UPDATE
        if not updates.any():
            return
        if self._current:
            found.after.images = yield from self._documents(made, updates)
            found.after.put(updates)
            return
        if self._before:
            of_asked = updates[self._asks(made)]
            images = [image for image, wanted in zip(found.before.images, of_asked.tolist(), strict=True) if wanted]
        else:
            images = yield from _pre_images(made, updates)
        wrong = _apply_deltas(made, updates, images)
        found.after.images = images
        found.after.put(updates)
        found.refused[wrong] = True
        if self._after_required:
            found.refused |= found.after.missing()

    def _documents(self, made: KernelBatch, updates: Chosen) -> Generator[Request, Answer, list[bytes | None]]:
        records = made.records[updates]
        events = made.events.data
        names = [self._name_of(bytes(events[start:end])) for start, end in _places(records, event_record.NS_START)]
        keys = [bytes(events[start:end]) for start, end in _places(records, event_record.KEY_START)]
        uuids = _uuids(records) if self._match_uuid else [None] * len(records)
        times = _times(records, event_record.CLUSTER_TIME)
        lookups = [
            DocumentLookup(*name, key, time, uuid, self._by_uuid)
            for name, key, time, uuid in zip(names, keys, times, uuids, strict=True)
        ]
        answer = yield NeedDocuments(tuple(lookups))
        return _checked(answer, len(lookups))

    def _name_of(self, namespace: bytes) -> tuple[str, str]:
        """Database and collection of the document ``ns``."""
        name = self._names.get(namespace)
        if name is None:
            texts = [raw_bson.value(namespace, element)[4:-1] for element in raw_bson.elements(namespace)]
            name = self._names[namespace] = texts[0].decode("utf-8", "replace"), texts[1].decode("utf-8", "replace")
        return name


class _Field:
    """One of the two image fields of ``m`` events.

    ``images``       what was found for the events that have the field, in order
    ``start``        int64[m], and ``end``: offsets into all ``images`` together; -1 where an event has no such field,
                     start and end the same where it is null
    """

    def __init__(self, count: int) -> None:
        self.images: list[bytes | None] = []
        self.start: Offsets = np.full(count, -1, np.int64)
        self.end: Offsets = np.full(count, -1, np.int64)

    def put(self, events: Chosen) -> None:
        """The images belong to these events."""
        ends = np.cumsum([0 if image is None else len(image) for image in self.images])
        self.end[events] = ends
        self.start[events] = np.append(0, ends[:-1])

    def missing(self) -> Chosen:
        found: Chosen = (self.start >= 0) & (self.start == self.end)
        return found

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return int(self.end.max(initial=0))


class _Images:
    """What was found for ``m`` events. ``refused`` (bool[m]): the plain stages have something to say about it."""

    def __init__(self, count: int) -> None:
        self.before = _Field(count)
        self.after = _Field(count)
        self.refused: Chosen = np.zeros(count, np.bool_)

    @property
    def size(self) -> int:
        return self.before.size + self.after.size


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


def _pre_images(made: KernelBatch, events: Chosen) -> Generator[Request, Answer, list[bytes | None]]:
    records = made.records[events]
    times = _times(records, event_record.IMAGE_TIME)
    indexes = records[:, event_record.IMAGE_INDEX // 8].tolist()
    keys = tuple(map(PreImageKey, _uuids(records), times, indexes))
    answer = yield NeedPreImages(keys)
    return _checked(answer, len(keys))


def _apply_deltas(made: KernelBatch, updates: Chosen, images: list[bytes | None]) -> list[int]:
    """Turn the pre-images of these updates into post-images; gives the numbers of the events where that fails."""
    wrong = []
    raw = made.raw.data
    places = made.column(event_record.OBJECT)[updates].tolist()
    for index, (event, place) in enumerate(zip(np.flatnonzero(updates).tolist(), places, strict=True)):
        image = images[index]
        if image is None:
            continue
        try:
            images[index] = apply_diff(image, _delta_of(raw, place))
        except TailraceError:
            wrong.append(event)
    return wrong


def _delta_of(raw: memoryview, place: int) -> bytes:
    """The delta of the update whose ``o`` begins at ``place``. Raises ``OplogFormatError`` where it has none."""
    start = place + 4 + len(_DELTA)
    if raw[place + 4 : start].tobytes() == _DELTA:
        return bytes(raw[start : start + int.from_bytes(raw[start : start + 4], "little")])
    update = bytes(raw[place : place + int.from_bytes(raw[place : place + 4], "little")])
    diff = raw_bson.find(update, b"diff")
    if diff is None or diff.type != raw_bson.OBJECT:
        raise OplogFormatError("a post-image is asked of an update entry without a delta")
    return raw_bson.value(update, diff)


def _places(records: Offsets, slot: int) -> Iterator[tuple[int, int]]:
    """Start and end of a part of the events, whose columns stand side by side."""
    return zip(records[:, slot // 8].tolist(), records[:, slot // 8 + 1].tolist(), strict=True)


def _times(records: Offsets, slot: int) -> Iterator[ClusterTime]:
    return map(ClusterTime, records[:, slot // 8].astype(np.uint64).tolist())


def _uuids(records: Offsets) -> list[bytes]:
    together = records[:, _UUID].tobytes()
    return [together[place : place + 16] for place in range(0, len(together), 16)]


def _checked(answer: Answer, count: int) -> list[bytes | None]:
    invariant(answer is not None and len(answer) == count, "a request for images was not answered in full")
    return list(answer or ())


def _spliced(made: KernelBatch, found: _Images, kept: Chosen) -> KernelBatch:
    """The batch with the images in its events; ``kept`` are those of the events before that it still has."""
    if not len(made):
        return made
    records = made.records.copy()
    before, after = found.before, found.after
    data = b"".join(image for image in (*before.images, *after.images) if image)
    images = np.frombuffer(data or b"\0", np.uint8)
    after_start = np.where(after.start >= 0, after.start + before.size, -1)[kept]
    after_end = (after.end + before.size)[kept]
    before_start, before_end = before.start[kept], before.end[kept]
    size = int((made.end - made.start).sum())
    size += int((after_end - after_start + image_splice.AFTER_ROOM)[after_start >= 0].sum())
    size += int((before_end - before_start + image_splice.BEFORE_ROOM)[before_start >= 0].sum())
    out: Bytes = np.empty(size, np.uint8)
    job = np.zeros(image_splice.JOB_SIZE // 8, np.int64)
    slots: dict[int, npt.NDArray[np.generic]] = {
        image_splice.RECORDS: records,
        image_splice.EVENTS: made.events,
        image_splice.OUT: out,
        image_splice.FRAGMENTS: _TEXT,
        image_splice.IMAGES: images,
        image_splice.AFTER_START: after_start,
        image_splice.AFTER_END: after_end,
        image_splice.BEFORE_START: before_start,
        image_splice.BEFORE_END: before_end,
    }
    for slot, array in slots.items():
        job[slot // 8] = address(array)
    job[image_splice.COUNT // 8] = len(records)
    written = image_splice.splice(address(job))
    invariant(written == size, "the events with their images are not of the size that was computed")
    return made.rewritten(out, records)
