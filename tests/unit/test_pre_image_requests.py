"""Which pre-images a batch of events asks for: stored ones by their keys, and those that are entries of the oplog."""

from __future__ import annotations

import bson
import pytest

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import NeedEntries
from tailrace.core.stage.add_pre_image import request_pre_images


def update(seconds: int) -> ChangeEvent:
    time = ClusterTime.of(seconds, 1)
    token = ResumeToken(time, uuid=bytes(16), event_identifier=bson.encode({"_id": seconds}), version=1)
    made = ChangeEvent("update", time, token.to_bson())
    made.logged_image = ClusterTime.of(seconds - 1, 1)
    return made


def test_images_that_are_entries_are_asked_for_by_time_and_belong_to_their_events() -> None:
    """No offline test had images that are entries, as servers before 6.0 have them."""
    events = [update(10), update(20), update(30)]
    steps = request_pre_images(events)
    assert next(steps) == NeedEntries((ClusterTime.of(9, 1), ClusterTime.of(19, 1), ClusterTime.of(29, 1)))
    with pytest.raises(StopIteration) as ended:
        steps.send([bson.encode({"op": "n", "o": {"_id": 10}}), None, bson.encode({"op": "n", "o": "no document"})])
    found = ended.value.value
    assert [found[id(event)] for event in events] == [bson.encode({"_id": 10}), None, None]


def test_nothing_is_asked_for_where_nothing_is_needed() -> None:
    with pytest.raises(StopIteration) as ended:
        next(request_pre_images([]))
    assert ended.value.value == {}
