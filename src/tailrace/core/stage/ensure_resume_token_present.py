"""EnsureResumeTokenPresent: the first event that arrives must be the one resumed from; it is swallowed (semantics 6.2).

Two shards that drop a collection at the same cluster time give the same token: all events that have it are swallowed.

The user's stages run before this one, as on the server from 6.0 on: if they leave out the event resumed from, the
resume fails at the first later event that passes (semantics 8). Before 6.0 witnesses of the events bypass them.
"""

from __future__ import annotations

from typing import Self

from tailrace.core.event.bson_text import token_text
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.stage.check_resumability import ResumeStatus, compare_with_token
from tailrace.core.stage.setup import RouterSetup, RouterStage, searched_token
from tailrace.errors import ChangeStreamFatal


class EnsureResumeTokenPresent(RouterStage):
    """Raises ``ChangeStreamFatal`` (280) where the stream has passed the token without meeting it.

    ``searching`` until the event is found. The event of a fragment's token is not swallowed: ``SplitLargeEvent`` gives
    the fragments after it.
    """

    @classmethod
    def is_needed(cls, setup: RouterSetup) -> bool:
        return setup.ensures

    @classmethod
    def of(cls, setup: RouterSetup) -> Self:
        return cls(searched_token(setup.plan))

    def __init__(self, token: ResumeToken) -> None:
        self._token = token
        self.searching = True
        self._passed = False

    @property
    def is_over(self) -> bool:
        """Whether every further event passes. A witness may still come, and does not."""
        return self._passed

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            if self._passed:
                if not event.witness:
                    out.append(event)
                continue
            status = compare_with_token(event, self._token)
            if status is ResumeStatus.CHECK_NEXT:
                continue
            if status is ResumeStatus.SURPASSED and self.searching:
                raise ChangeStreamFatal(
                    f"cannot resume stream; the resume token was not found. {token_text(event.token_bson)}",
                    hint="The token is of another stream, or the pipeline excludes its event: start a new stream",
                )
            self.searching = False
            if event.witness:
                continue
            if status is ResumeStatus.SURPASSED or self._token.fragment_num is not None:
                self._passed = True
                out.append(event)
