"""Bulk look-ups: the query for many keys, and the documents assigned to them, are the same as in plain code."""

from __future__ import annotations

import random
from collections.abc import Iterator

import bson
import numpy as np
import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.event.image import DocumentRuns, FoundDocuments
from tailrace.core.kernel.look_up import Keys
from tests.property import random_values
from tests.property.guard_page import GuardedBuffer

#: Values of the types of an ``_id`` that are compared by their bytes.
_IDS = (
    lambda rng: bson.ObjectId(rng.randbytes(12)),
    lambda rng: rng.randrange(50),
    lambda rng: bson.Int64(rng.randrange(50)),
    lambda rng: rng.choice("abcdefgh") * rng.randrange(20),
    lambda rng: rng.randbytes(rng.randrange(30)),
    lambda rng: bson.Timestamp(rng.randrange(9), 1),
    lambda rng: None,
    lambda rng: {"a": rng.randrange(9), "b": "x" * rng.randrange(9)},
)


def runs_of(documents: list[bytes]) -> DocumentRuns:
    """The documents in one buffer that ends at the end of what may be read."""
    ends = np.cumsum([len(document) for document in documents])
    sizes = np.array([len(document) for document in documents])
    return DocumentRuns(np.frombuffer(b"".join(documents), np.uint8), ends - sizes, ends)


def random_ids(rng: random.Random, count: int) -> list[bytes]:
    return [bson.encode({"_id": rng.choice(_IDS)(rng)}) for _ in range(count)]


def stored(rng: random.Random, key: bytes) -> bytes:
    return rb.encode_document(key[4:-1], random_values.document(rng)[4:-1])


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 99, 101, 1000])
def test_each_key_finds_its_document_and_a_key_twice_is_asked_once(count: int) -> None:
    rng = random.Random(count)
    ids = random_ids(rng, count)
    keys = Keys(runs_of(ids))
    different = list(dict.fromkeys(ids))
    array = rb.encode_document(keys.elements)
    assert keys.decided
    assert keys.different == len(different)
    assert [element.name for element in rb.elements(array)] == [b"%d" % number for number in range(len(different))]
    values = [(element.type, rb.value(array, element)) for element in rb.elements(array)]
    assert values == [(id_[4], id_[9:-1]) for id_ in different]
    assert keys.types == {id_[4] for id_ in different}
    there = {id_: stored(rng, id_) for id_ in different if rng.random() < 0.7}
    reply = list(there.values())
    rng.shuffle(reply)
    found = keys.among(b"".join(reply))
    assert found is not None
    assert list(found) == [there.get(id_) for id_ in ids]


def test_nothing_is_found_in_an_empty_reply() -> None:
    found = Keys(runs_of(random_ids(random.Random(1), 5))).among(b"")
    assert found is not None
    assert list(found) == [None] * 5


def test_the_image_within_is_the_field_of_that_name() -> None:
    rng = random.Random(3)
    ids = list(dict.fromkeys(random_ids(rng, 200)))
    images = {id_: random_values.document(rng) for id_ in ids}
    documents = []
    for id_, image in images.items():
        others = [rb.encode_element(rb.DATE, b"operationTime", bytes(8)), rb.encode_element(rb.NULL, b"preImages", b"")]
        fields = [*others, rb.encode_element(rb.OBJECT, b"preImage", image)]
        rng.shuffle(fields)
        documents.append(rb.encode_document(id_[4:-1], *fields))
    found = Keys(runs_of(ids)).among(b"".join(documents), within=True)
    assert found is not None
    assert list(found) == list(images.values())


@pytest.mark.parametrize(
    "key",
    [
        {"region": "eu", "_id": 1},
        {"_id": 1, "region": "eu"},
        {"id_": 1},
        {},
        {"_id": bson.MinKey()},
    ],
    ids=str,
)
def test_keys_of_more_than_an_id_are_left_to_the_plain_way(key: dict[str, object]) -> None:
    assert not Keys(runs_of([bson.encode({"_id": 7}), bson.encode(key)])).decided


@pytest.mark.parametrize(
    "document",
    [
        {"_id": 7.0},
        {"_id": 8},
        {"a": 1, "_id": 7},
        {"_id": 7, "a": 1},
        {"_id": 7, "preImage": 3},
        {"_id": 7, "b": "c", "preImag": {}},
    ],
    ids=str,
)
def test_a_document_of_another_id_or_shape_leaves_all_to_the_plain_way(document: dict[str, object]) -> None:
    keys = Keys(runs_of([bson.encode({"_id": 7})]))
    assert keys.among(bson.encode({"_id": 7, "preImage": {}}) + bson.encode(document), within=True) is None


def damaged(reply: bytes) -> Iterator[bytes]:
    for place in range(len(reply)):
        for byte in (0, 1, 0x7F, 0xFF, reply[place] ^ 1):
            yield reply[:place] + bytes([byte]) + reply[place + 1 :]
        yield reply[:place]


def test_a_damaged_reply_is_never_read_past_its_end() -> None:
    """Each one is placed before memory that cannot be read, so that what is found must lie inside it."""
    ids = [bson.encode({"_id": id_}) for id_ in (7, "text", {"a": 1})]
    keys = Keys(runs_of(ids))
    reply = b"".join(rb.encode_document(id_[4:-1], b"\x03preImage\0", bson.encode({"b": 1})) for id_ in ids)
    guarded = GuardedBuffer(len(reply))
    for wrong in damaged(reply):
        for within in (False, True):
            found = keys.among(guarded.place(wrong), within=within)
            assert found is None or all(part is None or part in wrong for part in found)


def test_answers_in_parts_stand_where_they_were_asked() -> None:
    rng = random.Random(5)
    for count in (0, 1, 7):
        documents = [None if rng.random() < 0.3 else random_values.document(rng) for _ in range(count)]
        order = rng.sample(range(count), count)
        cut = count // 2
        parts = [
            (np.array(numbers, np.int64), [documents[number] for number in numbers])
            for numbers in (order[:cut], order[cut:])
        ]
        assert list(FoundDocuments.gathered(count, parts)) == documents
        assert list(FoundDocuments.gathered(count + 1, parts)) == [*documents, None]
