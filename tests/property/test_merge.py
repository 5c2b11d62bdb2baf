"""The merge over random shards, batches, promises and orders of reading: the sorted union, never early, never stuck."""

from __future__ import annotations

from typing import Any, NamedTuple

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.event.event_block import EventBlock
from tailrace.core.event.resume_token import ResumeToken, token_order
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import NeedDocuments, NeedShard
from tailrace.core.stream.merge import CONFIG_SHARDS, MergedStream
from tailrace.core.stream.stream import Need
from tailrace.errors import ChangeStreamFatal, InternalError, OplogFormatError, ServerError, SourceError
from tailrace.read.source.drive import drive
from tests.property.cluster_oplogs import (
    COLLECTION,
    DATABASE,
    at,
    batch,
    damaged,
    drop,
    insert,
    no_op,
    outputs,
    shard_added,
    shard_drains,
    shard_removed,
    take,
    update,
)
from tests.property.steady import STEADY

pytestmark = pytest.mark.usefixtures("kernel_on_and_off")

SCOPE = Scope.of_collection(DATABASE, COLLECTION)
LAST = 40

#: A shard's writes as (tick, key): few ticks and keys, so that shards often write at the same time, and the same key.
writes = st.lists(
    st.tuples(st.integers(1, LAST), st.integers(0, 2)), max_size=12, unique_by=lambda write: write[0]
).map(sorted)
#: Steps of reading: which shard, how many ticks further, and whether events are taken afterwards.
steps = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15), st.booleans()), max_size=40)


class Written(NamedTuple):
    """An event as the test knows it: what orders it, its shard, its bytes."""

    order: bytes
    shard: int
    event: bytes
    tick: int


def plan_of(**start: object) -> Plan:
    stage = start or {"startAtOperationTime": at(1).to_timestamp()}
    return build_plan(StreamOptions.parse(SCOPE, stage))


def alone(entries: list[tuple[int, int]], shard: int) -> list[Written]:
    """The shard's events, according to a merged stream of only this shard."""
    merged = MergedStream(plan_of(), ["alone"])
    merged.feed("alone", batch([insert(tick, key, shard=shard) for tick, key in entries], LAST))
    events, tokens, _ = take(merged)
    assert len(events) == len(entries)
    return [
        Written(token_order(token), shard, event, tick)
        for token, event, (tick, _) in zip(tokens, events, entries, strict=True)
    ]


class World:
    """A merged stream, with everything that was fed to it, so that each step can be judged."""

    def __init__(self, shards: list[list[tuple[int, int]]]) -> None:
        self.entries = shards
        self.union = sorted(written for shard, entries in enumerate(shards) for written in alone(entries, shard))
        self.merged = MergedStream(plan_of(), [str(shard) for shard in range(len(shards))])
        self.read = [0] * len(shards)
        self.given: list[bytes] = []
        self.tokens = [self.merged.token]

    def feed(self, shard: int, until: int) -> None:
        after, until = self.read[shard], min(until, LAST)
        entries = [insert(tick, key, shard=shard) for tick, key in self.entries[shard] if after < tick <= until]
        self.merged.feed(str(shard), batch(entries, max(after, until)))
        self.read[shard] = max(after, until)
        self.given += take(self.merged).events

    def take(self) -> None:
        events, tokens, _ = take(self.merged)
        self.given += events
        assert self.given == [written.event for written in self.union[: len(self.given)]]
        if tokens:
            self.tokens.append(ResumeToken.from_trusted(tokens[-1]))
        self.tokens.append(self.merged.token)
        self.check_no_event_is_early()
        self.check_nothing_more_could_leave()
        self.check_the_resume_token()

    def is_behind(self, shard: int, written: Written) -> bool:
        """Whether this shard, as far as it was read, may still give something before ``written``."""
        fed = [one for one in self.union if one.shard == shard and one.tick <= self.read[shard]]
        return self.read[shard] < written.tick and not any(one.order >= written.order for one in fed)

    def check_no_event_is_early(self) -> None:
        for written in self.union[: len(self.given)]:
            assert not any(self.is_behind(shard, written) for shard in range(len(self.read)))

    def check_nothing_more_could_leave(self) -> None:
        waiting = [one for one in self.union[len(self.given) :] if one.tick <= self.read[one.shard]]
        behind = {str(s) for one in waiting[:1] for s in range(len(self.read)) if self.is_behind(s, one)}
        assert bool(waiting) == bool(behind)
        if waiting:
            assert self.merged.awaited_time == at(waiting[0].tick)
            assert set(self.merged.waiting_for) == behind
        else:
            assert self.merged.awaited_time is None

    def check_the_resume_token(self) -> None:
        """The token grows, and exactly what was not given comes after it."""
        assert self.tokens == sorted(self.tokens)
        token = self.merged.token
        key = token_order(token.to_bson())
        assert [one.event for one in self.union if one.order > key] == [
            one.event for one in self.union[len(self.given) :]
        ]


