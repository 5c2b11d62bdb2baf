"""The user's own stages on finished events, and the guard of ``_id`` after them (semantics 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

from tailrace.core import raw_bson
from tailrace.core.event.bson_text import spaced_document_text
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.expression import CompiledPipeline
from tailrace.core.expression.match import tree
from tailrace.core.expression.match.test import document_test
from tailrace.core.expression.values.compare import SIMPLE, Order
from tailrace.core.plan.conjuncts import Conjunct
from tailrace.core.raw_bson import OBJECT, encode_document, encode_element
from tailrace.core.stage.setup import RouterSetup, RouterStage, ShardSetup, ShardStage
from tailrace.errors import ChangeStreamFatal, ServerError, at_event

_MODIFIED: Final = (
    "Encountered an event whose _id field, which contains the resume token, was modified by the pipeline. Modifying "
    "the _id field of an event makes it impossible to resume the stream from that point. Only transformations that "
    "retain the unmodified _id field are allowed."
)


class MatchAhead(ShardStage):
    """Parts of the user's ``$match`` stages ahead of their place, as the server moves them there: before images are
    looked up, and before stages that leave alone what they ask for."""

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return setup.matches_ahead and bool(setup.before_images)

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.before_images, setup.order)

    def __init__(self, conjuncts: Sequence[Conjunct], order: Order = SIMPLE) -> None:
        self._passes = document_test(tree.And(tuple(one.node for one in conjuncts)), order)

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        passes = self._passes
        for event in events:
            # The invalidate that the stream is started after must reach the resume check whatever the match says.
            try:
                stays = event.swallow or event.bypasses or passes(event.to_bson())
            except ServerError as error:
                raise at_event(error, event) from error.__cause__
            if stays:
                out.append(event)


class MatchBetweenImages(MatchAhead):
    """Those parts that ask for the pre-image and for no other one, ahead of the look-up of ``fullDocument``: where that
    would fail for an event that they leave out, nobody asks."""

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return bool(setup.between_images)

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.between_images, setup.order)


class MatchBehindImages(MatchAhead):
    """Those parts that ask for images, ahead of the user's other stages."""

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return bool(setup.after_images)

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.after_images, setup.order)


class UserStages(ShardStage):
    """Every stage of the user's pipeline, in order.

    They stand before the search for the resume token, since the server lets all of them swap with it (measured on
    6.0.27 with a ``$match`` on a field that a ``$set`` before it computes): an event that they filter out is not found.
    """

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return bool(setup.user.stages)

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(setup.user)

    def __init__(self, pipeline: CompiledPipeline) -> None:
        self._pipeline = pipeline

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            if event.bypasses:
                out.append(event)
                continue
            try:
                document = self._pipeline.apply(event.to_bson())
            except ServerError as error:
                raise at_event(error, event) from error.__cause__
            if document is not None:
                event.replaced_by = document
            elif not event.swallow:
                continue
            out.append(event)


class GuardIdentifier(RouterStage):
    """Raises 280 where the user's stages changed or removed the resume token of an event that is given."""

    @classmethod
    def is_needed(cls, setup: RouterSetup) -> bool:
        return setup.user.replaces_id

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            if event.replaced_by is not None:
                try:
                    check_id(event.token_bson, event.replaced_by)
                except ChangeStreamFatal as error:
                    raise at_event(error, event) from None
            out.append(event)


def check_id(token_bson: bytes, document: bytes) -> None:
    """Raise ``ChangeStreamFatal`` (280) unless the document's ``_id`` is the token, byte for byte."""
    element = raw_bson.find(document, b"_id")
    if element is not None and element.type == OBJECT and raw_bson.value(document, element) == token_bson:
        return
    expected = encode_document(encode_element(OBJECT, b"_id", token_bson))
    found = raw_bson.EMPTY_DOCUMENT
    if element is not None:
        found = encode_document(document[element.start : element.end])
    raise ChangeStreamFatal(
        f"{_MODIFIED} Expected: {spaced_document_text(expected)} but found: {spaced_document_text(found)}"
    )
