"""Recorded clusters: every shard's own streams and the router's merged ones, by our stages over the recorded oplogs."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import bson
import pytest
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.amounts import WHOLE, amount, half_in_quick
from tests.differential.first_difference import first_difference
from tests.golden import sharded_recording
from tests.golden.recording import token_is_high_water_mark, token_time
from tests.golden.sharded_recording import ShardedRecording, ShardedStream
from tests.golden.sharded_replay import Images, MergedReplay, ShardPart, memory_of, random_choice

pytestmark = [pytest.mark.usefixtures("kernel_on_and_off"), pytest.mark.by_turns]

GAPS: dict[str, str] = tomllib.loads((Path(__file__).parent / "known_gaps.toml").read_text())["sharded"]
RECORDINGS = {name: sharded_recording.load(name) for name in sharded_recording.names()}
ROUTED = "migration_6.0.27"
SEVEN = "cluster_7.0.28"
ALL_AT_ONCE = 1 << 30
#: Entries in a batch, and entries that are read of a shard before the next is chosen.
CUTS = (ALL_AT_ONCE, 7, 1) if WHOLE else (ALL_AT_ONCE, 1)
STRIDES = (ALL_AT_ONCE, 20, 1) if WHOLE else (ALL_AT_ONCE, 5)


def _named(kind: Callable[[ShardedRecording], tuple[ShardedStream, ...]]) -> dict[str, tuple[str, int]]:
    return {
        f"{name}/{stream.name}": (name, index)
        for name, recording in RECORDINGS.items()
        for index, stream in enumerate(kind(recording))
    }


SHARD_STREAMS = _named(lambda recording: recording.streams)
ROUTER_STREAMS = _named(lambda recording: recording.merged + recording.resumes)
IMAGE_STREAMS = _named(lambda recording: recording.images)
WITH_A_NEW_SHARD = [name for name, (recording_name, _) in ROUTER_STREAMS.items() if RECORDINGS[recording_name].added]


def _check(name: str, problem: str | None) -> None:
    if name in GAPS:
        assert problem is not None, f"{name} is met now: take it from known_gaps.toml"
        pytest.xfail(f"{GAPS[name]}: {problem}")
    assert problem is None, problem


def _difference(expected: tuple[bytes, ...], got: list[bytes]) -> str | None:
    for index, (theirs, ours) in enumerate(zip(expected, got, strict=False)):
        if theirs != ours:
            path, server, mine = first_difference(theirs, ours)
            return f"event {index} at {path}:\n  server {server}\n  ours   {mine}"
    return None if len(expected) == len(got) else f"{len(got)} events instead of {len(expected)}"


@pytest.mark.parametrize("name", half_in_quick(SHARD_STREAMS))
def test_a_shard_s_own_stream_is_given_byte_for_byte(name: str) -> None:
    recording_name, index = SHARD_STREAMS[name]
    recording = RECORDINGS[recording_name]
    _check(name, _shard_difference(recording, recording.streams[index]))


def _shard_difference(recording: ShardedRecording, stream: ShardedStream) -> str | None:
    """Events, the last reply's post-batch resume token, and whether the cursor was closed."""
    # The catalog has a collection's shard key while the collection exists.
    keys = recording.shard_keys if stream.before_drop else {}
    for entries_max in CUTS:
        ours = ShardPart(memory_of(recording, stream.member), recording.server, stream.database, stream.command, keys)
        if (first := ours.resume_token) != stream.reply_tokens[0]:
            return f"first token {bson.decode(first)}"
        ours.advance(token_time(stream.reply_tokens[-1]), entries_max=entries_max)
        if problem := _difference(stream.events, ours.events):
            return f"{entries_max} entries a batch: {problem}"
        if ours.resume_token != stream.reply_tokens[-1]:
            return f"{entries_max} entries a batch: token {bson.decode(ours.resume_token)}"
        if ours.closed != stream.closed:
            return f"{entries_max} entries a batch: closed {ours.closed}"
    return None


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", half_in_quick(ROUTER_STREAMS))
def test_the_merged_stream_is_the_router_s(name: str, stride: int) -> None:
    recording_name, index = ROUTER_STREAMS[name]
    recording = RECORDINGS[recording_name]
    stream = (recording.merged + recording.resumes)[index]
    # The recorded streams were opened when all was over: the new shard was known, and no other was added since.
    ours = _merged(recording, stream, recording.shards, recording.end, stride)
    _check(name, _merged_difference(stream, ours, recording.end))
    assert ours.opened == []


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", WITH_A_NEW_SHARD)
def test_it_is_the_same_when_the_shard_is_met_on_the_way(name: str, stride: int) -> None:
    recording_name, index = ROUTER_STREAMS[name]
    recording = RECORDINGS[recording_name]
    stream = (recording.merged + recording.resumes)[index]
    known = tuple(shard for shard in recording.shards if shard not in recording.added)
    start = token_time(stream.reply_tokens[0])
    if start > added_at(recording.name):
        known = recording.shards
    ours = _merged(recording, stream, known, ClusterTime(start - 1), stride)
    _check(name, _merged_difference(stream, ours, recording.end))
    assert {opened.name for opened in ours.opened} == set(recording.shards) - set(known)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", IMAGE_STREAMS)