@STEADY
@given(st.lists(writes, min_size=1, max_size=4), steps)
def test_any_reading_gives_the_sorted_union_and_no_event_too_early(
    shards: list[list[tuple[int, int]]], script: list[tuple[int, int, bool]]
) -> None:
    world = World(shards)
    for chosen, ticks, takes in script:
        shard = chosen % len(shards)
        world.feed(shard, world.read[shard] + ticks)
        if takes:
            world.take()
    for shard in range(len(shards)):
        world.feed(shard, LAST)
    world.take()
    assert len(world.given) == len(world.union)
    assert world.merged.high_water == at(LAST)


@STEADY
@given(st.lists(writes, min_size=2, max_size=4), steps, st.data())
def test_a_stream_resumed_at_any_token_gives_exactly_the_rest(
    shards: list[list[tuple[int, int]]], script: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    world = World(shards)
    for shard, ticks, _ in script:
        world.feed(shard % len(shards), world.read[shard % len(shards)] + ticks)
        world.take()
    token = data.draw(st.sampled_from(world.tokens + [ResumeToken.from_trusted(_token(one)) for one in world.union]))
    resumed = MergedStream(
        plan_of(resumeAfter=token.to_document()), [str(shard) for shard in reversed(range(len(shards)))]
    )
    for shard, entries in enumerate(shards):
        resumed.feed(str(shard), batch([insert(tick, key, shard=shard) for tick, key in entries], LAST))
    events, _, _ = take(resumed)
    key = token_order(token.to_bson())
    # Of equal tokens the shard named first goes first: here they are named the other way round.
    rest = sorted((one for one in world.union if one.order > key), key=lambda one: (one.order, -one.shard))
    assert events == [one.event for one in rest]


def _token(written: Written) -> bytes:
    return bytes(RawBSONDocument(written.event)["_id"].raw)


def stream(*shards: str, config_after: ClusterTime | None = None, **start: object) -> MergedStream:
    return MergedStream(plan_of(**start), shards, config_after=config_after)


def feed(merged: MergedStream, shard: str, entries: list[bytes], promised: int) -> None:
    merged.feed(shard, batch(entries, promised))


def keys(events: list[bytes]) -> list[object]:
    """Each event as its document's key, or its type."""
    decoded = [bson.decode(event) for event in events]
    return [event["documentKey"]["_id"] if "documentKey" in event else event["operationType"] for event in decoded]


def test_no_ops_and_promises_alone_let_events_leave_and_move_the_resume_token() -> None:
    merged = stream("a", "b")
    feed(merged, "a", [insert(5, "x"), no_op(9)], 9)
    assert keys(take(merged)[0]) == []
    assert (merged.waiting_for, merged.awaited_time) == (("b",), at(5))
    assert merged.token == ResumeToken.high_water_mark(at(1))
    merged.promise("b", at(4))
    assert keys(take(merged)[0]) == []
    assert merged.token == ResumeToken.high_water_mark(at(4))
    merged.promise("b", at(7))
    assert keys(take(merged)[0]) == ["x"]
    assert merged.token == ResumeToken.high_water_mark(at(7))
    assert (merged.waiting_for, merged.awaited_time) == (("b",), None)
    feed(merged, "b", [no_op(20)], 20)
    take(merged)
    assert merged.token == ResumeToken.high_water_mark(at(9))
    assert merged.waiting_for == ("a",)


def test_an_event_at_the_promised_time_itself_leaves_and_its_token_stays_the_resume_token() -> None:
    merged = stream("a", "b")
    feed(merged, "a", [insert(5, "x")], 5)
    merged.promise("b", at(5))
    assert keys(take(merged)[0]) == ["x"]
    assert not merged.token.is_high_water_mark
    assert merged.token.cluster_time == at(5)


def test_two_shards_that_drop_at_the_same_time_give_both_drops_and_both_invalidates() -> None:
    merged = stream("a", "b", "c")
    feed(merged, "a", [insert(3, "x"), drop(5)], 9)
    feed(merged, "b", [drop(5), insert(6, "late")], 9)
    assert keys(take(merged)[0]) == []
    feed(merged, "c", [insert(4, "y"), insert(7, "behind"), drop(8)], 9)
    assert keys(take(merged)[0]) == ["x", "y", "drop", "drop", "invalidate", "invalidate"]
    assert merged.invalidated
    assert merged.token.from_invalidate
    assert take(merged) == ([], [], [])
    assert (merged.waiting_for, merged.awaited_time) == ((), None)


def test_a_shard_that_is_invalidated_waits_for_the_others_and_does_not_hold_them_back() -> None:
    merged = stream("a", "b")
    feed(merged, "a", [drop(10)], 10)
    assert not merged.wants("a")
    feed(merged, "b", [insert(4, "x")], 6)
    assert keys(take(merged)[0]) == ["x"]
    assert (merged.waiting_for, merged.awaited_time) == (("b",), at(10))
    feed(merged, "b", [insert(8, "y")], 9)
    assert keys(take(merged)[0]) == ["y"]
    assert not merged.invalidated
    merged.promise("b", at(10))
    assert keys(take(merged)[0]) == ["drop", "invalidate"]
    assert merged.invalidated


def test_an_invalidate_that_the_pipeline_hides_ends_the_stream_all_the_same() -> None:
    stage = {"startAtOperationTime": at(1).to_timestamp()}
    options = StreamOptions.parse(SCOPE, stage, [{"$match": {"operationType": "insert"}}])
    merged = MergedStream(build_plan(options), ["a", "b"])
    feed(merged, "a", [drop(10)], 10)
    feed(merged, "b", [insert(4, "x")], 9)
    assert keys(take(merged)[0]) == ["x"]
    assert not merged.invalidated
    assert (merged.waiting_for, merged.awaited_time) == (("b",), at(10))
    feed(merged, "b", [insert(12, "behind")], 12)
    assert keys(take(merged)[0]) == []
    assert merged.invalidated
    assert merged.token.from_invalidate


def test_a_stream_started_after_an_invalidate_leaves_out_the_first_one_of_every_shard() -> None:
    merged = stream("a", "b")
    feed(merged, "a", [drop(5)], 9)
    feed(merged, "b", [no_op(9)], 9)
    take(merged)
    token = merged.token.to_document()
    merged = stream("a", "b", startAfter=token)
    feed(merged, "a", [drop(5), insert(7, "new")], 20)
    feed(merged, "b", [drop(6), insert(8, "other"), drop(15)], 20)
    assert keys(take(merged)[0]) == ["drop", "new", "other", "drop", "invalidate"]
    assert merged.invalidated


def test_an_error_of_a_shard_comes_after_all_that_is_before_it_and_names_the_shard() -> None:
    merged = stream("a", "b")
    feed(merged, "a", [insert(3, "x"), damaged(6)], 9)
    assert not merged.wants("a")
    feed(merged, "b", [insert(2, "w")], 2)
    assert keys(take(merged)[0]) == ["w"]
    assert merged.waiting_for == ("b",)
    feed(merged, "b", [insert(4, "behind")], 8)
    taking = outputs(merged, [])
    assert keys(next(taking).events()) == ["x"]
    with pytest.raises(OplogFormatError, match=r"^Error on remote shard a :: caused by :: ") as caught:
        next(taking)
    assert caught.value.position is not None
    assert merged.token.cluster_time == at(3)


def test_a_shard_that_cannot_be_read_ends_the_stream_after_what_it_promised() -> None:
    merged = stream("a", "b")
    merged.promise("a", at(5))
    merged.fail("a", SourceError("no route", code=6))
    merged.fail("a", SourceError("again", code=7))
    # What the other shard has up to there comes first, so its promise is waited for.
    assert take(merged) == ([], [], [])
    assert merged.waiting_for == ("b",)
    feed(merged, "b", [insert(5, "x"), insert(6, "behind")], 9)
    taking = outputs(merged, [])
    assert keys(next(taking).events()) == ["x"]
    with pytest.raises(SourceError, match="shard a :: caused by :: no route") as caught:
        next(taking)
    assert caught.value.code == 6


def test_a_pipeline_that_changes_a_token_ends_the_stream_at_that_event_and_not_before() -> None:
    stage = {"startAtOperationTime": at(1).to_timestamp()}
    spoil = {"$replaceRoot": {"newRoot": {"$cond": [{"$eq": ["$documentKey._id", "y"]}, {"a": 1}, "$$ROOT"]}}}
    merged = MergedStream(build_plan(StreamOptions.parse(SCOPE, stage, [spoil])), ["a", "b"])
    feed(merged, "a", [insert(3, "x"), insert(7, "behind")], 9)
    feed(merged, "b", [insert(5, "y")], 9)
    taking = outputs(merged, [])
    assert keys(next(taking).events()) == ["x"]
    with pytest.raises(ChangeStreamFatal, match="was modified by the pipeline"):
        next(taking)


def test_a_token_that_no_shard_has_ends_the_stream_at_the_first_later_event_of_any() -> None:
    merged = stream("a", "b")
    feed(merged, "a", [insert(5, "x")], 9)
    merged.promise("b", at(9))
    _, (token,), _ = take(merged)
    merged = stream("a", "b", resumeAfter=bson.decode(token))
    feed(merged, "a", [insert(5, "other"), insert(6, "later")], 9)
    feed(merged, "b", [insert(4, "before")], 5)
    assert take(merged) == ([], [], [])
    assert merged.searching
    feed(merged, "b", [], 9)
    with pytest.raises(ChangeStreamFatal, match="the resume token was not found"):
        take(merged)


def test_a_shard_that_is_added_takes_part_one_tick_later_and_nothing_later_leaves_before_it_was_read() -> None:
    merged = stream("a", config_after=at(0))
    feed(merged, "a", [insert(3, "x"), insert(8, "y")], 20)
    assert keys(take(merged)[0]) == []
    assert merged.waiting_for == (CONFIG_SHARDS,)
    feed(merged, CONFIG_SHARDS, [shard_added(5, "b"), shard_added(6, "a")], 20)
    events, _, asked = take(merged)
    assert keys(events) == ["x"]
    assert [(shard.name, shard.host, shard.start, shard.read_after) for shard in asked] == [
        ("b", "b/localhost:27017", at(6), at(5))
    ]
    assert merged.participants == ("a", CONFIG_SHARDS, "b")
    assert merged.promised("b") == at(5)
    assert (merged.waiting_for, merged.awaited_time) == (("b",), at(6))
    assert merged.token == ResumeToken.high_water_mark(at(5))
    feed(merged, "b", [insert(7, "new")], 20)
    assert keys(take(merged)[0]) == ["new", "y"]
    assert merged.token == ResumeToken.high_water_mark(at(20))


@pytest.mark.parametrize("plainly", [True, False])
def test_a_shard_is_read_up_to_its_removal_and_no_further(plainly: bool) -> None:
    """No test had seen this: they fed the deletion that 4.4 logs, but 5.0 and 6.0 log a command."""
    merged = stream("a", "b", config_after=at(0))
    feed(merged, "a", [insert(9, "x")], 20)
    feed(merged, "b", [insert(3, "last")], 4)
    feed(merged, CONFIG_SHARDS, [shard_drains(2, "b"), shard_removed(5, "b", plainly=plainly)], 20)
    assert keys(take(merged)[0]) == ["last"]
    assert (merged.waiting_for, merged.leaving) == (("b",), ("b",))
    feed(merged, "b", [insert(7, "no longer the cluster's")], 8)
    assert keys(take(merged)[0]) == ["x"]
    assert (merged.participants, merged.leaving) == (("a", CONFIG_SHARDS), ())
    assert merged.token == ResumeToken.high_water_mark(at(20))
    feed(merged, CONFIG_SHARDS, [shard_added(25, "b")], 30)
    merged.promise("a", at(30))
    _, _, asked = take(merged)
    assert [shard.start for shard in asked] == [at(26)]


def test_a_shard_that_was_removed_and_comes_back_is_read_anew_from_there_wherever_it_is() -> None:
    merged = stream("a", "b", config_after=at(0))
    merged.promise("a", at(20))
    feed(merged, "b", [insert(3, "old"), insert(13, "of both readings")], 20)
    feed(merged, CONFIG_SHARDS, [shard_removed(5, "b"), shard_added(9, "b"), shard_added(10, "b")], 20)
    events, _, asked = take(merged)
    assert keys(events) == ["old"]
    assert [(shard.name, shard.start) for shard in asked] == [("b", at(10))]
    assert merged.promised("b") == at(9)
    assert merged.waiting_for == ("b",)
    feed(merged, "b", [insert(13, "of both readings")], 20)
    assert keys(take(merged)[0]) == ["of both readings"]
    assert merged.waiting_for == ("a", CONFIG_SHARDS, "b")


def test_the_drop_of_what_lies_on_a_removed_shard_still_does_not_end_the_stream() -> None:
    merged = stream("a", "b", config_after=at(0))
    feed(merged, "b", [drop(7)], 20)
    feed(merged, CONFIG_SHARDS, [shard_removed(5, "b")], 20)
    feed(merged, "a", [insert(9, "x")], 20)
    assert keys(take(merged)[0]) == ["x"]
    assert not merged.invalidated
    feed(merged, "a", [drop(30)], 30)
    merged.promise(CONFIG_SHARDS, at(30))
    take(merged)
    assert merged.invalidated


def test_a_stream_that_starts_in_the_future_has_nothing_earlier_of_a_new_shard_either() -> None:
    merged = stream("a", config_after=at(0), startAtOperationTime=at(10).to_timestamp())
    merged.promise("a", at(20))
    feed(merged, CONFIG_SHARDS, [shard_added(5, "b")], 20)
    take(merged)
    assert merged.token == ResumeToken.high_water_mark(at(10))
    feed(merged, "b", [insert(7, "too early"), insert(12, "x")], 20)
    assert keys(take(merged)[0]) == ["x"]


def test_a_shard_ahead_of_the_others_is_not_read_beyond_its_bound_and_the_one_behind_always_is() -> None:
    merged = MergedStream(plan_of(), ["a", "b"], buffer_bytes_max=10_000)
    tick = 0
    while merged.wants("a"):
        tick += 1
        feed(merged, "a", [insert(tick, "x", text="y" * 1_000)], tick)
        take(merged)
    assert 4 <= tick <= 10
    assert merged.wants("b")
    merged.promise("b", at(tick - 2))
    assert len(take(merged)[0]) == tick - 2
    assert merged.wants("a")


def test_a_batch_is_put_aside_between_its_pieces_while_enough_waits() -> None:
    merged = MergedStream(plan_of(), ["a", "b"], buffer_bytes_max=10_000)
    many = [insert(1, number) for number in range(2_500)]
    feed(merged, "a", many, 1)
    assert merged.next_output() is None
    assert not merged.wants("a")
    merged.promise("b", at(LAST))
    assert len(take(merged).events) == 2_500
    assert merged.wants("a")


def updates(*shards: str, **options: Any) -> MergedStream:
    """A stream that looks the documents of updates up."""
    stage = {"startAtOperationTime": at(1).to_timestamp(), "fullDocument": "updateLookup"}
    return MergedStream(build_plan(StreamOptions.parse(SCOPE, stage)), shards, **options)


def found(need: Need) -> list[bytes | None]:
    assert isinstance(need.request, NeedDocuments)
    return [lookup.document_key for lookup in need.request.lookups]


def test_the_other_shards_go_on_while_a_need_of_one_is_not_answered() -> None:
    merged = updates("a", "b")
    feed(merged, "a", [update(4, "x")], 9)
    feed(merged, "b", [insert(3, "y"), update(5, "z")], 9)
    first, second = merged.next_output(), merged.next_output()
    assert isinstance(first, Need)
    assert isinstance(second, Need)
    assert (first.participant, second.participant) == ("a", "b")
    assert merged.next_output() is None
    assert merged.needs == (first, second)
    merged.answer(second, found(second))
    assert merged.next_output() is None
    assert merged.waiting_for == ("a",)
    merged.answer(first, found(first))
    block = merged.next_output()
    assert isinstance(block, EventBlock)
    assert keys(block.events()) == ["y", "x", "z"]


def test_a_need_of_a_shard_that_has_left_meanwhile_may_be_answered_in_vain() -> None:
    merged = updates("a", "b", config_after=at(0))
    merged.promise("a", at(20))
    feed(merged, "b", [update(13, "x")], 20)
    need = merged.next_output()
    assert isinstance(need, Need)
    merged.promise("b", at(5))
    feed(merged, CONFIG_SHARDS, [shard_removed(5, "b"), shard_added(9, "b")], 20)
    asked = merged.next_output()
    assert isinstance(asked, Need)
    assert isinstance(asked.request, NeedShard)
    merged.answer(asked, None)
    merged.answer(need, found(need))
    merged.refuse(need, SourceError("too late"))
    assert merged.next_output() is None
    assert merged.waiting_for == ("b",)
    feed(merged, "b", [insert(11, "new")], 20)
    assert keys(take(merged).events) == ["new"]


@pytest.mark.parametrize("refused", [1, 3, 5])
def test_a_refused_look_up_of_one_shard_comes_after_what_the_shards_have_before_it(refused: int) -> None:
    merged = updates("a", "b")
    feed(merged, "a", [update(2 * number, f"a{number}") for number in range(1, 6)], 20)
    feed(merged, "b", [insert(2 * number + 1, f"b{number}") for number in range(6)], 20)

    def answer(need: Need) -> list[bytes | None]:
        if any(bson.decode(key or b"")["_id"] == f"a{refused}" for key in found(need)):
            raise ServerError("no such index key", code=201)
        return found(need)

    given: list[object] = []
    with pytest.raises(ServerError, match="remote shard a") as caught:
        given.extend(key for block in drive(merged, answer) for key in keys(block.events()))
    assert caught.value.code == 201
    # The shard's part ends after its last event: the other one's events are given up to there too.
    assert given == [f"{shard}{number + (shard == 'a')}" for number in range(refused - 1) for shard in "ba"]


def test_a_shard_that_is_not_open_cannot_be_fed() -> None:
    merged = stream("a")
    with pytest.raises(InternalError, match="the shard b is not open"):
        merged.promise("b", at(5))


@STEADY
@given(st.lists(writes, min_size=1, max_size=3), st.integers(0, 30), st.sets(st.integers(0, 2)), st.booleans())
def test_before_6_0_a_merged_stream_goes_on_after_a_token_whose_event_the_pipeline_leaves_out(
    shards: list[list[tuple[int, int]]], chosen: int, kept: set[int], pushed: bool
) -> None:
    """From 6.0 on it ends with 280 if any later event passes. Every earlier test of a resume kept the token's own
    event."""
    union = sorted(written for shard, entries in enumerate(shards) for written in alone(entries, shard))
    if not union:
        return
    token = union[chosen % len(union)]
    behind = [one for one in union if one.order > token.order and bson.decode(one.event)["documentKey"]["_id"] in kept]
    wanted = {"documentKey._id": {"$in": sorted(kept)}} if pushed else {"$expr": {"$in": ["$documentKey._id", [*kept]]}}
    stages = [bson.encode({"$match": wanted})]
    given, error = _resumed("5.0", shards, _token(token), stages)
    assert [ResumeToken.parse(_id_of(event)).data for event in given] == [_data(one.event) for one in behind]
    assert error is None
    hidden = bson.decode(token.event)["documentKey"]["_id"] not in kept
    given, error = _resumed("6.0", shards, _token(token), stages)
    assert (given == [], error) == ((True, 280) if hidden and behind else (not behind, None))


@pytest.mark.parametrize(("version", "code"), [("6.0", None), ("5.0", 280), ("4.4", 280)])
def test_before_6_0_an_unknown_token_is_missed_at_the_first_later_event_whatever_the_pipeline_says_of_it(
    version: str, code: int | None
) -> None:
    (foreign,) = alone([(3, 7)], 0)
    nothing = [bson.encode({"$match": {"operationType": "delete"}})]
    assert _resumed(version, [[(2, 0)], [(5, 1)]], _token(foreign), nothing) == ([], code)


def _resumed(
    version: str, shards: list[list[tuple[int, int]]], token: bytes, stages: list[bytes]
) -> tuple[list[bytes], int | None]:
    """What a merged stream resumed at the token gives, and the code that it ends with."""
    options = StreamOptions.parse(SCOPE, {"resumeAfter": bson.decode(token)}, stages)
    names = [str(shard) for shard in range(len(shards))]
    merged = MergedStream(build_plan(options, profile_for(version)), names)
    given: list[bytes] = []
    for name, entries in zip(names, shards, strict=True):
        # Twice, since entries before and after the token may be tested in different ways.
        for first, last in ((0, LAST // 2), (LAST // 2, LAST)):
            part = [insert(tick, key, shard=int(name)) for tick, key in entries if first < tick <= last]
            try:
                merged.feed(name, batch(part, last))
                given += take(merged).events
            except ChangeStreamFatal as error:
                return given, error.code
    return given, None


def _id_of(event: bytes) -> bytes:
    identifier = RawBSONDocument(event)["_id"]
    return bytes(identifier.raw)


def _data(event: bytes) -> str:
    return ResumeToken.parse(_id_of(event)).data
