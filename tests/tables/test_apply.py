"""Changes applied in compiled code give the documents that the reference gives, and the same errors."""

from __future__ import annotations

import random
from typing import Any

import bson
import pytest

from tailrace.lake.tables.state import TabledCollection
from tailrace.read.images.delta import ImageMismatchError, UnknownDocumentError, apply_operation
from tailrace.read.window import apply
from tailrace.read.window.apply import (
    DELETE,
    INSERT,
    LETTERS,
    UPDATE,
    DocumentWork,
    StateMismatchError,
    TimedChange,
    apply_all,
)

COLLECTION = TabledCollection("00" * 16, 1, "shop.orders", copied=5)


def delta(**diff: Any) -> bytes:
    return bson.encode({"$v": 2, "diff": diff})


def document(number: int, chosen: random.Random) -> bytes:
    lines = [{"sku": chosen.randrange(9)} for _ in range(chosen.randrange(4))]
    return bson.encode(
        {"_id": number, "n": 0, "at": {"x": 1, "y": 2}, "lines": lines, "text": "x" * chosen.randrange(50)}
    )


def change(number: int, chosen: random.Random, time: int) -> TimedChange:
    match chosen.randrange(9):
        case 0:
            return INSERT, document(number, chosen), time
        case 1:
            return DELETE, bson.encode({"_id": number}), time
        case 2:
            return UPDATE, document(number, chosen), time  # a replacement
        case 3:
            return UPDATE, delta(d={"text": False}), time
        case 4:
            return UPDATE, delta(i={f"f{chosen.randrange(3)}": chosen.random()}), time
        case 5:
            return UPDATE, delta(sat={"d": {"y": False}, "u": {"x": time}}), time
        case 6:
            return UPDATE, delta(slines={"a": True, "u1": {"sku": 5}}), time
        case 7:
            return UPDATE, bson.encode({"$v": 1, "$set": {"n": time}}), time
        case _:
            return UPDATE, delta(u={"n": time, "text": "changed"}), time


@pytest.mark.parametrize("hold", [1, 100])
@pytest.mark.parametrize("seed", range(6))
def test_compiled_code_and_the_reference_agree(seed: int, hold: int) -> None:
    """Before and after the time up to which changes may already be in the copy."""
    chosen = random.Random(seed)
    works: list[DocumentWork[TabledCollection]] = []
    expected: list[bytes | None] = []
    for number in range(200):
        held = now = document(number, chosen) if chosen.random() < 0.9 else None
        kept: list[TimedChange] = []
        for place in range(chosen.choice((1, 1, 1, 2, 3, 40))):
            op, body, time = one = change(number, chosen, hold + place)
            again = time <= COLLECTION.copied or op != UPDATE
            try:
                now = apply_operation(now, LETTERS[op], body, again=again)
            except (ImageMismatchError, UnknownDocumentError):
                continue  # the server would not have written it
            kept.append(one)
        if kept:
            works.append(DocumentWork(COLLECTION, number.to_bytes(4), held, kept))
            expected.append(now)
    apply_all(works)
    assert [work.document for work in works] == expected
    assert len(works) > 100


def test_the_compiled_code_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare the reference with itself."""
    works = [
        DocumentWork(COLLECTION, b"%d" % number, document(number, random.Random(1)), [(UPDATE, delta(u={"n": 7}), 9)])
        for number in range(20)
    ]
    monkeypatch.setattr(apply, "apply_operation", None)
    apply_all(works)
    assert all(work.document is not None and bson.decode(work.document)["n"] == 7 for work in works)


def test_an_update_of_a_document_that_is_not_there_is_told() -> None:
    works = [DocumentWork(COLLECTION, b"%d" % number, None, [(UPDATE, delta(u={"n": 7}), 9)]) for number in range(20)]
    with pytest.raises(StateMismatchError, match=r"shop\.orders"):
        apply_all(works)
    early = [DocumentWork(COLLECTION, b"k", None, [(UPDATE, delta(u={"n": 7}), 4)])]
    apply_all(early)
    assert early[0].document is None, "the copy was taken after the document had gone"