def test_images_come_from_each_event_s_own_shard_and_documents_from_wherever_they_are(name: str, stride: int) -> None:
    recording_name, index = IMAGE_STREAMS[name]
    recording = RECORDINGS[recording_name]
    stream = recording.images[index]
    end = token_time(stream.reply_tokens[-1])
    command = {**stream.command, "aggregate": stream.command["clusterAggregate"]}
    ours = MergedReplay(
        recording,
        stream.database,
        command,
        shards=recording.shards,
        config_after=recording.end,
        images=Images(recording, end),
    )
    ours.run(end, random_choice(stride), stride)
    assert len(stream.events) > 30
    assert _difference(stream.events, ours.events) is None


@cache
def added_at(name: str) -> ClusterTime:
    """When the run's new shard came into ``config.shards``: one tick before its part of a stream starts."""
    recording = RECORDINGS[name]
    stream = recording.merged[0]
    known = tuple(shard for shard in recording.shards if shard not in recording.added)
    ours = _merged(recording, stream, known, recording.start, ALL_AT_ONCE)
    (opened,) = ours.opened
    return opened.read_after


def _merged(
    recording: ShardedRecording, stream: ShardedStream, shards: tuple[str, ...], config_after: ClusterTime, stride: int
) -> MergedReplay:
    command = {**stream.command, "aggregate": stream.command["clusterAggregate"]}
    ours = MergedReplay(recording, stream.database, command, shards=shards, config_after=config_after)
    assert ours.merged.token.to_bson() == stream.reply_tokens[0]
    ours.run(recording.end, random_choice(stride), stride)
    return ours


def _merged_difference(stream: ShardedStream, ours: MergedReplay, end: ClusterTime) -> str | None:
    if problem := _difference(stream.events, ours.events):
        return problem
    if ours.merged.invalidated != stream.closed:
        return f"closed {ours.merged.invalidated}"
    token = ours.merged.token.to_bson()
    if stream.closed:
        return None if token == stream.reply_tokens[-1] else f"token {bson.decode(token)}"
    # The router read on after the recording's end, where it gives a high-water mark of some later time.
    assert token_is_high_water_mark(stream.reply_tokens[-1])
    return None if token_is_high_water_mark(token) and token_time(token) == end else f"token {bson.decode(token)}"


@pytest.mark.parametrize(
    ("recording_name", "before_drop"),
    sorted({(name, stream.before_drop) for name, recording in RECORDINGS.items() for stream in recording.streams}),
)
def test_the_merged_stream_is_the_union_of_the_shards_streams_in_the_order_of_their_sort_keys(
    recording_name: str, before_drop: bool
) -> None:
    recording = RECORDINGS[recording_name]
    parts: dict[bytes, dict[str, ShardedStream]] = {}
    for stream in recording.streams:
        if stream.member in recording.shards and stream.before_drop == before_drop and "needsMerge" in stream.command:
            parts.setdefault(bson.encode(stream.command), {})[stream.member] = stream
    assert len(parts) >= 4
    for streams in parts.values():
        assert set(streams) == set(recording.shards)
        one = streams[recording.shards[0]]
        # A stream that was read while the collections existed ends where the shard stood then.
        end = min(token_time(part.reply_tokens[-1]) for part in streams.values()) if before_drop else recording.end
        keys = recording.shard_keys if before_drop else {}
        ours = MergedReplay(recording, one.database, one.command, shards=recording.shards, config_after=end, keys=keys)
        ours.run(end, random_choice(1), 10)
        assert _difference(_union(recording, streams, end), ours.events) is None


def _union(recording: ShardedRecording, streams: dict[str, ShardedStream], end: ClusterTime) -> tuple[bytes, ...]:
    """The shards' events by sort key up to the first invalidate, without those for the merge and without the key."""
    keyed = []
    for order, shard in enumerate(recording.shards):
        for event in streams[shard].events:
            key = RawBSONDocument(event)["$sortKey"][0]["_data"]
            keyed.append((key, order, event, RawBSONDocument(event)["operationType"]))
    keyed.sort()
    last = next((key for key, _, _, kind in keyed if kind == "invalidate"), None)
    return tuple(
        _without_sort_key(event)
        for key, _, event, kind in keyed
        if kind not in ("kNewShardDetected", "migrateChunkToNewShard")
        and (last is None or key <= last)
        and _time_of(key) <= end
    )


