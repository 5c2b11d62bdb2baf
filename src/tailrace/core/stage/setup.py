"""What the stages of one stream are built from, and what each of them says about itself: whether the stream needs
it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Self

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.expression import CompiledPipeline
from tailrace.core.expression.values.compare import Order
from tailrace.core.plan.conjuncts import Conjunct
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import Answer, Request
from tailrace.errors import invariant


@dataclass(frozen=True, slots=True)
class ShardSetup:
    """A stream over one oplog.

    ``user``            the user's pipeline, compiled
    ``before_images``   the parts of its ``$match`` stages that are asked before images are looked up
    ``between_images``  those that are asked between the pre-image and ``fullDocument``
    ``after_images``   those that are asked after the images, before the stages that they were moved past
    ``matches_ahead``   whether asking the first ones ahead of their place makes a difference
    ``order``           how values are compared
    ``looks_up``        the image fields that are looked up
    ``searches``        the event that the stream is resumed from is searched for here
    ``witnesses``       that search needs to see events that the user's stages may leave out
    ``goes_on``         an invalidate does not end this part
    """

    plan: Plan
    user: CompiledPipeline
    before_images: tuple[Conjunct, ...]
    between_images: tuple[Conjunct, ...]
    after_images: tuple[Conjunct, ...]
    matches_ahead: bool
    order: Order
    looks_up: frozenset[bytes]
    searches: bool
    witnesses: bool
    goes_on: bool


@dataclass(frozen=True, slots=True)
class RouterSetup:
    """A stream after the merge, or over one oplog.

    ``user``           the user's pipeline, compiled
    ``ensures``        the stream must meet the event that it is resumed from
    ``topology``       a merged stream's ``HandleTopologyChange``; ``None`` over a single oplog
    ``adds_sort_key``  the stream is a shard's, and a router of the server's merges it
    """

    plan: Plan
    user: CompiledPipeline
    ensures: bool
    topology: RouterStage | None
    adds_sort_key: bool


class ShardStage:
    """A stage of the shard's part that events go through. One that every stream needs says nothing of it."""

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        """Whether the stream needs this stage."""
        return True

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        """The stage of a stream."""
        return cls()

    def process(self, events: list[Any], out: list[ChangeEvent]) -> Generator[Request, Answer, None] | None:
        """Append to ``out`` what leaves; yield requests. Where it raises, what is in ``out`` comes before the error."""
        raise NotImplementedError


class RouterStage:
    """A stage after the merge. One that every stream needs says nothing of it."""

    @classmethod
    def is_needed(cls, setup: RouterSetup) -> bool:
        """Whether the stream needs this stage."""
        return True

    @classmethod
    def of(cls, setup: RouterSetup) -> Self:
        """The stage of a stream."""
        return cls()

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> Generator[Request, Answer, None] | None:
        """As that of a shard's stage."""
        raise NotImplementedError


def searched_token(plan: Plan) -> ResumeToken:
    """The token of the event that the stream is resumed from."""
    invariant(plan.start_token is not None, "a token is searched for without one")
    return plan.start_token  # type: ignore[return-value]
