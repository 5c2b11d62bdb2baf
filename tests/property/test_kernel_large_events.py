"""Events near the largest allowed size: made by the kernel up to the last byte, refused or split beyond it."""

from __future__ import annotations

import bson
import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.kernel import EVENT, PLAIN, transform_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.request import Answer, Request
from tailrace.core.stage.split_large_event import EVENT_BYTES_MAX
from tests.property import random_entries
from tests.property.test_kernel_events import START, PlainOplog, driven, plan_of
from tests.property.test_kernel_images import LOOK_UP, images_plan

PLAN, SETTINGS = plan_of("shop.orders")
MANY = 1 << 40


def _insert(number: int, size: int) -> bytes:
    """An insert with a text of ``size`` bytes; its event has some more."""
    key = rb.encode_document(rb.encode_element(rb.INT32, b"_id", rb.encode_int32(1_000 + number)))
    text = rb.encode_element(rb.STRING, b"text", rb.encode_string(b"x" * size))
    return _entry(number, b"i", rb.encode_document(key[4:-1], text), key)


def _update(number: int, size: int = 0) -> bytes:
    key = rb.encode_document(rb.encode_element(rb.INT32, b"_id", rb.encode_int32(1_000 + number)))
    text = rb.encode_element(rb.STRING, b"text", rb.encode_string(b"y" * size))
    changed = rb.encode_document(random_entries.document(b"u", rb.encode_document(text)))
    delta = rb.encode_element(rb.INT32, b"$v", rb.encode_int32(2)) + random_entries.document(b"diff", changed)
    return _entry(number, b"u", rb.encode_document(delta), key)


def _entry(number: int, operation: bytes, o: bytes, key: bytes) -> bytes:
    return rb.encode_document(
        random_entries.string(b"op", operation),
        random_entries.string(b"ns", b"shop.orders"),
        rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
        random_entries.document(b"o", o),
        random_entries.document(b"o2", key),
        rb.encode_element(rb.TIMESTAMP, b"ts", ClusterTime.of(2, number + 1).to_bytes_le()),
        rb.encode_element(rb.DATE, b"wall", rb.encode_int64(number)),
    )


def _around_the_limit() -> int:
    """The size of the text with which the event is as large as allowed."""
    return EVENT_BYTES_MAX - len(transform_batch(_insert(0, 0), SETTINGS).event(0))


def test_the_kernel_makes_events_up_to_the_limit() -> None:
    """Events between 16 MiB and the server's limit used to be left to the plain stages."""
    size = _around_the_limit()
    for more, kind in ((-1, EVENT), (0, EVENT), (1, PLAIN)):
        assert transform_batch(_insert(0, size + more), SETTINGS).kind.tolist() == [kind]


@pytest.mark.parametrize("split", [False, True])
def test_large_events_among_small_ones(split: bool) -> None:
    """The stream ends at the first event that is too large (for the split stage: one with a field that fits no
    fragment), after giving those before it."""
    size = _around_the_limit()
    entries = [_insert(number, text) for number, text in enumerate((9, size - 20_000, 9, size, 9, size + 1, 9))]
    pipeline = [bson.encode({"$changeStreamSplitLargeEvent": {}})] if split else []
    plan = build_plan(StreamOptions.parse(Scope.parse("shop.orders"), START, pipeline))
    oplog = PlainOplog(entries)
    expected = driven(oplog, plan, MANY, fast=False)
    assert len(expected[0]) == (3 if split else 5)
    assert driven(oplog, plan, MANY, fast=True) == expected


class _LargeDocuments(PlainOplog):
    size = 0

    def answer(self, request: Request) -> Answer:
        document = rb.encode_document(rb.encode_element(rb.STRING, b"text", rb.encode_string(b"x" * self.size)))
        return [document] * len(request.lookups)  # type: ignore[union-attr]


@pytest.mark.parametrize("more", [0, 1])
def test_an_event_that_its_image_makes_too_large_ends_the_stream_at_its_place(more: int) -> None:
    plan = images_plan(plan_of(None)[0].profile, **LOOK_UP)
    oplog = _LargeDocuments([_update(number) for number in range(3)])
    event = driven(oplog, plan, MANY, fast=True)[0][0]
    oplog.size = EVENT_BYTES_MAX - len(event) + more
    expected = driven(oplog, plan, MANY, fast=False)
    assert [len(event) for event in expected[0]] == ([] if more else [EVENT_BYTES_MAX] * 3)
    assert driven(oplog, plan, MANY, fast=True) == expected


@pytest.mark.parametrize("image", [1_000, 9_000_000])
def test_an_event_that_its_image_makes_too_large_is_split_at_its_place(image: int) -> None:
    stages = [{"$changeStreamSplitLargeEvent": {}}]
    plan = images_plan(plan_of(None)[0].profile, stages, **LOOK_UP)
    oplog = _LargeDocuments([_update(0), _update(1, 8_000_000), _update(2)])
    oplog.size = image
    expected = driven(oplog, plan, MANY, fast=False)
    assert len(expected[0]) == (4 if image > 1_000 else 3)
    assert driven(oplog, plan, MANY, fast=True) == expected
