"""The programs of a pipeline's stages are made once, not for each batch: they cost more than a small batch does."""

from __future__ import annotations

import gc

import pytest

from tailrace.core.kernel import user_stages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for


def pipeline_of(*stages: dict[str, object]) -> ChangeStreamPipeline:
    options = StreamOptions.parse(Scope.cluster(), {}, stages)
    return ChangeStreamPipeline(build_plan(options, profile_for("6.0")).start_at(ClusterTime.of(1, 1)))


def test_steps_are_made_once_for_each_pipeline() -> None:
    one, another = (pipeline_of({"$match": {"ns.coll": name}}, {"$project": {"ns": 1}}) for name in "ab")
    made = user_stages.user_steps(one)
    assert made
    assert user_stages.user_steps(one) is made
    assert user_stages.user_steps(another) is not made, "another pipeline has other stages"


def test_steps_go_with_their_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    known = len(user_stages._made)
    pipeline = pipeline_of({"$match": {"ns.coll": "a"}})
    user_stages.user_steps(pipeline)
    assert len(user_stages._made) == known + 1
    del pipeline
    gc.collect()
    assert len(user_stages._made) <= known
    monkeypatch.setattr(user_stages, "_MADE_MAX", 0)
    pipeline = pipeline_of({"$match": {"ns.coll": "a"}})
    assert user_stages.user_steps(pipeline)
    assert pipeline not in user_stages._made, "thousands of streams hold no more than some of them"
