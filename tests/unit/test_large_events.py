"""Events that a listener's stream gives in fragments, or cannot give: only tests with a server had covered them."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.act.consumer.rules.large_events import Fragments, operation_and_token, refused_event
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.stage.split_large_event import SplitLargeEvent
from tailrace.errors import ServerError, SourceError, TailraceError

TOKEN = ResumeToken(ClusterTime.of(5, 1), uuid=bytes(16), event_identifier=bson.encode({"_id": 1}), version=2)


def event(size: int) -> ChangeEvent:
    made = ChangeEvent("insert", ClusterTime.of(5, 1), TOKEN.to_bson())
    made.namespace = (b"shop", b"orders")
    made.full_document = bson.encode({"_id": 1, "text": "x" * size})
    made.full_document_before_change = bson.encode({"_id": 1, "text": "y" * size})
    return made


def test_the_fragments_of_an_event_are_put_together_again() -> None:
    out: list[ChangeEvent] = []
    SplitLargeEvent(None).process([event(9 << 20)], out)
    first, second = (one.to_bson() for one in out)
    fragments = Fragments()
    assert fragments.add(first) is None
    assert fragments.is_open
    assert fragments.add(second) == event(9 << 20).to_bson()
    assert not fragments.is_open


@pytest.mark.parametrize("split", [{}, {"splitEvent": 5}, {"splitEvent": {}}, {"splitEvent": {"fragment": 2, "of": 2}}])
def test_what_is_no_first_fragment_is_given_back(split: dict[str, Any]) -> None:
    """A user's stages can put anything into the field, and earlier fragments may already have been handled."""
    whole, fragments = bson.encode({"_id": TOKEN.to_document(), **split}), Fragments()
    assert fragments.add(whole) == whole
    assert not fragments.is_open


@pytest.mark.parametrize("is_of_invalidate", [False, True])
@pytest.mark.parametrize(
    ("fields", "operation"),
    [
        ({"operationType": "insert"}, "insert"),
        ({"operationType": 5}, None),
        ({}, None),
        ({"operationTypeOf": "drop", "operationType": "insert"}, "insert"),
    ],
)
def test_an_event_s_operation_is_found_wherever_it_stands(
    fields: dict[str, Any], operation: str | None, is_of_invalidate: bool
) -> None:
    token = ResumeToken(ClusterTime.of(5, 1), uuid=bytes(16), from_invalidate=is_of_invalidate).to_document()
    expected = operation if operation is not None else "invalidate" if is_of_invalidate else ""
    for document in ({"_id": token, **fields}, {**fields, "_id": token}):
        assert operation_and_token(bson.encode(document)) == (token, expected)


@pytest.mark.parametrize("error", [ServerError("too large", code=10334), ServerError("no")])
def test_an_event_that_a_stream_cannot_give_goes_with_its_error(error: ServerError) -> None:
    error.event = event(10)
    refused = refused_event(error)
    assert refused is not None
    assert (refused.token, refused.event, refused.error) == (TOKEN.to_document(), event(10).to_bson(), error)


@pytest.mark.parametrize("error", [ServerError("of no event"), SourceError("away")])
def test_an_error_that_is_of_no_event_refuses_none(error: TailraceError) -> None:
    assert refused_event(error) is None
    if isinstance(error, SourceError):
        error.event = event(10)
        assert refused_event(error) is None
