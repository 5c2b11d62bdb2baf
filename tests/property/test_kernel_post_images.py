"""Post-images by deltas: compiled code and ``apply_diff`` make the same bytes of the same documents."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tailrace.core import raw_bson as rb
from tailrace.core.kernel import images as images_module
from tailrace.core.kernel import transform_batch
from tailrace.core.kernel.images import Field, after_deltas
from tailrace.core.oplog.update_delta import apply_diff
from tailrace.errors import OplogFormatError
from tests.amounts import amount
from tests.property import random_entries, random_values
from tests.property.guard_page import GuardedBuffer
from tests.property.test_kernel_deltas import entry_of
from tests.property.test_kernel_events import plan_of

#: Raw descriptions, with which an invalid delta still makes an event.
SETTINGS = plan_of("shop.orders", showRawUpdateDescription=True)[1]
NAMES = (b"_id", b"a", b"b", b"c", b"a longer name", b"a longer nome", b"d", b"", b"0", "né".encode())


def _value(rng: random.Random, depth: int) -> tuple[int, bytes]:
    chance = rng.random()
    if chance < 0.3 and depth < 4:
        return rb.OBJECT, _document(rng, depth + 1)
    if chance < 0.55 and depth < 4:
        items = (_value(rng, depth + 1) for _ in range(rng.randrange(5)))
        return rb.ARRAY, rb.encode_document(
            *(rb.encode_element(item[0], b"%d" % number, item[1]) for number, item in enumerate(items))
        )
    return random_values.value(rng, 4)


def _document(rng: random.Random, depth: int = 0) -> bytes:
    names = rng.sample(NAMES, rng.randrange(len(NAMES))) + ([rng.choice(NAMES)] if rng.random() < 0.05 else [])
    return rb.encode_document(*(rb.encode_element(v[0], n, v[1]) for n in names for v in [_value(rng, depth)]))


def _section(rng: random.Random, letter: bytes, free: list[bytes]) -> bytes:
    """Some fields, mostly with names that no other section of the delta has."""
    names = [free.pop() for _ in range(min(len(free), rng.randrange(1, 4)))]
    names += [rng.choice(NAMES)] if rng.random() < 0.02 else []
    fields = (rb.encode_element(v[0], n, v[1]) for n in names for v in [_value(rng, 3)])
    return random_entries.document(letter, rb.encode_document(*fields))


def _diff_of(rng: random.Random, document: bytes, depth: int = 0) -> bytes:
    """A delta whose nested parts mostly fit the document."""
    free = rng.sample(NAMES[1:], len(NAMES) - 1)
    parts = [_section(rng, letter, free) for letter in (b"d", b"u", b"i") if rng.random() < 0.35]
    for element in rb.elements(document):
        if rng.random() < 0.7 and element.type in (rb.OBJECT, rb.ARRAY) and element.name in free:
            inside = rb.value(document, element)
            as_array = (element.type == rb.ARRAY) != (rng.random() < 0.1)
            nested = _array_diff_of(rng, inside, depth + 1) if as_array else _diff_of(rng, inside, depth + 1)
            parts.append(random_entries.document(b"s" + element.name, nested))
    return rb.encode_document(*(parts or [_section(rng, b"u", free)]))


def _array_diff_of(rng: random.Random, array: bytes, depth: int) -> bytes:
    parts = [rb.encode_element(rb.BOOL, b"a", b"\1")]
    if rng.random() < 0.4:
        parts.append(rb.encode_element(rb.INT32, b"l", rb.encode_int32(rng.choice((0, 1, 3, 30, 100, -1)))))
    items = list(rb.elements(array))
    for index in range(len(items) + 4):
        if rng.random() < 0.35:
            old = items[index] if index < len(items) else None
            if old is not None and old.type in (rb.OBJECT, rb.ARRAY) and rng.random() < 0.7:
                inside = rb.value(array, old)
                nested = _array_diff_of(rng, inside, depth + 1) if old.type == rb.ARRAY else _diff_of(rng, inside)
                parts.append(random_entries.document(b"s%d" % index, nested))
            else:
                new = _value(rng, 3)
                parts.append(rb.encode_element(new[0], b"u%d" % index, new[1]))
    return rb.encode_document(*parts)


def _expected(document: bytes, diff: bytes) -> bytes | None:
    try:
        return apply_diff(document, diff)
    except OplogFormatError:
        return None


def _made(documents: list[bytes], diffs: list[bytes]) -> list[bytes | None]:
    """What the kernel makes of each; ``None`` if the delta has an error."""
    made = transform_batch(b"".join(map(entry_of, diffs)), SETTINGS)
    assert len(made) == len(diffs)
    after, wrong = after_deltas(made, Field.holding(len(made), [(np.arange(len(made)), list(documents))]))
    images = [after.data[start:end].tobytes() for start, end in zip(after.start, after.end, strict=True)]
    return [None if failed else image for failed, image in zip(wrong.tolist(), images, strict=True)]


def test_random_documents_and_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    documents = [_document(rng) for _ in range(amount(1_000, 4_000))]
    diffs = [_diff_of(rng, document) for document in documents]
    expected = [_expected(*pair) for pair in zip(documents, diffs, strict=True)]
    left: list[bytes] = []
    monkeypatch.setattr(images_module, "apply_diff", lambda *given: left.append(given[0]) or apply_diff(*given))
    assert _made(documents, diffs) == expected
    assert (
        len(documents) // 80 < len(left) < 0.3 * len(documents)
    )  # most are made in compiled code, and rare cases occur too
    assert sum(1 for old, new in zip(documents, expected, strict=True) if old != new) > 0.75 * len(documents)


def test_a_damaged_pre_image_gives_the_same_or_is_left_to_apply_diff() -> None:
    rng = random.Random(5)
    documents = []
    while len(documents) < 6:
        document = _document(rng)
        if 60 < len(document) < 300:
            documents.append(document)
    for document in documents:
        diff = _diff_of(rng, document)
        damaged = [
            document[:place] + bytes([new]) + document[place + 1 :]
            for place in range(4, len(document) - 1)
            for new in {0, 0xFF, document[place] ^ 1, rng.randrange(256)}
        ]
        assert _made(damaged, [diff] * len(damaged)) == [_expected(one, diff) for one in damaged]


def test_nothing_is_read_past_a_pre_image() -> None:
    rng = random.Random(6)
    guarded = GuardedBuffer(1 << 16)
    for _ in range(300):
        document = _document(rng)
        diff = _diff_of(rng, document)
        cut = document[: rng.randrange(len(document))] if rng.random() < 0.3 else document
        made = transform_batch(entry_of(diff), SETTINGS)
        images = Field(guarded.place(cut), np.zeros(1, np.int64), np.array([len(cut)]))
        after, wrong = after_deltas(made, images)
        image = None if wrong[0] else after.data[after.start[0] : after.end[0]].tobytes()
        assert image == (_expected(cut, diff) if cut else b"")


@pytest.mark.parametrize("fields", [10, 1_000, 1_100, 20_000])
def test_many_fields(fields: int) -> None:
    """The table of a delta's parts is limited; beyond it ``apply_diff`` takes over."""
    names = [b"f%d" % number for number in range(fields)]
    one, two = (rb.encode_int32(number) for number in (1, 2))
    document = rb.encode_document(*(rb.encode_element(rb.INT32, name, one) for name in names))
    changed = rb.encode_document(*(rb.encode_element(rb.INT32, name, two) for name in reversed(names)))
    diff = rb.encode_document(random_entries.document(b"u", changed))
    assert _made([document], [diff]) == [apply_diff(document, diff)]


@pytest.mark.parametrize("depth", [1, 99, 100, 101, 150])
def test_deep_deltas(depth: int) -> None:
    document, diff = (rb.encode_document(rb.encode_element(rb.INT32, b"x", rb.encode_int32(n))) for n in (1, 2))
    diff = rb.encode_document(random_entries.document(b"u", diff))
    for _ in range(depth):
        document = rb.encode_document(random_entries.document(b"o", document))
        diff = rb.encode_document(random_entries.document(b"so", diff))
    assert _made([document], [diff]) == [apply_diff(document, diff)]
