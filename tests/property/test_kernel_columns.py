"""The kernel's columns compared with plain Python: VARIANT byte for byte, parts, text; and no memory is overrun."""

from __future__ import annotations

import random

import bson
import numpy as np
import pytest
from bson.int64 import Int64
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core import raw_bson
from tailrace.core.kernel import Part, encode_variants, gather, is_utf8, locate
from tailrace.errors import OplogFormatError, UsageError
from tailrace.lake.spark.reading import variant
from tests.amounts import amount
from tests.property import random_values
from tests.property.guard_page import GuardedBuffer

SEED = 20240502
GUARDED = GuardedBuffer(1 << 20)


def usual_value(rng: random.Random, depth: int) -> object:
    """A value of the types that the kernel encodes itself."""
    kind = rng.randrange(14 if depth < 4 else 11)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.randrange(-(2**31), 2**31)
    if kind == 3:
        return Int64(random_values.integer(rng))
    if kind == 4 and rng.random() < 0.5:
        digits = "".join(rng.choices("0123456789", k=rng.choice((1, 2, 8, 9, 10, 17, 18, 19))))
        return bson.Decimal128(f"{rng.choice(('', '-'))}{digits}E-{rng.choice((0, 0, 2, 9, 10, 18, 19, 38))}")
    if kind == 4:
        return rng.random() * 10 ** rng.randint(-5, 9)
    if kind in (5, 6):
        return "x" * rng.choice((0, 1, 62, 63, 64, 65, 300))
    if kind == 7:
        return "é中\U0001f600"[: rng.randrange(4)]
    if kind == 8:
        return bson.ObjectId(rng.randbytes(12))
    if kind == 9:
        return bson.Binary(rng.randbytes(16), 4)
    if kind == 10:
        return bson.Binary(rng.randbytes(rng.randrange(300)), rng.choice((0, 2)))
    if kind == 11:
        count = rng.choice((0, 1, 3, 255, 256, 300)) if rng.random() < 0.1 else rng.randrange(4)
        return [usual_value(rng, depth + 1) for _ in range(count)]
    return usual_document(rng, depth + 1)


def usual_document(rng: random.Random, depth: int = 0) -> dict[str, object]:
    def name() -> str:
        return "".join(rng.choice("abAB_$0.") for _ in range(rng.choice((0, 1, 1, 2, 3, 7, 8, 9, 12, 20))))

    count = rng.choice((30, 150, 260)) if rng.random() < 0.01 else rng.randrange(9)
    return {name(): usual_value(rng, depth) for _ in range(count)}


def part_of(documents: list[bytes], type_: int = raw_bson.OBJECT) -> tuple[bytes, Part]:
    offsets = np.cumsum([0] + [len(document) for document in documents])
    return b"".join(documents), Part(offsets[:-1], offsets[1:], np.full(len(documents), type_, np.int64))


def encoded(documents: list[bytes]) -> list[variant.Variant | None]:
    """What the kernel makes of each document, ``None`` for those that it leaves to plain code."""
    buffer, part = part_of(documents)
    column = encode_variants(buffer, part)
    return [
        (
            column.value[column.value_offsets[i] : column.value_offsets[i + 1]].tobytes(),
            column.metadata[column.metadata_offsets[i] : column.metadata_offsets[i + 1]].tobytes(),
        )
        if column.ok[i]
        else None
        for i in range(len(documents))
    ]


def test_usual_documents_become_the_variants_of_the_plain_encoder_byte_for_byte() -> None:
    rng = random.Random(SEED)
    documents = [bson.encode(usual_document(rng)) for _ in range(amount(600, 3000))]
    made = encoded(documents)
    for document, got in zip(documents, made, strict=True):
        assert got is None or got == variant.from_value(raw_bson.OBJECT, document)
    assert sum(got is None for got in made) < 0.05 * len(made), "nearly all usual documents are the kernel's"


def test_documents_of_all_types_are_encoded_alike_or_left_to_the_plain_encoder() -> None:
    rng = random.Random(SEED)
    documents = [random_values.document(rng) for _ in range(amount(1500, 5000))]
    made = encoded(documents)
    for document, got in zip(documents, made, strict=True):
        assert got is None or got == variant.from_value(raw_bson.OBJECT, document)
    assert sum(got is not None for got in made) > 0.1 * len(made)


def test_decimals_are_encoded_alike_or_left_to_the_plain_encoder() -> None:
    rng = random.Random(SEED)
    decimals = [random_values.decimal(rng)[1] for _ in range(5000)]
    decimals += [bson.Decimal128(text).bid for text in ("0", "-0", "0E-38", "1.10", "-999999999", "1E9", "9" * 18)]
    column = encode_variants(*part_of(decimals, raw_bson.DECIMAL128))
    for i, data in enumerate(decimals):
        if column.ok[i]:
            value = column.value[column.value_offsets[i] : column.value_offsets[i + 1]].tobytes()
            assert value == variant.from_value(raw_bson.DECIMAL128, data)[0], data.hex()
    assert column.ok.sum() > 500
    assert column.ok[-7:].tolist() == [True, True, True, True, True, False, True]


