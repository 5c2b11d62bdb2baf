"""AddPreImage: ``fullDocumentBeforeChange`` from the pre-image collection, one request for a batch (semantics 5)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Self

from tailrace.errors import ServerError, invariant
from tailrace.event.change_event import NULL_DOCUMENT, ChangeEvent
from tailrace.plan.conjuncts import BEFORE_CHANGE
from tailrace.plan.options import StreamOptions
from tailrace.plan.request import Answer, NeedPreImages
from tailrace.stage.setup import ShardSetup, ShardStage


class AddPreImage(ShardStage):
    """Fills ``full_document_before_change`` of updates, replacements and deletes.

    Not found: null with ``whenAvailable``; with ``required`` ``ServerError`` 47 at that event.
    """

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return BEFORE_CHANGE in setup.looks_up

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.plan.options)

    def __init__(self, options: StreamOptions) -> None:
        self._required = options.full_document_before_change == "required"

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> Generator[NeedPreImages, Answer, None]:
        images = yield from request_pre_images([event for event in events if event.image_key is not None])
        for event in events:
            if event.image_key is not None:
                image = images[id(event)]
                if image is None and self._required:
                    raise ServerError(
                        "Change stream was configured to require a pre-image for all update, delete and replace "
                        f"events, but the pre-image was not found for event: {event.describe()}",
                        code=47,
                    )
                event.full_document_before_change = NULL_DOCUMENT if image is None else image
            out.append(event)


def request_pre_images(
    events: list[ChangeEvent],
) -> Generator[NeedPreImages, Answer, dict[int, bytes | None]]:
    """Ask for the pre-images of events that have an image key; the answers by the event's identity."""
    if not events:
        return {}
    keys = tuple(event.image_key for event in events if event.image_key is not None)
    answer = yield NeedPreImages(keys)
    invariant(answer is not None and len(answer) == len(events), "a request for pre-images was not answered in full")
    return {id(event): image for event, image in zip(events, answer or (), strict=True)}