def _without_sort_key(event: bytes) -> bytes:
    element = raw_bson.find(event, b"$sortKey")
    assert element is not None
    return raw_bson.encode_document(event[4 : element.start] + event[element.end : -1])


def _time_of(key: str) -> ClusterTime:
    return ClusterTime(int(key[2:18], 16))


@pytest.mark.parametrize("stride", STRIDES)
def test_a_stream_that_was_open_while_a_shard_was_added_sees_the_new_shard_from_its_first_event(stride: int) -> None:
    recording = RECORDINGS[ROUTED]
    assert recording.live_token is not None
    command = {"aggregate": 1, "pipeline": [{"$changeStream": {"allChangesForCluster": True}}]}
    command["pipeline"][0]["$changeStream"]["resumeAfter"] = bson.decode(recording.live_token)  # type: ignore[index]
    start = token_time(recording.live_token)
    assert start < added_at(recording.name)
    ours = MergedReplay(recording, "admin", command, shards=("shA", "shB"), config_after=ClusterTime(start - 1))
    ours.run(recording.end, random_choice(stride), stride)
    assert [opened.name for opened in ours.opened] == ["shC"]
    given = len(recording.live_events)
    assert given > 20
    assert _difference(recording.live_events, ours.events[:given]) is None


@pytest.mark.parametrize("index", range(6))
def test_a_resume_at_any_token_and_any_high_water_mark_of_a_merged_stream_gives_exactly_the_rest(index: int) -> None:
    recording = RECORDINGS[ROUTED]
    stream = recording.merged[index]
    command = {**stream.command, "aggregate": stream.command["clusterAggregate"]}
    whole = MergedReplay(
        recording, stream.database, command, shards=("shA", "shB"), config_after=ClusterTime(recording.start - 1)
    )
    places: list[tuple[bytes, int]] = []
    choose = random_choice(index)

    def noting(names: object) -> str:
        places.append((whole.merged.token.to_bson(), len(whole.events)))
        return choose(names)  # type: ignore[arg-type]

    whole.run(recording.end, noting, 5)
    assert whole.events == list(stream.events)
    for number, token in enumerate(whole.tokens):
        # Equal tokens of two shards are one place to resume from.
        rest = number + 1
        while rest < len(whole.tokens) and whole.tokens[rest] == token:
            rest += 1
        places.append((token, rest))
    added = added_at(recording.name)
    for token, given in places[:: max(1, len(places) // amount(8, 40))]:
        time = token_time(token)
        stage = {k: v for k, v in command["pipeline"][0]["$changeStream"].items() if not k.startswith("start")}
        resumed = {**command, "pipeline": [{"$changeStream": {**stage, "startAfter": bson.decode(token)}}]}
        known = recording.shards if time >= added else ("shA", "shB")
        ours = MergedReplay(recording, stream.database, resumed, shards=known, config_after=ClusterTime(time - 1))
        ours.run(recording.end, choose, 50)
        if not ResumeToken.parse(token).from_invalidate:
            assert ours.events == whole.events[given:]


def test_the_recording_of_7_0_holds_what_7_0_does_otherwise() -> None:
    """A new recording must still hold all of this."""
    streams = RECORDINGS[SEVEN].streams
    events = [bson.decode(event) for stream in streams for event in stream.events]
    described = {event["operationType"] for event in events if "ns" in event and "operationDescription" in event}
    assert described >= {"reshardBegin", "reshardDoneCatchUp", "migrateChunkToNewShard", "startIndexBuild"}
    collections = {event["ns"].get("coll", "") for event in events if "ns" in event}
    assert any(name.startswith("system.resharding.") for name in collections)
    no_ops = [
        entry
        for member in RECORDINGS[SEVEN].shards
        for entry in map(RawBSONDocument, RECORDINGS[SEVEN].oplogs[member])
        if entry["op"] == "n" and "o2" in entry
    ]
    named = {next(iter(entry["o2"])) for entry in no_ops}
    assert named >= {"reshardBegin", "reshardDoneCatchUp", "migrateChunkToNewShard"}


def test_the_recordings_are_all_there_and_the_list_of_gaps_names_only_them() -> None:
    older = {"definitions_6.0.27", "migration_6.0.27", "migration_5.0.4", "migration_4.4.2"}
    assert set(RECORDINGS) == {*older, SEVEN}
    assert len(SHARD_STREAMS) == 148 + 37
    assert len(ROUTER_STREAMS) == 27 + 9
    assert len(IMAGE_STREAMS) == 3 + 3
    assert len(WITH_A_NEW_SHARD) == 15 + 9
    assert set(GAPS) <= set(SHARD_STREAMS) | set(ROUTER_STREAMS)
