"""Masking commutes with updates, on random documents, rules and updates."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import bson
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.masking.documents import DocumentMask
from tailrace.core.masking.events import MaskSet
from tailrace.core.masking.rules import MaskRules
from tailrace.core.masking.values import MaskKey
from tailrace.core.oplog.stored_document import apply_operation
from tests.masks.random_updates import SECRET, PlainMasks, applied, change, fields, rules
from tests.masks.workload import found_in, marked_number

RANDOM = st.randoms(use_true_random=False)
KEY = MaskKey(SECRET)


def mask_of(given: dict[str, str]) -> DocumentMask:
    found = MaskSet(MaskRules.of({"shop.c": given}), KEY).of("shop.c")
    assert found is not None
    return found


@settings(max_examples=150, deadline=None)
@given(RANDOM)
def test_a_masked_document_is_what_plain_python_makes_of_it(rnd: Random) -> None:
    declared, document = rules(rnd), {"_id": 1, **fields(rnd)}
    made = bson.decode(mask_of(declared).document(bson.encode(document)))
    assert made == PlainMasks(declared).document(bson.decode(bson.encode(document)))


@settings(max_examples=150, deadline=None)
@given(RANDOM)
def test_the_masked_delta_brings_the_masked_document_where_the_delta_brings_the_document(rnd: Random) -> None:
    mask, document = mask_of(rules(rnd)), {"_id": 1, **fields(rnd)}
    update = change(rnd, document)
    raw = bson.encode(document)
    after = apply_operation(raw, b"u", update.delta)
    assert after == bson.encode(update.after)
    assert apply_operation(mask.document(raw), b"u", mask.update(update.delta)) == mask.document(after)


@settings(max_examples=150, deadline=None)
@given(RANDOM)
def test_so_does_the_masked_update_description(rnd: Random) -> None:
    declared, document = rules(rnd), {"_id": 1, **fields(rnd)}
    update = change(rnd, document)
    masks = MaskSet(MaskRules.of({"shop.c": declared}), KEY)
    mask = mask_of(declared)
    event = bson.decode(masks.event(bson.encode(event_of(update.description))))
    before, after = (bson.decode(mask.document(bson.encode(one))) for one in (document, update.after))
    assert applied(document, update.description, update.paths) == bson.decode(bson.encode(update.after))
    assert applied(before, event["updateDescription"], update.paths) == after


def event_of(description: dict[str, Any]) -> dict[str, Any]:
    return {
        "_id": {"_data": "8265"},
        "operationType": "update",
        "clusterTime": bson.Timestamp(1, 1),
        "ns": {"db": "shop", "coll": "c"},
        "documentKey": {"_id": 1},
        "updateDescription": description,
    }


def test_a_marked_number_is_found_in_bson_and_in_text(tmp_path: Path) -> None:
    number = marked_number(Random(1))
    for name, content in (("bson", bson.encode({"a": number})), ("text", str(number).encode())):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "file").write_bytes(content)
        assert found_in([folder]) != [], name
