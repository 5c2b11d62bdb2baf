"""The kernel and the plain stages give the same events: for random entries, damaged ones, and every recorded stream."""

from __future__ import annotations

import functools
import random
from collections import Counter

import numpy as np
import pytest
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.event.event_block import EventBlock
from tailrace.core.kernel import EVENT, PLAIN, SKIPPED, KernelBatch, KernelSettings, transform_batch
from tailrace.core.kernel.event_record import KEY_END, KEY_START, SPLICE
from tailrace.core.kernel.fast_path import process_batch, settings_for
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import (
    SERVER_4_4,
    SERVER_6_0,
    SERVER_7_0,
    SERVER_8_1,
    SERVER_8_3,
    ServerProfile,
    profile_for,
)
from tailrace.core.plan.request import Answer, OplogBatch, Request
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.errors import OplogFormatError, TailraceError
from tailrace.read.source.drive import drive
from tests.amounts import amount, half_in_quick
from tests.golden import recording
from tests.golden.replay import BEGINNING, EVERYTHING, MemoryOplog, memory_of, options_of
from tests.property import random_entries
from tests.property.guard_page import GuardedBuffer
from tests.property.noted import check_noted
from tests.property.working import drive_blocks, drive_by
from tests.property.wrong_bytes import wrong_bytes

SEED = 20240503
SCOPES = {"cluster": None, "database": "shop", "collection": "shop.orders", "dotted": "shop.a.b"}
START = {"startAtOperationTime": ClusterTime.of(1, 0).to_timestamp()}


def plan_of(
    scope: str | None, *, profile: ServerProfile = SERVER_6_0, v2: bool = False, **options: bool
) -> tuple[Plan, KernelSettings]:
    stream = StreamOptions.parse(Scope.parse(scope), {**START, **options}, generate_v2_tokens=v2)
    plan = build_plan(stream, profile)
    settings = settings_for(plan)
    assert settings is not None
    return plan, settings


def no_answer(request: Request) -> Answer:
    """An oplog for stages that ask for nothing."""
    raise AssertionError(f"nothing is asked for, but {request} was")