def test_single_values_and_absent_ones_have_their_places() -> None:
    values = [
        (raw_bson.INT32, raw_bson.encode_int32(-5)),
        (0, b""),
        (raw_bson.NULL, b""),
        (raw_bson.STRING, raw_bson.encode_string("né")),
        (raw_bson.ARRAY, bson.encode({"0": 1, "1": "x"})),
        (raw_bson.REGEX, b"a\0i\0"),
        (raw_bson.DATE, raw_bson.encode_int64(2**62)),
    ]
    offsets = np.cumsum([0] + [len(data) for _, data in values])
    part = Part(offsets[:-1], offsets[1:], np.array([type_ for type_, _ in values]))
    column = encode_variants(b"".join(data for _, data in values), part)
    assert column.ok.tolist() == [True, True, True, True, True, False, False]
    for i, (type_, data) in enumerate(values):
        got = (
            column.value[column.value_offsets[i] : column.value_offsets[i + 1]].tobytes(),
            column.metadata[column.metadata_offsets[i] : column.metadata_offsets[i + 1]].tobytes(),
        )
        known = column.ok[i] and type_ != 0
        assert got == (variant.from_value(type_, data) if known else variant.NULL_VARIANT)


def test_a_damaged_document_is_encoded_as_the_plain_encoder_does_or_left_to_it() -> None:
    rng = random.Random(SEED)
    sample = bson.encode(
        {"a": 1, "b": {"c": "text", "d": [1, 2.5, None]}, "e": bson.Binary(b"xyz"), "f": Int64(3), "g": True}
    )
    damaged = [sample[:i] + bytes([new]) + sample[i + 1 :] for i in range(len(sample)) for new in rng.randbytes(24)]
    for document in damaged:
        view = GUARDED.place(document)
        if raw_bson.read_int32(document, 0) != len(document) or document[-1]:
            continue  # locate never gives a part whose outer length is wrong
        whole = Part(np.zeros(1, np.int64), np.array([len(document)]), np.array([raw_bson.OBJECT]))
        column = encode_variants(view, whole)
        if column.ok[0]:
            assert (column.value.tobytes(), column.metadata.tobytes()) == variant.from_value(raw_bson.OBJECT, document)


@settings(max_examples=amount(80, 400), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"a",
                b"bc" * 9,
                "é".encode(),
                "中".encode(),
                b"\xf0\x9f\x98\x80",
                b"\xed\xa0\x80",
                b"\xc0\x80",
                b"\xe0\x80\x80",
                b"\xf4\x90\x80\x80",
                b"\xff",
                b"\xc3",
                b"\x80",
            ]
        )
    )
)
def test_utf8_is_judged_as_python_does(pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    try:
        text.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False
    assert is_utf8(GUARDED.place(text)) is valid


def test_gathered_runs_are_the_slices() -> None:
    rng = random.Random(SEED)
    buffer = rng.randbytes(5000)
    start = np.array([rng.randrange(5000) for _ in range(300)])
    end = np.array([rng.randint(low, 5000) for low in start])
    data, offsets = gather(GUARDED.place(buffer), start, end)
    assert data.tobytes() == b"".join(buffer[low:high] for low, high in zip(start, end, strict=True))
    assert offsets.tolist() == np.cumsum([0, *(end - start)]).tolist()
    with pytest.raises(UsageError):
        gather(buffer, np.array([0]), np.array([5001]))
    with pytest.raises(UsageError):
        gather(buffer, np.array([3]), np.array([2]))


def test_a_damaged_event_is_refused_or_its_parts_lie_inside() -> None:
    rng = random.Random(SEED)
    event = bson.encode(
        {
            "_id": {"_data": "8265", "_typeBits": b"x"},
            "operationType": "insert",
            "clusterTime": bson.Timestamp(5, 6),
            "fullDocument": {"_id": 1, "a": "b"},
            "ns": {"db": "d", "coll": "c"},
            "documentKey": {"_id": 1},
            "lsid": {"id": bson.Binary(bytes(16), 4)},
            "txnNumber": Int64(7),
        }
    )
    damaged = [event[:i] + bytes([new]) + event[i + 1 :] for i in range(len(event)) for new in rng.randbytes(16)]
    refused = 0
    for bad in damaged + [event[:size] for size in range(len(event))]:
        try:
            parts = locate(GUARDED.place(bad), np.array([0, len(bad)]))
        except OplogFormatError:
            refused += 1
            continue
        for name in ("token", "operation_type", "database", "collection", "full_document", "document_key", "session"):
            assert 0 <= parts[name].start[0] <= parts[name].end[0] <= len(bad)
    assert refused > len(event)


def test_a_part_that_no_event_has_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no part 'color'"):
        locate(b"", np.zeros(1, np.int64), ["color"])
    with pytest.raises(OplogFormatError):
        locate(b"\x05\0\0\0\0", np.array([0, 6]))
