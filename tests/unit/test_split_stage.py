"""Which events ``$changeStreamSplitLargeEvent`` divides, and what their fragments keep."""

from __future__ import annotations

import bson
import pytest

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.router import RouterPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.stage.check_resumability import _place
from tailrace.core.stage.split_large_event import SplitLargeEvent

MEBI = 1 << 20


def event(size: int) -> ChangeEvent:
    token = ResumeToken(ClusterTime.of(5, 1), uuid=bytes(16), event_identifier=bson.encode({"_id": 1}), version=2)
    made = ChangeEvent("insert", ClusterTime.of(5, 1), token.to_bson())
    made.namespace = (b"shop", b"orders")
    made.wall_time_ms = 7_000
    made.full_document = bson.encode({"_id": 1, "text": "x" * size})
    made.full_document_before_change = bson.encode({"_id": 1, "text": "y" * size})
    return made


def split(size: int) -> list[ChangeEvent]:
    out: list[ChangeEvent] = []
    SplitLargeEvent(None).process([event(size)], out)
    return out


@pytest.mark.parametrize("size", [10, MEBI, 7 * MEBI])
def test_an_event_that_fits_is_given_as_it_is(size: int) -> None:
    (one,) = split(size)
    assert one.replaced_by is None
    assert one.to_bson() == event(size).to_bson()


def test_the_fragments_of_a_larger_one_are_of_its_namespace_and_time() -> None:
    fragments = split(9 * MEBI)
    assert [bson.decode(one.to_bson())["splitEvent"] for one in fragments] == [
        {"fragment": 1, "of": 2},
        {"fragment": 2, "of": 2},
    ]
    for one in fragments:
        assert (one.namespace, one.wall_time_ms) == ((b"shop", b"orders"), 7_000)
        assert (one.operation_type, one.cluster_time) == ("insert", ClusterTime.of(5, 1))


def test_an_event_without_a_collection_stands_before_those_of_collections_at_its_time() -> None:
    """Such as ``dropDatabase``, whose token has no UUID."""
    identifier = bson.encode({"operationType": "dropDatabase"})
    places = [
        _place(ResumeToken(ClusterTime.of(5, 1), uuid=uuid, event_identifier=identifier, version=2).parts)
        for uuid in (None, bytes(16), b"Y" * 16)
    ]
    assert places == sorted(places)
    assert len(set(places)) == 3


@pytest.mark.parametrize("asked", [True, False])
def test_a_stream_divides_large_events_if_its_pipeline_asks_for_it(asked: bool) -> None:
    """The tests of whole streams that have such a stage run longer than a planted fault is given."""
    pipeline = [bson.encode({"$changeStreamSplitLargeEvent": {}})] if asked else []
    stages = RouterPipeline(
        build_plan(StreamOptions(Scope.of_collection("shop", "orders"), pipeline=pipeline)), ensures=False
    ).stages
    assert any(isinstance(stage, SplitLargeEvent) for stage in stages) == asked
