"""Offsets: readable, stable as text, bound to their stream, free of secrets."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import bson
import pytest

from tailrace.core.event.resume_token import EVENT, ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.errors import UsageError
from tailrace.lake.spark.query.offset import Offset, Resume, StreamIdentity
from tailrace.lake.spark.query.options import parse

URI = "mongodb://user:s3cret@localhost/?replicaSet=rs0"
TIME = ClusterTime.of(1_700_000_000, 3)


def identity(replica_sets: dict[str, str] | None = None, **options: str) -> StreamIdentity:
    return StreamIdentity.of(parse({"uri": URI, **options}), replica_sets or {"rs0": "65f0"})


def offset(**changes: Any) -> Offset:
    given: dict[str, Any] = {"cluster_time": TIME, "shards": (("rs0", TIME),), "stream": identity()}
    return Offset(**(given | changes))


def test_an_offset_is_the_same_text_after_a_round_trip() -> None:
    key = bson.encode({"_id": 1.5})  # a fraction leaves type bits beside the token's digits
    token = ResumeToken(TIME.tick(), token_type=EVENT, uuid=bytes(16), event_identifier=key)
    assert token.type_bits is not None
    marks = (("rs0", EntryMark.of(TIME, b"entry")), ("rs1", EntryMark.of(TIME, b"other")))
    resume = Resume("startAfter", token)
    versioned = offset(server_version="7.0.28", resume=resume)
    for one in (offset(), offset(invalidated=True), replace(versioned, token_version=2), offset(entries=marks)):
        text = json.dumps(one.to_json())
        again = Offset.from_json(json.loads(text))
        assert json.dumps(again.to_json()) == text
        assert again == one


def test_every_key_is_in_sorted_order_on_every_level() -> None:
    token = ResumeToken(TIME, token_type=EVENT, uuid=bytes(16))
    value = offset(
        resume=Resume("resumeAfter", token),
        stream=identity(database="d", fullDocument="required"),
        entries=(("rs0", EntryMark.of(TIME, b"entry")),),
        server_version="6.0.27",
    ).to_json()
    assert json.dumps(value) == json.dumps(value, sort_keys=True)


def test_an_offset_can_be_read_by_people_and_used_by_drivers() -> None:
    value = offset().to_json()
    assert value["clusterTime"] == {"i": 3, "t": 1_700_000_000}
    assert value["shards"] == {"rs0": [1_700_000_000, 3]}
    token = ResumeToken.from_hex(value["token"])
    assert token.is_high_water_mark
    assert token.cluster_time == TIME.tick(), "a stream that resumes there must not give the events at T again"


def test_no_secret_is_written() -> None:
    stream = identity(pipeline='[{"$match": {"fullDocument.card": "4111-1111"}}]')
    text = json.dumps(offset(stream=stream).to_json())
    assert "s3cret" not in text
    assert "user" not in text
    assert "4111" not in text


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (identity(fullDocument="updateLookup"), "fullDocument was 'updateLookup' and is not set"),
        (identity(database="shop"), "scope was 'shop' and is '(cluster)'"),
        (identity(pipeline='[{"$match": {"a": 1}}]'), "pipelineSha256 was"),
        # Another collation selects other events. It was silently accepted.
        (identity(pipeline='[{"$match": {}}]', collation='{"locale": "en", "strength": 2}'), "collationSha256 was"),
        (identity({"rs1": "65f0"}), "replica set was 'rs1' and is 'rs0'"),
        (identity({"rs0": "9999"}), "replica set 'rs0' is a different one of the same name"),
        (identity(generateV2ResumeTokens="true"), "generateV2ResumeTokens was 'true'"),
    ],
)
def test_a_checkpoint_of_another_stream_is_refused_by_name(other: StreamIdentity, said: str) -> None:
    with pytest.raises(UsageError, match="belongs to another stream") as caught:
        identity().require_same(other)
    assert said in str(caught.value)


def test_a_checkpoint_of_the_same_stream_is_taken() -> None:
    identity(database="d", showSystemEvents="false").require_same(identity(database="d"))
    identity(collation='{"locale": "en"}').require_same(identity())  # without stages it compares nothing
    identity().require_same(identity({"rs0": ""}))


def whole_cluster(id_: str = "65f0a1", **options: str) -> StreamIdentity:
    return StreamIdentity.of(parse({"uri": URI, **options}), {}, id_)


def shard_alone(cluster: str = "65f0a1") -> StreamIdentity:
    return StreamIdentity.of(parse({"uri": URI}), {"rs0": "65f0"}, cluster)


def test_the_offset_of_a_cluster_has_a_position_for_each_shard() -> None:
    start = offset(shards=(("a", TIME), ("b", TIME)), stream=whole_cluster())
    later = TIME.tick()
    value = start.advanced(later, opened={"c": TIME}, closed=["b"]).to_json()
    assert value["shards"] == {"a": [1_700_000_000, 4], "c": [1_700_000_000, 4]}
    assert value["opened"] == {"c": [1_700_000_000, 3]}
    assert value["stream"]["cluster"] == "65f0a1"
    assert "replicaSets" not in value["stream"], "shards come and go"
    again = Offset.from_json(json.loads(json.dumps(value)))
    assert json.dumps(again.to_json()) == json.dumps(value) == json.dumps(value, sort_keys=True)
    assert "opened" not in again.advanced(later.tick()).to_json(), "only where the micro-batch ends that opened it"


def test_the_offset_of_a_replica_set_does_not_speak_of_clusters() -> None:
    assert sorted(offset().to_json()) == ["clusterTime", "invalidated", "shards", "stream", "token", "version"]
    assert sorted(offset().to_json()["stream"]) == ["replicaSets", "settings"]


@pytest.mark.parametrize(
    ("now", "checkpoint", "said"),
    [
        (
            whole_cluster(),
            identity(),
            "it was made on the replica set 'rs0' and the uri leads to the sharded cluster '65f0a1'",
        ),
        (
            identity(),
            whole_cluster(),
            "it was made on the sharded cluster '65f0a1' and the uri leads to the replica set 'rs0'",
        ),
        (shard_alone(), identity(), "replica set 'rs0' has become a shard of cluster '65f0a1'"),
        (shard_alone(), shard_alone("77"), "replica set 'rs0' has become a shard of another cluster, '65f0a1'"),
        (whole_cluster(), whole_cluster("77"), "the uri leads to another, the sharded cluster '65f0a1'"),
    ],
)
def test_the_checkpoint_of_another_kind_of_deployment_is_refused(
    now: StreamIdentity, checkpoint: StreamIdentity, said: str
) -> None:
    with pytest.raises(UsageError, match="belongs to another stream") as caught:
        now.require_same(StreamIdentity.from_json(checkpoint.to_json()))
    assert said in str(caught.value)
    assert "checkpointLocation" in str(caught.value)


def test_the_checkpoint_of_the_same_cluster_or_shard_is_taken() -> None:
    for stream in (whole_cluster(database="d"), shard_alone()):
        stream.require_same(StreamIdentity.from_json(stream.to_json()))


def test_columns_and_limits_are_no_part_of_the_stream() -> None:
    identity().require_same(identity(columns="event", maxEventsPerTrigger="5", documents="json", partitions="3"))


def test_advancing_leaves_a_token_behind() -> None:
    start = offset(resume=Resume("resumeAfter", ResumeToken(TIME.tick(), uuid=bytes(16))))
    end = start.advanced(TIME.tick(), invalidated=True)
    assert end.resume is None
    assert end.invalidated
    assert end.shards == (("rs0", TIME.tick()),)


@pytest.mark.parametrize(
    "value",
    [{}, {"version": 9}, {"version": 1}, {"version": 1, "clusterTime": 5}, {**offset().to_json(), "token": "zz"}],
)
def test_an_offset_that_is_not_ours_is_a_clear_error(value: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="new checkpointLocation"):
        Offset.from_json(value)
