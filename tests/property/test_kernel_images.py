"""Streams with images: the kernel's blocks and the plain stages' events are the same, whatever is found or fails."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import bson
import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.event.event_block import EventBlock
from tailrace.core.kernel.fast_path import process_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import SERVER_4_4, SERVER_5_0, SERVER_6_0, SERVER_8_1, SERVER_8_3, ServerProfile
from tailrace.core.plan.request import Answer, AnswerTooLargeError, NeedDocuments, NeedPreImages, OplogBatch, Request
from tailrace.errors import ServerError, SourceError
from tests.amounts import amount
from tests.property import random_entries, random_values
from tests.property.test_kernel_events import START, PlainOplog, PlainStages, driven, plan_of, random_run
from tests.property.working import drive_blocks

SEED = 77
MANY = 1 << 30


class Images(PlainOplog):
    """An oplog with images. What is found depends on what is asked, so that a different question gets a different
    answer.

    ``missing``, ``failing``  one in so many images is missing, or refused; 0: none
    """

    def __init__(self, entries: list[bytes], *, missing: int = 3, failing: int = 0, size: int = 0) -> None:
        super().__init__(entries)
        self.missing, self.failing, self.size = missing, failing, size
        self.asked: list[int] = []

    def answer(self, request: Request) -> Answer:
        assert isinstance(request, NeedDocuments | NeedPreImages), request
        questions = request.lookups if isinstance(request, NeedDocuments) else request.keys
        assert questions
        self.asked.append(len(questions))
        return [self._image(question) for question in questions]

    def _image(self, question: object) -> bytes | None:
        chance = int.from_bytes(blake2b(repr(question).encode(), digest_size=4).digest(), "little")
        if self.failing and chance % self.failing == 0:
            raise ServerError("no such index key", code=201) if chance % 2 else SourceError("the connection is lost")
        if self.missing and chance // 100 % self.missing == 0:
            return None
        rng = random.Random(chance)
        parts = [rb.encode_element(rb.STRING, b"asked", rb.encode_string(repr(question).encode()))]
        parts += [random_values.document(rng)[4:-1], random_entries.fields(rng)[4:-1]]
        return rb.encode_document(*parts, rb.encode_element(rb.STRING, b"pad", rb.encode_string(b"x" * self.size)))


def images_plan(
    profile: ServerProfile, stages: list[dict[str, Any]] | None = None, *, scope: str | None = None, **options: Any
) -> Plan:
    pipeline = [bson.encode(stage) for stage in stages or []]
    return build_plan(StreamOptions.parse(Scope.parse(scope), {**START, **options}, pipeline), profile)


@functools.cache
def entries_of(seed: int, count: int, profile: ServerProfile = SERVER_6_0) -> list[bytes]:
    """Random entries of which the plain stages make something."""
    plain = PlainStages(plan_of(None, profile=profile)[0])
    return [entry for entry in random_run(seed, count) if plain.events(entry) is not None]


def check_same(entries: list[bytes], plan: Plan, **found: int) -> list[bytes]:
    """Check that both ways give the same, however the oplog is cut. Returns the events."""
    expected = driven(Images(entries, **found), plan, MANY, fast=False)
    for entries_max in (MANY, 200, 7):
        oplog = Images(entries, **found)
        assert driven(oplog, plan, entries_max, fast=True) == expected
        assert max(oplog.asked, default=0) <= 1_000
    return expected[0]


LOOK_UP = {"fullDocument": "updateLookup"}


@pytest.mark.long
@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("profile", "options"),
    [
        pytest.param(SERVER_4_4, LOOK_UP, id="4.4 by uuid"),
        pytest.param(SERVER_5_0, LOOK_UP, id="5.0 by uuid"),
        pytest.param(SERVER_6_0, LOOK_UP, id="6.0"),
        pytest.param(SERVER_6_0, {**LOOK_UP, "matchCollectionUUIDForUpdateLookup": True}, id="match uuid"),
        pytest.param(SERVER_6_0, {**LOOK_UP, "fullDocumentBeforeChange": "whenAvailable"}, id="look-up and before"),
        pytest.param(SERVER_6_0, {"fullDocumentBeforeChange": "whenAvailable"}, id="before"),
        pytest.param(SERVER_6_0, {"fullDocument": "whenAvailable"}, id="after"),
        pytest.param(
            SERVER_6_0, {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}, id="both"
        ),
        pytest.param(
            SERVER_8_1,
            {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable", "showExpandedEvents": True},
            id="expanded both",
        ),
        pytest.param(
            SERVER_6_0,
            {**LOOK_UP, "fullDocumentBeforeChange": "whenAvailable", "showRawUpdateDescription": True},
            id="raw updates",
        ),
        pytest.param(SERVER_8_3, LOOK_UP, id="8.3"),
        pytest.param(
            SERVER_8_3,
            {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable", "showExpandedEvents": True},
            id="8.3 both",
        ),
    ],
)
@pytest.mark.parametrize("scope", [None, "shop.orders"])
def test_images_that_are_found_or_not(profile: ServerProfile, options: dict[str, Any], scope: str | None) -> None:
    """A delta that does not fit its image is an error here too: the events before it are the same."""
    entries = entries_of(SEED, amount(250, 900), profile)
    given = check_same(entries, images_plan(profile, scope=scope, **options))
    assert given


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"fullDocument": "required"},
        {"fullDocumentBeforeChange": "required"},
        {"fullDocument": "required", "fullDocumentBeforeChange": "required"},
        {"fullDocument": "required", "fullDocumentBeforeChange": "whenAvailable"},
        {"fullDocument": "updateLookup", "fullDocumentBeforeChange": "required"},
    ],
    ids=lambda options: " ".join(options.values()),
)
@pytest.mark.parametrize("missing", [0, 40, 400])
def test_a_required_image_that_is_missing_is_an_error_at_its_event(options: dict[str, str], missing: int) -> None:
    parts = amount(4, 1)  # of the entries, and so of those that are between two that are missing
    check_same(_plain_updates(1_200 // parts), images_plan(SERVER_6_0, **options), missing=missing // parts)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [LOOK_UP, {"fullDocument": "whenAvailable"}, {**LOOK_UP, "fullDocumentBeforeChange": "whenAvailable"}],
    ids=["look-up", "after", "both"],
)
@pytest.mark.parametrize("failing", [1, 30, 300, 3_000])
def test_what_comes_before_a_look_up_that_fails_is_given(options: dict[str, str], failing: int) -> None:
    """This holds as far as the source's answers allow: ``AddPreImage`` asks for a whole batch or nothing."""
    plan = images_plan(SERVER_6_0, **options)
    parts = amount(4, 1)
    entries, failing = _plain_updates(900 // parts), -(-failing // parts)
    if "fullDocumentBeforeChange" not in options and options["fullDocument"] == "updateLookup":
        check_same(entries, plan, failing=failing)
        return
    plain, error = driven(Images(entries, failing=failing), plan, 1, fast=False)
    assert driven(Images(entries, failing=failing), plan, 1, fast=True) == (plain, error)
    given, at_once = driven(Images(entries, failing=failing), plan, MANY, fast=True)
    assert given == plain[: len(given)]
    assert type(at_once) is type(error)


@pytest.mark.parametrize(
    "options",
    [
        LOOK_UP,
        {"fullDocument": "required", "fullDocumentBeforeChange": "required"},
        {"fullDocument": "whenAvailable"},
        {"fullDocumentBeforeChange": "whenAvailable"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_no_entry_is_left_to_the_plain_stages_where_nothing_is_wrong(options: dict[str, str]) -> None:
    entries = _plain_updates(300)
    oplog = Images(entries, missing=0)
    pipeline = ChangeStreamPipeline(images_plan(SERVER_6_0, **options), mid_stream=True)
    pipeline.process = None  # type: ignore[method-assign, assignment]
    batch = OplogBatch(b"".join(entries), ClusterTime.of(90, 1))
    assert sum(map(len, drive_blocks(process_batch(pipeline, batch), oplog.answer))) == 300


MATCHES = [
    [{"$match": {"operationType": "update"}}],
    [{"$match": {"documentKey._id": {"$type": "number"}, "fullDocument.a": {"$exists": True}}}],
    [{"$match": {"$or": [{"operationType": "delete"}, {"fullDocument.b": None}]}}, {"$match": {"ns.coll": "orders"}}],
    [{"$match": {"fullDocument": None}}],
    [{"$match": {"fullDocumentBeforeChange.asked": {"$gt": "D"}}}],
    [{"$match": {"ns.coll": {"$regex": "^o"}}}],
    [{"$match": {"ns.db": {"$ne": "shop"}}}, {"$project": {"fullDocument": 0}}],
    [{"$project": {"fullDocumentBeforeChange": 0}}, {"$match": {"operationType": {"$in": ["update", "insert"]}}}],
]


@pytest.mark.by_turns
@pytest.mark.parametrize("stages", MATCHES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        LOOK_UP,
        {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"},
        {"fullDocument": "required"},
        {"fullDocumentBeforeChange": "required"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_a_match_around_the_images(stages: list[dict[str, Any]], options: dict[str, str]) -> None:
    check_same(_plain_updates(amount(120, 400)), images_plan(SERVER_6_0, stages, **options), missing=50)


def test_large_images_are_asked_for_a_few_at_a_time_and_given_before_the_next() -> None:
    plan = images_plan(SERVER_6_0, scope="shop.orders", **LOOK_UP)
    oplog = Images(_plain_updates(300), missing=0, size=1 << 20)
    pipeline = ChangeStreamPipeline(plan, mid_stream=True)
    running = process_batch(pipeline, OplogBatch(b"".join(oplog.entries), ClusterTime.of(90, 1)))
    answer: Answer = None
    waiting, given = 0, 0
    while True:
        try:
            request = running.send(answer)
        except StopIteration:
            break
        answer = None
        if isinstance(request, EventBlock):
            waiting, given = 0, given + len(request)
            continue
        answer = oplog.answer(request)
        waiting += oplog.asked[-1]
        assert waiting <= 32
    assert given > sum(oplog.asked) > 50
    assert oplog.asked[0] == 8
    assert set(oplog.asked[1:-1]) == {15}


@functools.cache
def _plain_updates(count: int) -> list[bytes]:
    """Entries of which most are updates that fit every document, among other writes."""
    rng = random.Random(SEED)
    entries = []
    for number in range(count):
        diff = rb.encode_document(random_entries.document(b"i", random_entries.fields(rng)))
        delta = rb.encode_element(rb.INT32, b"$v", rb.encode_int32(2))
        key = rb.encode_document(rb.encode_element(rb.INT32, b"_id", rb.encode_int32(number)))
        operation = rng.choice((b"u", b"u", b"u", b"i", b"d"))
        body = rb.encode_document(delta, random_entries.document(b"diff", diff)) if operation == b"u" else key
        entries.append(
            rb.encode_document(
                random_entries.string(b"op", operation),
                random_entries.string(b"ns", rng.choice((b"shop.orders", b"shop.items", b"other.orders"))),
                rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
                random_entries.document(b"o", body),
                random_entries.document(b"o2", key),
                rb.encode_element(rb.TIMESTAMP, b"ts", ClusterTime.of(2, number + 1).to_bytes_le()),
                rb.encode_element(rb.DATE, b"wall", rb.encode_int64(number)),
            )
        )
    return entries


class _Bounded(Images):
    """Gives at most ``most`` images to a request for several."""

    most, refused = 40, 0

    def answer(self, request: Request) -> Answer:
        together: Sequence[object] = ()
        if isinstance(request, NeedPreImages):
            together = request.keys
        elif isinstance(request, NeedDocuments) and not isinstance(request.lookups, tuple):
            together = request.lookups
        if len(together) > self.most:
            self.refused += 1
            raise AnswerTooLargeError
        return super().answer(request)


@pytest.mark.parametrize("most", [40, 1])
def test_where_images_are_too_many_bytes_fewer_are_asked_for(most: int) -> None:
    """The plain stages asked for all of them instead, which took more memory than without a bound."""
    entries = [entry for entry in entries_of(SEED, amount(600, 2_000)) if b"applyOps" not in entry]
    plan = images_plan(SERVER_6_0, **LOOK_UP)
    expected = driven(Images(entries), plan, MANY, fast=False)
    oplog = _Bounded(entries)
    oplog.most = most
    assert driven(oplog, plan, MANY, fast=True) == expected
    assert oplog.refused > 0
    assert max(oplog.asked) <= max(most, 8)
