"""CheckResumability: drops what comes before the token that a stream is resumed from (semantics 1.7, 6; seed 001).

Comparing an event with the token has three outcomes: check the next one (the event is before the token), found, and
surpassed. Found and surpassed pass on; ``EnsureResumeTokenPresent`` decides about them.
"""

from __future__ import annotations

from enum import Enum

from tailrace.event.change_event import ChangeEvent
from tailrace.event.resume_token import ResumeToken, TokenParts


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


class CheckResumability:
    """Lets pass the event of the start token and everything after it. ``done`` once that place is reached."""

    def __init__(self, token: ResumeToken) -> None:
        self._token = token
        self.done = False

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        if self.done:
            out.extend(events)
            return
        for position, event in enumerate(events):
            if compare_with_token(event, self._token) is not ResumeStatus.CHECK_NEXT:
                self.done = True
                out.extend(events[position:])
                return
