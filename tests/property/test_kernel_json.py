"""The kernel's Extended JSON compared with PyMongo's ``json_util``, and its numbers with Python's ``repr``."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterable

import bson
import numpy as np
import pytest
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import InvalidBSON
from bson.int64 import Int64
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core import raw_bson
from tailrace.core.kernel import Part, encode_json
from tests.amounts import amount
from tests.property import random_values
from tests.property.guard_page import GuardedBuffer
from tests.property.test_kernel_columns import part_of, usual_document

SEED = 20261122
GUARDED = GuardedBuffer(1 << 20)
CODEC: CodecOptions[dict[str, object]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, tz_aware=True, unicode_decode_error_handler="strict"
)


def expected(type_: int, value: bytes) -> str:
    document = raw_bson.encode_document(raw_bson.encode_element(type_, b"", value))
    return json_util.dumps(bson.decode(document, CODEC)[""], json_options=json_util.RELAXED_JSON_OPTIONS)


def written(values: Iterable[bytes], type_: int = raw_bson.OBJECT) -> list[str | None]:
    """What the kernel writes for each value, ``None`` for those that it leaves to plain code."""
    buffer, part = part_of(list(values), type_)
    column = encode_json(buffer, part)
    text = column.text.tobytes().decode("ascii")
    return [text[column.offsets[i] : column.offsets[i + 1]] if column.ok[i] else None for i in range(len(column.ok))]


def check(values: list[bytes], type_: int = raw_bson.OBJECT) -> int:
    """Compare all of them. Returns how many the kernel left to plain code."""
    made = written(values, type_)
    for value, text in zip(values, made, strict=True):
        assert text is None or text == expected(type_, value), value.hex()
    return sum(text is None for text in made)


def test_usual_documents_are_written_as_json_util_writes_them() -> None:
    rng = random.Random(SEED)
    documents = [bson.encode(usual_document(rng)) for _ in range(amount(600, 3000))]
    assert check(documents) < len(documents) // 10, "nearly all usual documents are the kernel's"


def test_documents_of_all_types_are_written_alike_or_left() -> None:
    rng = random.Random(SEED)
    count = amount(800, 5000)
    assert check([random_values.document(rng) for _ in range(count)]) < 0.8 * count


def doubles(rng: random.Random) -> list[float]:
    count = amount(2_000, 20_000)
    found = [rng.random() for _ in range(count)]
    found += [round(rng.random() * 10 ** rng.randint(0, 9), rng.randint(0, 4)) for _ in range(count)]
    found += [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(2 * count)]
    for exponent in range(-1074, 1024):
        power = math.ldexp(1.0, exponent)
        found += [power, math.nextafter(power, 0.0), math.nextafter(power, math.inf)]
    for exponent in range(-323, 309):
        found += [float(f"{digits}e{exponent}") for digits in ("1", "1.5", "1.2345", "5", "9.99")]
    found += [1e15, 1e16, 1e17, 123456789012345680.0, 9007199254740993.0, 5e-324, 1.7976931348623157e308, 0.0]
    return found + [-value for value in found]


def test_a_double_is_written_by_its_shortest_decimal_as_repr_does() -> None:
    values = [struct.pack("<d", value) for value in doubles(random.Random(SEED))]
    assert check(values, raw_bson.DOUBLE) == 0


def test_doubles_that_json_has_no_number_for_are_objects() -> None:
    values = [math.inf, -math.inf, math.nan, -math.nan]
    assert check([struct.pack("<d", value) for value in values], raw_bson.DOUBLE) == 0


@pytest.mark.parametrize("type_", [raw_bson.INT64, raw_bson.DATE, raw_bson.TIMESTAMP])
def test_numbers_of_eight_bytes_at_every_size(type_: int) -> None:
    rng = random.Random(SEED)
    numbers = [sign * (1 << bit) + step for bit in range(63) for sign in (1, -1) for step in (-1, 0, 1)]
    numbers += [10**digits + step for digits in range(19) for step in (-1, 0)]
    # Dates on both sides of 1970, of the year 10000, of leap days and of ends of centuries.
    numbers += [day * 86_400_000 + step for day in range(-800, 2_932_900, amount(997, 97)) for step in (-1, 0, 1, 999)]
    numbers += [rng.randrange(253402300800000) for _ in range(amount(1_000, 5_000))]
    values = [number.to_bytes(8, "little", signed=True) for number in numbers if number < 2**63]
    assert check(values, type_) <= 1


def test_decimals_are_written_alike_or_left() -> None:
    rng = random.Random(SEED)
    decimals = [random_values.decimal(rng)[1] for _ in range(amount(1000, 5000))]
    for _ in range(amount(1000, 5000)):
        digits = "".join(rng.choices("0123456789", k=rng.randint(1, 19)))
        decimals.append(bson.Decimal128(f"{rng.choice(('', '-'))}{digits}E-{rng.randrange(20)}").bid)
    plain = [bson.Decimal128(text).bid for text in ("0", "-0", "0.00", "-0.00", "1.10", "-999999999", "12.34", "0.05")]
    assert check(decimals, raw_bson.DECIMAL128) < len(decimals)
    assert check(plain, raw_bson.DECIMAL128) == 0


def test_binaries_of_every_size_and_subtype() -> None:
    rng = random.Random(SEED)
    values = [
        bson.encode({"": bson.Binary(rng.randbytes(size), kind)}) for size in range(40) for kind in (0, 2, 4, 5, 255)
    ]
    assert check(values) == 0


@settings(max_examples=amount(80, 400), deadline=None)
@given(st.lists(st.text(max_size=30), max_size=4))
def test_text_is_escaped_as_json_dumps_does(texts: list[str]) -> None:
    documents = [bson.encode({"t": text, text.replace("\0", ""): 1}) for text in texts if text.replace("\0", "") != "t"]
    assert check(documents) == sum(text.replace("\0", "") == "$ref" for text in texts)


def test_every_character_of_the_first_planes_is_escaped_as_json_dumps_does() -> None:
    characters = [chr(code) for code in [*range(0x3000), *range(0xF000, 0x10400)] if not 0xD800 <= code < 0xE000]
    documents = [bson.encode({"t": f"1234567{one}1234567"}) for one in characters]
    assert check(documents) == 0


def test_a_name_that_occurs_twice_is_left_but_not_one_that_occurs_in_two_documents() -> None:
    twice = raw_bson.encode_document(
        raw_bson.encode_element(raw_bson.NULL, b"a", b"") + raw_bson.encode_element(raw_bson.NULL, b"a", b"")
    )
    nested = bson.encode({"a": {"a": [{"a": 1}, {"a": 2}]}, "b": {"a": {}}})
    assert written([twice, nested, twice, nested]) == [None, expected(raw_bson.OBJECT, nested)] * 2


def test_wide_and_deep_documents_are_written_or_left_and_leave_no_trace_in_the_next() -> None:
    wide = bson.encode({f"field{i}": i for i in range(2_900)})
    too_wide = bson.encode({f"field{i}": i for i in range(3_001)})
    deep: dict[str, object] = {}
    for _ in range(99):
        deep = {"d": deep}
    small = bson.encode({"field1": 1})
    made = written([wide, too_wide, small, bson.encode(deep), bson.encode({"d": {"d": deep}}), small])
    assert [text is None for text in made] == [False, True, False, False, True, False]
    assert made[0] == expected(raw_bson.OBJECT, wide)


def test_single_values_and_absent_ones_have_their_places() -> None:
    values = [
        (raw_bson.INT32, raw_bson.encode_int32(-5), "-5"),
        (0, b"", ""),
        (raw_bson.NULL, b"", "null"),
        (raw_bson.STRING, raw_bson.encode_string("né"), '"n\\u00e9"'),
        (raw_bson.ARRAY, bson.encode({"0": 1, "1": "x"}), '[1, "x"]'),
        (raw_bson.REGEX, b"a\0i\0", None),
        (raw_bson.ARRAY, bson.encode({}), "[]"),
    ]
    offsets = np.cumsum([0] + [len(data) for _, data, _ in values])
    part = Part(offsets[:-1], offsets[1:], np.array([type_ for type_, _, _ in values]))
    column = encode_json(b"".join(data for _, data, _ in values), part)
    text = column.text.tobytes().decode()
    got = [text[column.offsets[i] : column.offsets[i + 1]] if column.ok[i] else None for i in range(len(values))]
    assert got == [wanted for _, _, wanted in values]


def test_the_densest_growth_of_a_document_stays_inside_its_room() -> None:
    names = [bytes([1 + i % 31]) for i in range(31)]
    tight = raw_bson.encode_document(b"".join(raw_bson.encode_element(0xFF, name, b"") for name in names))
    arrays = bson.encode({"a": [bson.MinKey()] * 5_000, "b": [bson.Timestamp(2**32 - 1, 2**32 - 1)] * 50})
    assert check([tight, arrays] * 3) == 0


def test_a_damaged_document_is_written_as_json_util_does_or_left() -> None:
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
        column = encode_json(view, whole)
        if column.ok[0]:
            try:
                assert column.text.tobytes().decode() == expected(raw_bson.OBJECT, document)
            except InvalidBSON:
                pytest.fail(f"PyMongo refuses {document.hex()}")
