"""The stages after the merge: once for a stream, however many shards it reads."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.expression import CompiledPipeline, compile_stages
from tailrace.core.pipeline.quarantine import Aside, process
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import Answer, Request
from tailrace.core.stage.add_sort_key import AddSortKey
from tailrace.core.stage.ensure_resume_token_present import EnsureResumeTokenPresent
from tailrace.core.stage.handle_topology_change import HandleTopologyChange
from tailrace.core.stage.setup import RouterSetup, RouterStage
from tailrace.core.stage.split_large_event import CheckEventSize, SplitLargeEvent
from tailrace.core.stage.user_stages import GuardIdentifier
from tailrace.errors import TailraceError

#: The server's stages after the merge, in the order in which it builds them.
ROUTER_STAGES: Final[tuple[type[RouterStage], ...]] = (
    HandleTopologyChange,
    EnsureResumeTokenPresent,
    GuardIdentifier,
    CheckEventSize,
    SplitLargeEvent,
    AddSortKey,
)


class RouterPipeline:
    """The router's stages of one stream.

    ``ensures``   the stream must meet the event that it is resumed from
    ``topology``  of a merged stream; ``None`` over a single oplog
    ``adds_sort_key``  the stream is a shard's, and a router of the server's merges it
    """

    def __init__(
        self,
        plan: Plan,
        *,
        ensures: bool,
        topology: HandleTopologyChange | None = None,
        adds_sort_key: bool = False,
    ) -> None:
        #: Events that were put aside.
        self.quarantined: Aside = [] if plan.quarantines else None
        user = compiled(plan)
        self._guards = user.replaces_id
        setup = RouterSetup(plan, user, ensures=ensures, topology=topology, adds_sort_key=adds_sort_key)
        self.stages = tuple(stage.of(setup) for stage in ROUTER_STAGES if stage.is_needed(setup))
        ensuring = (stage for stage in self.stages if isinstance(stage, EnsureResumeTokenPresent))
        self._ensure = next(ensuring, None)

    @property
    def searching(self) -> bool:
        """The event resumed from has not been met yet."""
        return self._ensure is not None and self._ensure.searching

    @property
    def sees_events(self) -> bool:
        """Whether a stage must see each event: blocks do not pass by then. Of a block's events the merge knows that the
        topology's and the size's stages would let them pass."""
        return self._guards or (self._ensure is not None and not self._ensure.is_over)

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> Generator[Request, Answer, None]:
        """Run merged events through the stages: appends to ``out`` what leaves, yields requests. Where a stage raises,
        what comes before its error is in ``out``."""
        failure: TailraceError | None = None
        items = events
        for stage in self.stages:
            given: list[ChangeEvent] = []
            try:
                yield from process(stage, items, given, self.quarantined)
            except TailraceError as error:
                failure = error
            items = given
        out.extend(items)
        if failure is not None:
            raise failure


def compiled(plan: Plan) -> CompiledPipeline:
    """The user's stages, ready to run, in the language of the plan's server."""
    options = plan.options
    return compile_stages(
        options.pipeline,
        let=options.let,
        collation=options.collation,
        show_expanded_events=options.show_expanded_events,
        event_places=plan.profile.places,
        version=plan.profile.version,
    )


def must_search(plan: Plan) -> bool:
    """Whether the stream is resumed from an event, which has to be found."""
    return plan.start_token is not None and not plan.start_token.is_high_water_mark
