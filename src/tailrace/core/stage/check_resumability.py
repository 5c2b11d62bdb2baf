"""CheckResumability: drops what comes before the token that a stream is resumed from (semantics 1.7, 6, 10).

Comparing an event with the token has three outcomes: check the next one (the event is before the token), found, and
surpassed. Found and surpassed pass on; ``EnsureResumeTokenPresent`` decides about them.

From 6.0 on the user's stages stand between the two, and may leave out the event that is searched for. Before, they
stood after both. Here they stand between in any case (in a shard's part of a merged stream they have to), and before
6.0 a *witness* of each event that the search depends on bypasses them.
"""

from __future__ import annotations

from enum import Enum
from typing import Self

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken, TokenParts
from tailrace.core.stage.setup import ShardSetup, ShardStage, searched_token


class ResumeStatus(Enum):
    CHECK_NEXT = "check the next one"
    FOUND = "found"
    SURPASSED = "surpassed"


def _place(parts: TokenParts) -> tuple[int, int, int, bool, bytes, bytes]:
    """What the resume search compares, in its order. Fragments of one event share their place."""
    return (
        parts.cluster_time,
        parts.token_type,
        parts.txn_op_index,
        parts.from_invalidate,
        parts.uuid or b"",
        parts.identifier_key or b"",
    )


def compare_with_token(event: ChangeEvent, token: ResumeToken) -> ResumeStatus:
    """Where ``event`` stands relative to ``token``."""
    here, there = _place(event.token.parts), _place(token.parts)
    if here == there:
        return ResumeStatus.FOUND
    return ResumeStatus.CHECK_NEXT if here < there else ResumeStatus.SURPASSED


class CheckResumability(ShardStage):
    """Lets pass the event of the start token and everything after it.

    ``witnesses``  a witness goes ahead of the first event after the token, and stands in for the token's own, which
                   is not given in any case
    ``done``       that place is reached; with witnesses, it is passed
    """

    @classmethod
    def is_needed(cls, setup: ShardSetup) -> bool:
        return setup.searches

    @classmethod
    def of(cls, setup: ShardSetup) -> Self:
        return cls(searched_token(setup.plan), witnesses=setup.witnesses)

    def __init__(self, token: ResumeToken, *, witnesses: bool = False) -> None:
        self._token = token
        self.witnesses = witnesses
        self.done = False

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for position, event in enumerate(events):
            if self.done:
                out.extend(events[position:])
                return
            status = compare_with_token(event, self._token)
            if status is ResumeStatus.CHECK_NEXT:
                continue
            if self.witnesses:
                out.append(_witness(event))
            self.done = status is ResumeStatus.SURPASSED or not self.witnesses
            if self.done:
                out.append(event)


def _witness(event: ChangeEvent) -> ChangeEvent:
    """What the search needs to know of an event: its place."""
    witness = ChangeEvent(event.operation_type, event.cluster_time, event.token_bson)
    witness.witness = witness.bypasses = True
    return witness
