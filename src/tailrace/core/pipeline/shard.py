"""The stages in a row: oplog batches in, change events out.

``SHARD_STAGES`` here and ``ROUTER_STAGES`` in ``pipeline.router`` hold the server's order; each stage says whether a
stream needs it (``is_needed``). A stream over one oplog runs both in a row; in a sharded cluster every shard runs the
first ones, and ``stream.merge`` runs the others once. Each stage appends to a list what it gives; when one raises,
what it had given by then still goes through the rest, so that every event before an error is delivered before it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

from tailrace.core import raw_bson
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, parse_entry
from tailrace.core.pipeline.document_key import CatalogKeys
from tailrace.core.pipeline.pushdown import plan_pushdown
from tailrace.core.pipeline.quarantine import Aside, process
from tailrace.core.pipeline.router import RouterPipeline, compiled, must_search
from tailrace.core.pipeline.task import relayed
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import Answer, Emit, NeedEntries, OplogBatch, Running
from tailrace.core.stage.add_post_image import AddPostImage
from tailrace.core.stage.add_pre_image import AddPreImage
from tailrace.core.stage.check_invalidate import CheckInvalidate
from tailrace.core.stage.check_resumability import CheckResumability
from tailrace.core.stage.check_topology_change import CheckTopologyChange
from tailrace.core.stage.match_classic_events import MatchClassicEvents
from tailrace.core.stage.oplog_match import OplogMatch
from tailrace.core.stage.setup import RouterStage, ShardSetup, ShardStage
from tailrace.core.stage.transform import Transform
from tailrace.core.stage.unwind_transaction import UnwindTransaction, is_chain_member
from tailrace.core.stage.user_stages import MatchAhead, MatchBehindImages, MatchBetweenImages, UserStages
from tailrace.errors import InternalError, LaterEntryError, OplogFormatError, TailraceError, invariant

#: The server's stages of a shard, in the order in which it builds them; ``pipeline.router`` has those after the merge.
SHARD_STAGES: Final = (
    OplogMatch,
    UnwindTransaction,
    Transform,
    CheckInvalidate,
    MatchClassicEvents,
    CheckResumability,
    CheckTopologyChange,
    MatchAhead,
    AddPreImage,
    MatchBetweenImages,
    AddPostImage,
    MatchBehindImages,
    UserStages,
)

#: The first two work on entries, and every stream needs them.
_EVENT_STAGES: Final[tuple[type[ShardStage], ...]] = SHARD_STAGES[2:]

#: How many entries pass the stages together: enough to ask for images in bulk, few enough to bound what is in flight.
_CHUNK_ENTRIES: Final = 1_000


class ChangeStreamPipeline:
    """One running change stream over one oplog.

    ``mid_stream``   a later slice of a stream whose start another slice has found: nothing is searched for
    ``shard_part``   a shard's part of a merged stream: the router's stages are left to the merge
    ``on_shard``     the oplog is a shard's: before 5.3 document keys of inserts need its catalog (``NeedShardKeys``)
    ``pushes_down``  whether the user's ``$match`` is asked of entries before they are transformed; without it the
                     stream gives the same and costs more
    ``user_stages``  the user's pipeline, compiled
    ``pushdown``     what is asked where
    ``invalidated``  the invalidate event has passed: the stream is over
    ``high_water``   cluster time up to which every entry has been seen
    ``searching``    the event resumed from has not been met yet
    ``quarantined``  events that were put aside; ``None``: they end the stream
    ``unwind``       the stage that knows the entries of transactions
    """

    def __init__(
        self,
        plan: Plan,
        *,
        mid_stream: bool = False,
        shard_part: bool = False,
        on_shard: bool = False,
        pushes_down: bool = True,
    ) -> None:
        invariant(plan.read_after is not None, "a pipeline is built from a plan without a start")
        self.plan = plan
        self.invalidated = False
        self.quarantined: Aside = [] if plan.quarantines else None
        self.high_water = ClusterTime(plan.read_after or 0)
        self._start = plan.start or ClusterTime(0)
        self._token = plan.first_token
        self._unparsed: bytes | None = None  # the last event's token, where it is later than ``_token``
        self.user_stages = compiled(plan)
        self.pushdown = plan_pushdown(plan, self.user_stages, enabled=pushes_down)
        searches = not mid_stream and must_search(plan)
        # With needsMerge a shard leaves the search to others.
        witnesses = plan.profile.searches_before_user_stages and (shard_part or not plan.options.needs_merge)
        self._goes_on = plan.options.needs_merge and not shard_part and not plan.profile.shard_part_ends
        setup = self._setup(searches=searches, witnesses=witnesses)
        made: dict[type, ShardStage] = {one: one.of(setup) for one in _EVENT_STAGES if one.is_needed(setup)}
        self._transform: Transform = made[Transform]  # type: ignore[assignment]
        self._check_invalidate = made[CheckInvalidate]
        self._resumability: CheckResumability | None = made.get(CheckResumability)  # type: ignore[assignment]
        asked = None if self.searches_unmatched else self.pushdown.entry_test
        self._oplog_match = OplogMatch(plan.options, plan.profile, asked)
        self.unwind = UnwindTransaction(
            self._oplog_match, multi_op_is_no_transaction=plan.profile.multi_op_is_no_transaction
        )
        self.catalog_keys = CatalogKeys() if on_shard and plan.profile.insert_keys_from_catalog else None
        self.shard_part = shard_part
        # Of a merged stream's parts one holds the event of the token; whether any does is the merger's question.
        ensures = searches and not plan.options.needs_merge
        self._router = RouterPipeline(plan, ensures=ensures, adds_sort_key=plan.options.needs_merge)
        #: What events go through: without a merge, the router's stages too.
        self._stages: tuple[ShardStage | RouterStage, ...] = tuple(made.values())
        if not shard_part:
            self._stages += self._router.stages

    def _setup(self, *, searches: bool, witnesses: bool) -> ShardSetup:
        plan, options, pushdown = self.plan, self.plan.options, self.pushdown
        # Without images and without stages to pass, the user's own stages do the same at the same cost.
        moves = options.full_document != "default" or options.full_document_before_change != "off"
        moves |= any(one.moved or one.fails for one in pushdown.conjuncts)
        return ShardSetup(
            plan,
            self.user_stages,
            before_images=pushdown.before_images,
            between_images=pushdown.between_images,
            after_images=pushdown.after_images,
            matches_ahead=moves,
            order=pushdown.order,
            looks_up=pushdown.looks_up,
            searches=searches,
            witnesses=witnesses,
            goes_on=self._goes_on,
        )

    @property
    def oplog_filter(self) -> bytes | None:
        """The query by which the source of the entries may leave some out from here on; ``None``: it gives all.

        Before 6.0 it does not ask the user's ``$match`` until the event resumed from was found.
        """
        return self.pushdown.scope_filter() if self.searches_unmatched else self.pushdown.oplog_filter

    @property
    def searches_unmatched(self) -> bool:
        search = self._resumability
        return search is not None and search.witnesses and not search.done

    @property
    def stage_names(self) -> list[str]:
        """The stages that run, in order; the user's by their own names."""
        names = [OplogMatch.__name__, UnwindTransaction.__name__]
        for stage in self._stages:
            owner = type(stage)
            names += [own.name for own in self.user_stages.stages] if owner is UserStages else [owner.__name__]
        return names

    @property
    def searching(self) -> bool:
        return self._router.searching

    @property
    def resume_token(self) -> ResumeToken:
        """The post-batch resume token: where a new stream goes on from here (semantics 7). It never goes back."""
        if self._unparsed is not None:
            self._token, self._unparsed = ResumeToken.from_trusted(self._unparsed), None
        return self._token

    @property
    def unknown_operations(self) -> dict[str, int]:
        """How many entries, and operations inside of entries, were skipped, or shown as something else, because their
        kind is not known, by kind."""
        return {**self._oplog_match.unknown_operations, **self._transform.unknown_operations}

    def process(self, batch: OplogBatch) -> Running:
        """Run a batch through the stages: yields requests (answer them) and ``Emit`` (answer ``None``).

        After invalidation the rest of the batch is not processed. Raises ``OplogFormatError`` with the entry's
        position, ``LaterEntryError``, 280, 286, or what a stage raises, after everything before it was emitted.
        """
        chunk: list[OplogEntry] = []
        try:
            for raw in raw_bson.split(batch.raw):
                entry = parse_entry(raw)
                if entry.cluster_time < self._start:
                    continue
                if self._matches(entry, raw):
                    chunk.append(entry)
                elif is_chain_member(entry):
                    self.unwind.remember(entry.cluster_time, raw)
                if len(chunk) >= _CHUNK_ENTRIES:
                    full, chunk = chunk, []
                    yield from self._run(full)
                    if self.invalidated:
                        return
        except (OplogFormatError, LaterEntryError):
            yield from self._run(chunk)
            if self.invalidated:
                return
            raise
        yield from self._run(chunk)
        if not self.invalidated:
            self._promise(batch.high_water)

    def _matches(self, entry: OplogEntry, raw: bytes) -> bool:
        try:
            return self._oplog_match.matches(entry)
        except Exception as error:
            if isinstance(error, TailraceError) and not isinstance(error, InternalError):
                raise
            raise raw_bson.explained([raw], error) from error

    def advance(self, token_bson: bytes | None, high_water: ClusterTime) -> None:
        """Move on past what other code than ``process`` has made of the stream's entries: ``token_bson`` is the resume
        token of the last event that it gives (``None``: it gives none), and ``high_water`` is as in a batch."""
        if token_bson is not None:
            self._unparsed = token_bson
        self._promise(high_water)

    def _run(self, entries: list[OplogEntry]) -> Running:
        """One chunk through all stages, transactions in bounded pieces."""
        if entries:
            yield from self._run_pieces(self.unwind.process(entries))

    def process_operations(self, commit: OplogEntry, member: bytes, index: int, part: slice) -> Running:
        """A part of the operations of one of a transaction's entries through the stages; ``index`` is that of the first
        one in ``member``. For those who unwind the others themselves."""
        yield from self._run_pieces(self.unwind.operations(commit, parse_entry(member), index, part))

    def _run_pieces(self, pieces: Generator[NeedEntries | list[OplogEntry], Answer, object]) -> Running:
        def events(piece: NeedEntries | list[OplogEntry]) -> Running:
            if isinstance(piece, list):
                yield from self._run_piece(piece)
                if self.invalidated:
                    pieces.close()  # what follows is not processed

        return relayed(pieces, events)

    def _run_piece(self, piece: list[OplogEntry]) -> Running:
        if self.catalog_keys is not None:
            yield from self.catalog_keys.process(piece)
        while piece and not self.invalidated:
            yield from self._run_stages(piece)
            piece = self._transform.left

    def _run_stages(self, piece: list[OplogEntry]) -> Running:
        """As many of the entries as are not too many bytes through all stages; the others are left."""
        items: list[Any] = piece
        failure: TailraceError | None = None
        invalidate: ChangeEvent | None = None
        for stage in self._stages:
            out: list[ChangeEvent] = []
            try:
                yield from process(stage, items, out, self.quarantined)
            except TailraceError as error:
                # What this stage had given comes before its error; an error further down comes earlier in the stream.
                failure, invalidate = error, None
                if isinstance(error, InternalError):
                    found = raw_bson.explained(_documents(items), error)
                    failure = found if isinstance(found, TailraceError) else error
            except Exception as error:
                damage = raw_bson.explained(_documents(items), error)
                if damage is error or not isinstance(damage, OplogFormatError):
                    raise  # our own bug
                failure, invalidate = damage, None
            if self._resumability is not None and stage is self._resumability and not self.searches_unmatched:
                self._oplog_match.may_pass = self.pushdown.entry_test
            if stage is self._check_invalidate and not self._goes_on and (ending := _ending(out)) is not None:
                # The stream is over here: what failed in a stage above stands after it.
                invalidate, failure = ending, None
            items = out
        if items:
            self._unparsed = items[-1].token_bson
            yield Emit(items)
        if failure is not None:
            raise failure
        if invalidate is not None:
            self.invalidated = True
            if self.plan.profile.ends_with_token_of_invalidate:
                self._unparsed = invalidate.token_bson
            self.high_water = invalidate.cluster_time

    def _promise(self, high_water: ClusterTime) -> None:
        """Move the post-batch resume token to the end of what was scanned, where that is later than its time. A mark of
        the same time is rewritten: one of version 1 that a version 2 stream was started with becomes version 2."""
        if self._unparsed is not None:
            if high_water <= self.high_water:
                return  # an event has come since that was promised
            if high_water == self.resume_token.cluster_time:
                self.high_water = high_water
                return  # the event's own token stays
        self.high_water = max(self.high_water, high_water)
        reached = self.resume_token.cluster_time
        if high_water > reached or (high_water == reached and self._token.is_high_water_mark):
            self._token = ResumeToken.high_water_mark(high_water, version=self.plan.token_version)


def _documents(items: list[Any]) -> Iterator[bytes]:
    """What a stage was at work on: the documents of entries, or events."""
    for item in items:
        if isinstance(item, OplogEntry):
            yield from (part for part in (item.o, item.o2) if part is not None)
        else:
            yield item.to_bson()


def _ending(events: list[ChangeEvent]) -> ChangeEvent | None:
    """The invalidate event that ends the stream, if this piece holds it; nothing stands after it."""
    if events and events[-1].from_invalidate and not events[-1].swallow:
        return events[-1]
    return None
