"""AddPostImage: ``fullDocument`` of updates, looked up or computed, one request for a batch (semantics 5)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, Self

from tailrace.core import raw_bson
from tailrace.core.event.change_event import NULL_DOCUMENT, ChangeEvent
from tailrace.core.oplog.stored_document import apply_operation
from tailrace.core.oplog.update_delta import apply_diff
from tailrace.core.plan.conjuncts import FULL_DOCUMENT
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.request import Answer, DocumentLookup, NeedDocuments, NeedEntries, NeedPreImages
from tailrace.core.raw_bson import OBJECT
from tailrace.core.stage.add_pre_image import request_pre_images
from tailrace.core.stage.setup import ShardSetup, ShardStage
from tailrace.errors import OplogFormatError, ServerError, TailraceError, at_event, invariant

#: The server's error if the collection's name now belongs to a view.
_IN_A_VIEW: Final = 166


class AddPostImage(ShardStage):
    """``updateLookup`` reads the current document, from the collection of that name or with that UUID (by the server's
    version); ``whenAvailable`` and ``required`` apply the delta to the pre-image.

    Not found: null, but with ``required`` ``ServerError`` 47 at that event.
    """

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return FULL_DOCUMENT in setup.looks_up

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        profile = setup.plan.profile
        return cls(
            setup.plan.options,
            looks_up_by_uuid=profile.looks_up_by_uuid,
            shows_stored=not profile.expanded_events_and_images,
        )

    def __init__(self, options: StreamOptions, *, looks_up_by_uuid: bool = False, shows_stored: bool = False) -> None:
        # For servers without images of their own (exact images): the stored document, from entries of the old form too.
        self._shows_stored = shows_stored
        self._looks_up = options.full_document == "updateLookup"
        self._required = options.full_document == "required"
        self._by_uuid = looks_up_by_uuid
        self._match_uuid = looks_up_by_uuid or options.match_collection_uuid_for_update_lookup
        # A pre-image that the stage before has looked up, found or not, is not looked up again.
        self._has_pre_images = options.full_document_before_change != "off"

    def process(
        self, events: list[ChangeEvent], out: list[ChangeEvent]
    ) -> Generator[NeedDocuments | NeedPreImages | NeedEntries, Answer, None]:
        updates = [event for event in events if _is_update(event)]
        if self._looks_up:
            failure = yield from self._look_up(updates)
            for event in events:
                if _is_update(event) and event.full_document is None and failure is not None:
                    # Only the code says whether the error is about this document or about the connection.
                    raise at_event(failure, event) if failure.code == _IN_A_VIEW else failure
                out.append(event)
            return
        if self._has_pre_images:
            images = {id(event): event.full_document_before_change or None for event in updates}
        else:
            images = yield from request_pre_images(updates)
        for event in events:
            if _is_update(event):
                event.full_document = self._post_image(event, images[id(event)])
            out.append(event)

    def _look_up(self, updates: list[ChangeEvent]) -> Generator[NeedDocuments, Answer, TailraceError | None]:
        """Fill the updates' documents, all at once; one by one up to the first that fails where that cannot be done,
        so that the error stands at its event. Returns that error."""
        if not updates:
            return None
        try:
            yield from self._ask_for(updates)
        except TailraceError as error:
            if len(updates) == 1:
                return error
            for event in updates:
                try:
                    yield from self._ask_for([event])
                except TailraceError as single:
                    return single
        return None

    def _ask_for(self, updates: list[ChangeEvent]) -> Generator[NeedDocuments, Answer, None]:
        answer = yield NeedDocuments(tuple(self._lookup(event) for event in updates))
        invariant(answer is not None and len(answer) == len(updates), "a look-up of documents was not answered in full")
        for event, document in zip(updates, answer or (), strict=True):
            event.full_document = NULL_DOCUMENT if document is None else document

    def _lookup(self, event: ChangeEvent) -> DocumentLookup:
        return DocumentLookup(
            event.database or "",
            event.collection or "",
            event.document_key or raw_bson.EMPTY_DOCUMENT,
            event.cluster_time,
            event.lookup_uuid if self._match_uuid else None,
            self._by_uuid,
        )

    def _post_image(self, event: ChangeEvent, pre_image: bytes | None) -> bytes:
        if pre_image is None:
            if self._required:
                error = ServerError(
                    "Change stream was configured to require a post-image for all update events, but the post-image "
                    f"was not found for event: {event.describe()}",
                    code=47,
                )
                raise at_event(error, event)
            return NULL_DOCUMENT
        position = f"oplog entry {event.cluster_time}"
        update = event.raw_update or raw_bson.EMPTY_DOCUMENT
        diff = raw_bson.find(update, b"diff")
        if self._shows_stored:
            return apply_operation(pre_image, b"u", update) or NULL_DOCUMENT
        if diff is None or diff.type != OBJECT:
            raise OplogFormatError("a post-image is asked of an update entry without a delta", position=position)
        try:
            return apply_diff(pre_image, raw_bson.value(update, diff))
        except OplogFormatError as error:
            raise OplogFormatError(error.message, position=position, code=error.code) from None


def _is_update(event: ChangeEvent) -> bool:
    """Whether the event may need a document. A witness of an update has none, and nobody is given it."""
    return event.operation_type == "update" and not event.witness