class PlainStages:
    """The reference: what the plain stages make of the entries, one after the other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pipeline = ChangeStreamPipeline(plan, mid_stream=True)

    def events(self, entry: bytes) -> list[bytes] | None:
        """The events of one entry, or ``None`` if it is refused."""
        try:
            lists = list(drive_by(self._pipeline.process(OplogBatch(entry, ClusterTime(EVERYTHING))), no_answer))
        except TailraceError:
            self._pipeline = ChangeStreamPipeline(self._plan, mid_stream=True)
            return None
        if self._pipeline.invalidated:
            self._pipeline = ChangeStreamPipeline(self._plan, mid_stream=True)
        return [event.to_bson() for events in lists for event in events]


def check_each(entries: list[bytes], plan: Plan, settings: KernelSettings) -> Counter[int]:
    """Compare entry by entry. Returns how often each kind came."""
    plain = PlainStages(plan)
    made = transform_batch(b"".join(entries), settings)
    assert len(made.kind) == len(entries)
    for index, entry in enumerate(entries):
        assert made.entry(index) == entry
        if made.kind[index] == SKIPPED:
            assert plain.events(entry) == [], entry.hex()
        elif made.kind[index] == EVENT:
            assert plain.events(entry) == events_of(made, index), entry.hex()
    return Counter(made.kind.tolist())


def events_of(made: KernelBatch, index: int) -> list[bytes]:
    """The events of one entry. What the kernel noted about them must agree with their bytes."""
    places = np.flatnonzero(made.entry_number == index)
    first, last = (int(places[0]), int(places[-1]) + 1) if places.size else (0, 0)
    events = [made.event(place) for place in places]
    block = made.block(first, last)
    assert block.events() == events
    check_what_is_known(block)
    for place, event in enumerate(events):
        key = raw_bson.find(event, b"documentKey")
        start = made.start[first + place]
        if key is None:
            assert made.column(KEY_START)[first + place] == made.column(KEY_END)[first + place] == 0
        else:
            assert made.column(KEY_START)[first + place] - start == key.value_start
            assert made.column(KEY_END)[first + place] - start == key.end
        following = raw_bson.find(event, b"fullDocument") or raw_bson.find(event, b"ns")
        assert following is not None
        assert made.column(SPLICE)[first + place] - start == following.start
    return events


def check_what_is_known(block: EventBlock) -> None:
    """What a block knows about its events must agree with their bytes."""
    read = EventBlock.of_bson(block.events())
    move = int(block.offsets[0])
    assert (block.offsets - move).tolist() == read.offsets.tolist()
    for name in ("cluster_time", "operation"):
        known, expected = getattr(block, name), getattr(read, name)
        # A later fragment of a large event has the event's time and type, but does not contain them.
        assert np.where(expected > 0, known, 0).tolist() == expected.tolist(), name
    for name in ("token_start", "token_end", "ns_start", "ns_end"):
        places, expected = getattr(block, name), getattr(read, name)
        assert np.where(places > 0, places - move, 0).tolist() == expected.tolist(), name
    check_noted(block)


@functools.cache
def random_run(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [random_entries.entry(rng, ClusterTime.of(2, number + 1)) for number in range(count)]


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_random_entries_give_the_events_of_the_plain_stages(scope: str, v2: bool) -> None:
    plan, settings = plan_of(SCOPES[scope], v2=v2)
    count = amount(800, 4000)
    kinds = check_each(random_run(SEED, count), plan, settings)
    assert kinds[EVENT] > (count // 800 if scope == "dotted" else 0.3 * count)
    assert kinds[SKIPPED] > count // 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("profile", "options"),
    [
        (SERVER_6_0, {"showExpandedEvents": True}),
        (SERVER_6_0, {"showRawUpdateDescription": True}),
        (SERVER_6_0, {"showRawUpdateDescription": True, "showExpandedEvents": True}),
        (SERVER_4_4, {}),
        (SERVER_7_0, {"showExpandedEvents": True}),
        (SERVER_8_1, {"showExpandedEvents": True}),
        (SERVER_8_1, {"showExpandedEvents": True, "showRawUpdateDescription": True}),
        (SERVER_8_3, {"showExpandedEvents": True}),
        (profile_for("6.0-fcv5.0"), {}),
        (profile_for("6.0-fcv5.0"), {"showExpandedEvents": True}),
        (profile_for("7.0-fcv6.0"), {"showExpandedEvents": True}),
    ],
    ids=[
        *("expanded", "raw updates", "expanded raw updates", "4.4", "7.0 expanded", "8.1 expanded", "8.1 raw", "8.3"),
        *("6.0 at 5.0", "6.0 at 5.0 expanded", "7.0 at 6.0 expanded"),
    ],
)
def test_random_entries_give_the_same_events_under_other_options(
    profile: ServerProfile, options: dict[str, bool]
) -> None:
    for scope in ("cluster", "collection"):
        plan, settings = plan_of(SCOPES[scope], profile=profile, **options)
        count = amount(400, 2000)
        kinds = check_each(random_run(SEED + 1, count), plan, settings)
        assert kinds[EVENT] > 0.3 * count


@functools.cache
def samples() -> list[bytes]:
    """A few short entries of each kind that the kernel makes events of."""
    _, settings = plan_of("shop.orders")
    found: dict[bytes, list[bytes]] = {}
    for entry in random_run(SEED + 2, 1500):
        made = transform_batch(entry, settings)
        if len(entry) < 420 and made.kind.tolist() == [EVENT]:
            operation = raw_bson.find(made.event(0), b"operationType")
            assert operation is not None
            found.setdefault(raw_bson.value(made.event(0), operation), []).append(entry)
    assert len(found) == 4
    return [entry for entries in found.values() for entry in entries[: amount(1, 3)]]


@pytest.mark.parametrize("scope", ["cluster", "collection"])
def test_an_entry_with_one_wrong_byte_gives_the_same_or_is_left_to_the_plain_stages(scope: str) -> None:
    rng = random.Random(SEED)
    plan, settings = plan_of(SCOPES[scope])
    plain = PlainStages(plan)
    guarded = GuardedBuffer(1 << 16)
    for sample in samples():
        for position in range(len(sample)):
            for new in wrong_bytes(rng, sample[position]):
                entry = sample[:position] + bytes([new]) + sample[position + 1 :]
                made = transform_batch(guarded.place(entry), settings)
                if (made.kind == PLAIN).any():
                    continue
                given = [made.event(index) for index in range(len(made))]
                assert plain.events(entry) == given, entry.hex()


def test_a_truncated_buffer_ends_with_an_entry_for_the_plain_stages() -> None:
    _, settings = plan_of("shop.orders")
    guarded = GuardedBuffer(1 << 16)
    first, second = samples()[:2]
    for size in range(1, len(second)):
        made = transform_batch(guarded.place(first + second[:size]), settings)
        assert made.kind.tolist() == [EVENT, PLAIN]
        assert made.entry(1) == second[:size]


def test_what_comes_before_a_damaged_entry_is_given_before_the_error() -> None:
    plan, _ = plan_of("shop.orders")
    good = samples()[:3]
    pipeline = ChangeStreamPipeline(plan, mid_stream=True)
    given: list[bytes] = []
    running = process_batch(pipeline, OplogBatch(b"".join(good) + good[0][:40], ClusterTime(9)))
    with pytest.raises(OplogFormatError):
        given.extend(event for block in drive_blocks(running, no_answer) for event in block.events())
    plain = PlainStages(plan)
    assert given == [event for entry in good for event in plain.events(entry) or []]


def test_an_empty_batch_gives_nothing_and_moves_the_high_water() -> None:
    plan, settings = plan_of(None)
    assert transform_batch(b"", settings).kind.size == 0
    pipeline = ChangeStreamPipeline(plan, mid_stream=True)
    later = ClusterTime.of(50, 1)
    assert list(process_batch(pipeline, OplogBatch(b"", later))) == []
    assert pipeline.high_water == later


def test_a_buffer_that_proves_too_small_is_replaced_by_a_larger_one() -> None:
    """Deep paths are repeated before every field, so such an event is many times as long as its entry."""
    plan, settings = plan_of("shop.orders")
    names = raw_bson.encode_document(
        *(raw_bson.encode_element(raw_bson.INT32, b"f%d" % n, raw_bson.encode_int32(n)) for n in range(400))
    )
    diff = raw_bson.encode_document(random_entries.document(b"u", names))
    for _ in range(8):
        diff = raw_bson.encode_document(random_entries.document(b"s" + b"long" * 60, diff))
    o = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.INT32, b"$v", raw_bson.encode_int32(2)), random_entries.document(b"diff", diff)
    )
    key = raw_bson.encode_document(raw_bson.encode_element(raw_bson.INT32, b"_id", raw_bson.encode_int32(1)))
    template = random_run(SEED, 1)[0]
    assert template
    entry = raw_bson.encode_document(
        random_entries.string(b"op", b"u"),
        random_entries.string(b"ns", b"shop.orders"),
        raw_bson.encode_element(raw_bson.BINARY, b"ui", random_entries.uuid_value()),
        random_entries.document(b"o", o),
        random_entries.document(b"o2", key),
        raw_bson.encode_element(raw_bson.TIMESTAMP, b"ts", ClusterTime.of(2, 1).to_bytes_le()),
        raw_bson.encode_element(raw_bson.DATE, b"wall", raw_bson.encode_int64(5)),
    )
    made = transform_batch(entry * 3, settings)
    assert made.kind.tolist() == [EVENT] * 3
    assert made.end[0] > 50 * len(entry)
    assert [made.event(i) for i in range(3)] == (PlainStages(plan).events(entry) or []) * 3


def driven(oplog: MemoryOplog, plan: Plan, entries_max: int, *, fast: bool) -> tuple[list[bytes], object]:
    """All events of a recorded oplog, and where the pipeline stands afterwards (or the error)."""
    stream = open_stream(plan, kernel="always" if fast else "never")
    given: list[bytes] = []
    assert plan.read_after is not None
    try:
        for batch in oplog.batches(plan.read_after, oplog.times[-1], entries_max):
            stream.feed(ONE_OPLOG, batch)
            for block in drive(stream, lambda need: oplog.answer(need.request)):
                check_what_is_known(block)
                given += block.events()
            if stream.invalidated:
                break
    except TailraceError as error:
        return given, (type(error), error.message)
    return given, (stream.high_water, stream.invalidated, stream.token)


class PlainOplog(MemoryOplog):
    """An oplog of entries with values that Python's types may not hold, and with nothing to look up."""

    def __init__(self, entries: list[bytes]) -> None:
        self.entries = entries
        self.times = [parse_entry(entry).cluster_time for entry in entries]

    def answer(self, request: Request) -> Answer:
        return no_answer(request)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_random_oplog_gives_the_same_stream_however_it_is_cut(scope: str) -> None:
    plan, _ = plan_of(SCOPES[scope])
    plain = PlainStages(plan)
    entries = [entry for entry in random_run(SEED + 3, amount(400, 1500)) if plain.events(entry) is not None]
    oplog = PlainOplog(entries)
    expected = driven(oplog, plan, 1 << 30, fast=False)
    assert expected[0]
    for entries_max in (1 << 30, 100, 3):
        assert driven(oplog, plan, entries_max, fast=True) == expected


