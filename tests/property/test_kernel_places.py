"""The kernel notes where the parts of its events are; what is noted is what ``locate`` finds in the finished bytes.

The other property tests of the kernel check this for each of their blocks too (``driven``, ``drive_blocks``). These
tests check which events have notes at all: without notes everything would be searched again, and no test would notice.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import bson
import numpy as np
import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.event.event_block import OPERATION_TYPES, EventBlock
from tailrace.core.expression.language.expression import Bindings
from tailrace.core.expression.match.parse import parse_match
from tailrace.core.kernel import KernelSettings, locate, transform_batch
from tailrace.core.kernel.arrays import PARTS
from tailrace.core.kernel.event_parts import DOCUMENT_KEY, FULL_DOCUMENT
from tailrace.core.kernel.fast_path import process_batch
from tailrace.core.kernel.match_program import match_program
from tailrace.core.kernel.match_test import FAILS, PASSES
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.profile import SERVER_6_0, SERVER_8_1, SERVER_8_3, ServerProfile
from tailrace.core.plan.request import Answer, NeedDocuments, NeedPreImages, OplogBatch, Request
from tailrace.errors import InternalError, OplogFormatError
from tests.property import random_entries, random_transactions
from tests.property.noted import check_noted, is_noted
from tests.property.test_kernel_images import LOOK_UP, images_plan
from tests.property.working import drive_blocks

SEED = 20261123
WRITES = {"insert", "update", "replace", "delete"}
OPTIONS: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"token_version": 2}, id="tokens of version 2"),
    pytest.param({"collection_uuid": True, "disambiguated_paths": True, "ns_type": True}, id="expanded"),
    pytest.param({"raw_updates": True, "wall_time": False}, id="raw updates, no wall time"),
]
IMAGES = {"full_document_before_change", "full_document"}


def entries_of(seed: int, count: int) -> list[bytes]:
    """Writes, definitions and whole transactions, in order."""
    rng = random.Random(seed)
    made: list[bytes] = []
    for number in range(1, count + 1):
        time = ClusterTime.of(2, number)
        if number % 5 == 0:
            operations = [random_transactions.operation(rng) for _ in range(3)]
            made.append(random_transactions.command_entry(random_transactions.apply_ops(operations), time))
        elif number % 3 == 0:
            made.append(random_entries.definition_entry(rng, time))
        else:
            made.append(random_entries.entry(rng, time))
    return made


@pytest.mark.parametrize("options", OPTIONS)
def test_every_event_of_the_kernel_has_its_parts_noted(options: dict[str, Any]) -> None:
    block = transform_batch(b"".join(entries_of(SEED, 600)), KernelSettings(Scope.cluster(), **options)).block()
    assert all(is_noted(block))
    parts = check_noted(block)
    for name in PARTS:
        check_noted(block, [name])
    kinds = {OPERATION_TYPES[number] for number in block.operation.tolist()}
    assert kinds >= WRITES | {"drop", "rename"} | ({"create", "createIndexes"} if len(options) == 3 else set())
    seen = {name for name, part in parts.items() if part.type.any()}
    missing = {"wall_time", "update_description"} if "raw_updates" in options else set()
    assert seen == set(PARTS) - missing - {"full_document_before_change"}


def test_what_is_noted_of_events_goes_with_them() -> None:
    """Cut, taken in another order, joined with events of which nothing is known, and shown without some of them."""
    rng = random.Random(SEED)
    made = transform_batch(b"".join(entries_of(SEED + 1, 300)), KernelSettings(Scope.cluster()))
    block = made.block()
    count = len(block)
    cut = block.cut(count // 4, count // 2)
    taken = block.take(np.array(rng.sample(range(count), count // 2), np.int64))
    some = made.kept(np.array([rng.random() < 0.5 for _ in range(count)])).block()
    plain = EventBlock.of_bson([block.event(number) for number in range(20)])
    joined = EventBlock.join([cut, plain, taken, some.cut(3, 20), EventBlock.of_bson([block.event(5)])])
    for one in (cut, taken, some):
        assert len(one) > 20
        assert all(is_noted(one))
        check_noted(one)
    known = [len(cut), len(plain), len(taken), 17, 1]
    assert is_noted(joined) == np.repeat([True, False, True, True, False], known).tolist()
    check_noted(joined)
    check_noted(joined.take(np.array(rng.sample(range(len(joined)), len(joined)), np.int64)))
    assert EventBlock.join([plain, plain]).places is None


def image(request: Request) -> Answer:
    """Every third image is missing; one in seven is empty."""
    assert isinstance(request, NeedDocuments | NeedPreImages), request
    questions = request.lookups if isinstance(request, NeedDocuments) else request.keys
    found = [
        bson.encode({"_id": number, "pad": "x" * number} if number % 7 else {}) for number in range(len(questions))
    ]
    return [one if number % 3 else None for number, one in enumerate(found)]


def blocks_of(plan: Plan, entries: list[bytes]) -> list[EventBlock]:
    pipeline = ChangeStreamPipeline(plan, mid_stream=True)
    batch = OplogBatch(b"".join(entries), ClusterTime.of(90, 1))
    return list(drive_blocks(process_batch(pipeline, batch), image))


def updates(count: int) -> list[bytes]:
    return [update(number) if number % 4 else insert(number) for number in range(1, count + 1)]


def insert(number: int) -> bytes:
    return _entry(number, b"i", bson.encode({"_id": number, "a": "x" * (number % 50)}))


def update(number: int) -> bytes:
    return _entry(number, b"u", bson.encode({"$v": 2, "diff": {"i": {"b": number}}}))


def _entry(number: int, operation: bytes, body: bytes) -> bytes:
    return rb.encode_document(
        random_entries.string(b"op", operation),
        random_entries.string(b"ns", b"shop.orders"),
        rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
        random_entries.document(b"o", body),
        random_entries.document(b"o2", bson.encode({"_id": number})),
        rb.encode_element(rb.TIMESTAMP, b"ts", ClusterTime.of(2, number).to_bytes_le()),
        rb.encode_element(rb.DATE, b"wall", rb.encode_int64(number)),
    )


@pytest.mark.parametrize(
    ("options", "images"),
    [
        pytest.param(LOOK_UP, {"full_document"}, id="look-up"),
        pytest.param({"fullDocumentBeforeChange": "whenAvailable"}, IMAGES - {"full_document"}, id="before"),
        pytest.param({**LOOK_UP, "fullDocumentBeforeChange": "whenAvailable"}, IMAGES, id="both"),
        pytest.param(
            {**LOOK_UP, "fullDocumentBeforeChange": "whenAvailable", "showRawUpdateDescription": True}, IMAGES, id="raw"
        ),
        pytest.param(
            {"fullDocument": "whenAvailable", "showExpandedEvents": True}, {"full_document"}, id="after, expanded"
        ),
    ],
)
@pytest.mark.parametrize("profile", [None, SERVER_8_3], ids=["", "8.3"])
def test_images_move_what_is_noted(options: dict[str, Any], images: set[str], profile: ServerProfile | None) -> None:
    usual = SERVER_8_1 if "showExpandedEvents" in options else SERVER_6_0
    blocks = blocks_of(images_plan(profile or usual, **options), updates(300))
    found: Counter[tuple[str, int]] = Counter()
    for block in blocks:
        assert all(is_noted(block))
        parts = check_noted(block)
        changed = block.operation == OPERATION_TYPES.index("update")
        for name in images:
            found.update((name, kind) for kind in parts[name].type[changed].tolist())
    assert sum(map(len, blocks)) == 300
    for name in images:
        assert found[name, rb.OBJECT] > 50
        assert found[name, rb.NULL] > 50


#: Of each field whose place is noted: the field, what is in it, and what is not.
ASKED: list[dict[str, Any]] = [
    {"operationType": "update"},
    {"operationType": {"$in": ["insert", "rename", "dropDatabase"]}},
    {"operationType.x": {"$exists": False}, "ns.db": "shop"},
    {"clusterTime": {"$gt": bson.Timestamp(2, 100)}},
    {"clusterTime": {"$type": "timestamp"}, "wallTime": {"$not": {"$type": "date"}}},
    {"wallTime": bson.datetime_ms.DatetimeMS(7)},
    {"wallTime": {"$exists": True}},
    {"ns": {"db": "shop", "coll": "orders"}},
    {"ns.coll": {"$gte": "m"}},
    {"ns.coll": {"$exists": True}, "ns.db": {"$ne": "shop"}},
    {"documentKey._id": {"$type": "number"}},
    {"documentKey": {"$exists": False}},
    {"fullDocument": None},
    {"fullDocument": {"$exists": True}},
    {"fullDocument": {"$type": "null"}},
    {"fullDocument": {}},
    {"fullDocument._id": {"$gte": 20}, "operationType": {"$ne": "insert"}},
    {"fullDocument.a": {"$exists": True}},
    {"fullDocumentBeforeChange": None},
    {"fullDocumentBeforeChange.pad": {"$exists": True}, "fullDocument.pad": {"$exists": True}},
    {"updateDescription": {"$exists": True}},
    {"updateDescription.updatedFields.b": {"$mod": [2, 0]}},
    {"updateDescription.removedFields": []},
    {"to": {"$exists": True}, "ns": {"$type": "object"}},
    {"_id": {"$exists": True}, "lsid": {"$exists": True}, "txnNumber": {"$gte": 0}},
    {"$expr": {"$eq": ["$ns.db", "$to.db"]}},
    {"$expr": {"$gte": ["$fullDocument._id", "$documentKey._id"]}},
]


def asked_blocks() -> list[EventBlock]:
    """Events of all kinds, with every option, with images, and beside events of which nothing is noted."""
    blocks = [
        transform_batch(b"".join(entries_of(SEED + 2, 200)), KernelSettings(Scope.cluster(), **case.values[0])).block()
        for case in OPTIONS
    ]
    before = {"fullDocumentBeforeChange": "whenAvailable"}
    for options in (LOOK_UP, before, {**LOOK_UP, **before}, {**LOOK_UP, **before, "showRawUpdateDescription": True}):
        blocks += blocks_of(images_plan(SERVER_6_0, **options), updates(60))
    plain = EventBlock.of_bson([blocks[0].event(number) for number in range(0, 100, 3)])
    return [*blocks, EventBlock.join([blocks[0].cut(10, 50), plain, blocks[-1].cut(5, 40)])]


def test_a_match_has_the_same_answers_with_what_is_noted_and_without() -> None:
    blocks = asked_blocks()
    for query in ASKED:
        program = match_program(parse_match(bson.encode(query), Bindings.of_document({"REMOVE": None})))
        assert program is not None, query
        seen: set[int] = set()
        for block in blocks:
            found = program.answers(block.buffer, block.offsets).tolist()
            assert program.answers(block.buffer, block.offsets, block.places).tolist() == found, query
            seen.update(found)
        assert seen >= {FAILS, PASSES}, query


def test_a_match_looks_where_it_is_noted() -> None:
    """Noted places are really used: one that points elsewhere is believed. Otherwise nothing would be faster, and no
    test would notice."""
    block = transform_batch(b"".join(updates(4)), KernelSettings(Scope.cluster())).block()
    assert block.places is not None
    wrong = block.places.copy()
    wrong[:, FULL_DOCUMENT] = wrong[:, DOCUMENT_KEY]
    program = match_program(parse_match(bson.encode({"fullDocument._id": 2}), Bindings.of_document({"REMOVE": None})))
    assert program is not None
    assert program.answers(block.buffer, block.offsets, block.places).tolist() == [FAILS] * 4
    assert program.answers(block.buffer, block.offsets, wrong).tolist() == [FAILS, PASSES, FAILS, FAILS]


def test_a_stage_that_writes_events_anew_leaves_nothing_noted() -> None:
    for stages, noted in (
        ([{"$match": {"operationType": "insert"}}], True),
        ([{"$project": {"fullDocument.a": 0}}], False),
        ([{"$set": {"ns": "elsewhere"}}], False),
        ([{"$match": {"operationType": "insert"}}, {"$project": {"operationType": 1, "documentKey": 1}}], False),
    ):
        blocks = blocks_of(images_plan(SERVER_6_0, stages, scope="shop.orders"), updates(200))
        assert sum(map(len, blocks)) in (50, 200)
        for block in blocks:
            assert set(is_noted(block)) == {noted}, stages
            check_noted(block)


@pytest.mark.parametrize(
    "session", [b"", b"\x02id\0\x01\0\0\0\0", b"\x05id\0\x03\0\0\0\x04abc", b"\x02id\0\xff\xff\xff\0x"]
)
def test_a_session_without_an_identifier_or_with_a_damaged_one_is_as_it_is_found(session: bytes) -> None:
    """The kernel copies the entry's ``lsid`` without looking into it."""
    o = random_transactions.apply_ops([rb.encode_document(*_operation(number)) for number in range(3)])
    entry = random_transactions.command_entry(o, ClusterTime.of(2, 1))
    identifier = rb.encode_element(rb.BINARY, b"id", random_entries.uuid_value())
    whole = rb.encode_document(identifier)
    changed = rb.encode_document(session)
    element = rb.find(entry, b"lsid")
    assert element is not None
    parts = [entry[one.start : one.end] for one in rb.elements(entry) if one.name != b"lsid"]
    assert rb.value(entry, element) == whole
    entry = rb.encode_document(random_entries.document(b"lsid", changed), *parts)
    block = transform_batch(entry, KernelSettings(Scope.cluster())).block()
    assert len(block) == 3
    check_noted(block)
    check_noted(block, [name for name in PARTS if name != "session"])
    if session.endswith(b"x"):
        with pytest.raises(OplogFormatError):
            locate(block.buffer, block.offsets, ["session"], block.places)


def _operation(number: int) -> list[bytes]:
    return [
        random_entries.string(b"op", b"i"),
        random_entries.string(b"ns", b"shop.orders"),
        rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
        random_entries.document(b"o", bson.encode({"_id": number})),
    ]


def test_places_of_other_events_are_refused() -> None:
    block = transform_batch(b"".join(updates(9)), KernelSettings(Scope.cluster())).block()
    assert block.places is not None
    with pytest.raises(InternalError):
        locate(block.buffer, block.offsets, PARTS, block.places[1:])
