"""AddPreImage: ``fullDocumentBeforeChange`` from the pre-image collection, one request for a batch (semantics 5).

Before 6.0 there is no such collection: with ``recordPreImages`` the server logs the document before an operation as a
no-op entry, and the operation's own entry says where (``preImageOpTime``). An event without that has no such field.
6.0 has both, for each collection the one or the other, and 5.0's entries are found by it too.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Self

from tailrace.core import raw_bson
from tailrace.core.event.change_event import NULL_DOCUMENT, ChangeEvent
from tailrace.core.oplog.erased import erased_digest
from tailrace.core.plan.conjuncts import BEFORE_CHANGE
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.request import Answer, NeedEntries, NeedPreImages
from tailrace.core.stage.setup import ShardSetup, ShardStage
from tailrace.errors import ServerError, at_event, invariant


class AddPreImage(ShardStage):
    """Fills ``full_document_before_change`` of updates, replacements and deletes.

    Not found: null with ``whenAvailable``; with ``required`` ``ServerError`` 47 at that event, or 51770 where the
    server has logged none.
    """

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return BEFORE_CHANGE in setup.looks_up

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.plan.options, logged=setup.plan.reads_logged_images)

    def __init__(self, options: StreamOptions, *, logged: bool = False) -> None:
        self._required = options.full_document_before_change == "required"
        self._logged = logged

    def process(
        self, events: list[ChangeEvent], out: list[ChangeEvent]
    ) -> Generator[NeedPreImages | NeedEntries, Answer, None]:
        asking = [event for event in events if event.image_key is not None]
        if self._logged:
            asking = [event for event in asking if event.logged_image is not None]
        images = yield from request_pre_images(asking)
        for event in events:
            if event.image_key is not None and self._logged and event.logged_image is None:
                if self._required:
                    error = ServerError(
                        "Change stream was configured to require a pre-image for all update, delete and replace "
                        f"events, but no pre-image optime was recorded for event: {event.describe()}",
                        code=51770,
                        hint="Before 6.0 a collection has pre-images from collMod with recordPreImages on",
                    )
                    raise at_event(error, event)
            elif event.image_key is not None:
                image = images[id(event)]
                if image is None and self._required:
                    error = ServerError(
                        "Change stream was configured to require a pre-image for all update, delete and replace "
                        f"events, but the pre-image was not found for event: {event.describe()}",
                        code=47,
                    )
                    raise at_event(error, event)
                event.full_document_before_change = NULL_DOCUMENT if image is None else image
            out.append(event)


def request_pre_images(
    events: list[ChangeEvent],
) -> Generator[NeedPreImages | NeedEntries, Answer, dict[int, bytes | None]]:
    """Ask for the pre-images of events that have an image key; the answers by the event's identity."""
    stored = yield from _request_stored_images([event for event in events if event.logged_image is None])
    return stored | (yield from _request_logged_images(events))


def _request_stored_images(events: list[ChangeEvent]) -> Generator[NeedPreImages, Answer, dict[int, bytes | None]]:
    if not events:
        return {}
    keys = tuple(event.image_key for event in events if event.image_key is not None)
    answer = yield NeedPreImages(keys)
    invariant(answer is not None and len(answer) == len(events), "a request for pre-images was not answered in full")
    return {id(event): image for event, image in zip(events, answer or (), strict=True)}


def _request_logged_images(events: list[ChangeEvent]) -> Generator[NeedEntries, Answer, dict[int, bytes | None]]:
    """Of the events whose pre-images are entries."""
    logged = [(event, event.logged_image) for event in events if event.logged_image is not None]
    if not logged:
        return {}
    answer = yield NeedEntries(tuple(time for _, time in logged))
    invariant(answer is not None and len(answer) == len(logged), "a request for entries was not answered in full")
    return {
        id(event): None if entry is None else _document_in(entry)
        for (event, _), entry in zip(logged, answer or (), strict=True)
    }


def _document_in(entry: bytes) -> bytes | None:
    """The document in ``o``; ``None`` where it was erased."""
    if erased_digest(entry) is not None:
        return None
    element = raw_bson.find(entry, b"o")
    return None if element is None or element.type != raw_bson.OBJECT else raw_bson.value(entry, element)