def test_entries_before_the_start_give_nothing() -> None:
    entries = random_run(SEED + 3, 400)
    middle = ClusterTime.of(2, 200)
    options = StreamOptions.parse(Scope.cluster(), {"startAtOperationTime": middle.to_timestamp()})
    plan = build_plan(options)
    settings = settings_for(plan)
    assert settings is not None
    kinds = check_each(entries, plan, settings)
    assert kinds[EVENT] > 50
    made = transform_batch(b"".join(entries), settings)
    # The first half may hold entries for the plain stages (no time, damaged), but no event.
    assert not (made.kind[:199] == EVENT).any()


def test_a_stream_resumed_from_a_token_of_the_other_version_is_the_plain_stages_stream() -> None:
    """Events up to the token's time have tokens of that token's version; later ones have the stream's version."""
    plan, _ = plan_of("shop.orders")
    plain = PlainStages(plan)
    entries = [entry for entry in random_run(SEED + 4, 600) if plain.events(entry) is not None]
    oplog = PlainOplog(entries)
    events, _ = driven(oplog, plan, 1 << 30, fast=False)
    assert len(events) > 100
    for event in events[1 : 100 : amount(30, 9)]:
        token = raw_bson.find(event, b"_id")
        assert token is not None
        stage = {"resumeAfter": RawBSONDocument(raw_bson.value(event, token))}
        resumed = StreamOptions.parse(Scope.parse("shop.orders"), stage, generate_v2_tokens=True)
        for entries_max in (1 << 30, 11):
            fast = driven(oplog, build_plan(resumed), entries_max, fast=True)
            assert fast == driven(oplog, build_plan(resumed), entries_max, fast=False)
            assert len(fast[0]) == len(events) - events.index(event) - 1


@pytest.mark.parametrize("name", half_in_quick(recording.names()))
def test_recorded_oplogs_give_the_events_and_the_resume_token_of_the_plain_stages(name: str) -> None:
    source = recording.load(name)
    oplog = memory_of(source)
    compared = 0
    # What the kernel makes of all of them is compared with the server in tests/golden.
    for stream in source.streams[:: amount(4, 1)]:
        try:
            from_profile = build_plan(options_of(stream.database, stream.command), profile_for(source.server))
        except TailraceError:
            continue
        plan = from_profile if from_profile.read_after is not None else from_profile.start_at(BEGINNING)
        for entries_max in (1 << 30, 5):
            assert driven(oplog, plan, entries_max, fast=True) == driven(oplog, plan, entries_max, fast=False)
        compared += 1
    assert compared or not source.streams
