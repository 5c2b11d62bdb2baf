"""VARIANT from BSON, read back by PySpark's own reader."""

from __future__ import annotations

import base64
import decimal
import math
import random
import struct
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import bson
import pytest
from bson.decimal128 import Decimal128
from pyspark.sql.types import VariantVal

from tailrace.core import raw_bson as rb
from tailrace.errors import OplogFormatError
from tailrace.lake.spark.reading import variant
from tests.property import random_values

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: What Python's datetime can hold, in milliseconds; VARIANT and the JVM hold more.
PYTHON_DATES = (-62135596800000, 253402300799999)


def text(data: bytes) -> str:
    return data.decode(errors="replace")


def expected(type_: int, raw: bytes) -> Any:
    """The table in ``tailrace.lake.spark.reading.variant``, repeated with Python values."""
    if type_ == rb.OBJECT:
        return {text(e.name): expected(e.type, rb.value(raw, e)) for e in rb.elements(raw)}
    if type_ == rb.ARRAY:
        return [expected(e.type, rb.value(raw, e)) for e in rb.elements(raw)]
    if type_ in (rb.STRING, rb.CODE, rb.SYMBOL):
        string = text(rb.read_string(raw, 0))
        return {rb.STRING: string, rb.CODE: {"$code": string}, rb.SYMBOL: {"$symbol": string}}[type_]
    if type_ == rb.BINARY:
        return expected_binary(raw[4], raw[5:])
    if type_ == rb.DECIMAL128:
        return expected_decimal(Decimal128.from_bid(raw))
    if type_ == rb.REGEX:
        pattern, options, _ = raw.split(b"\0")
        return {"$regularExpression": {"pattern": text(pattern), "options": text(options)}}
    if type_ == rb.DB_POINTER:
        return {"$dbPointer": {"$ref": text(rb.read_string(raw, 0)), "$id": {"$oid": raw[-12:].hex()}}}
    if type_ == rb.CODE_WITH_SCOPE:
        size = rb.read_int32(raw, 4)
        return {"$code": text(rb.read_string(raw, 4)), "$scope": expected(rb.OBJECT, raw[8 + size :])}
    simple = {
        rb.DOUBLE: lambda: struct.unpack("<d", raw)[0],
        rb.INT32: lambda: rb.read_int32(raw, 0),
        rb.INT64: lambda: rb.read_int64(raw, 0),
        rb.BOOL: lambda: raw != b"\0",
        rb.NULL: lambda: None,
        rb.OBJECT_ID: raw.hex,
        rb.DATE: lambda: expected_date(rb.read_int64(raw, 0)),
        rb.TIMESTAMP: lambda: {"$timestamp": dict(zip("it", struct.unpack("<II", raw), strict=True))},
        rb.UNDEFINED: lambda: {"$undefined": True},
        rb.MIN_KEY: lambda: {"$minKey": 1},
        rb.MAX_KEY: lambda: {"$maxKey": 1},
    }
    return simple[type_]()


def expected_binary(subtype: int, data: bytes) -> Any:
    if subtype == 2 and len(data) >= 4:
        data = data[4:]
    if subtype in (0, 2):
        return data
    if subtype == 4 and len(data) == 16:
        return str(UUID(bytes=data))
    return {"$binary": {"base64": base64.b64encode(data).decode(), "subType": f"{subtype:02x}"}}


def expected_date(milliseconds: int) -> Any:
    try:
        return EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:  # a year for which neither Python nor its reader of VARIANT has dates
        return {"$date": {"$numberLong": str(milliseconds)}}


def expected_decimal(number: Decimal128) -> Any:
    value = number.to_decimal()
    if value.is_finite():
        exponent = int(value.as_tuple().exponent)
        if value.is_zero() or (
            exponent >= -38 and len(str(int(abs(value.scaleb(-exponent))))) + max(exponent, 0) <= 38
        ):
            return value
    return {"$numberDecimal": str(number)}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and left == right


def holds_far_date(type_: int, raw: bytes) -> bool:
    if type_ in (rb.OBJECT, rb.ARRAY):
        return any(holds_far_date(e.type, rb.value(raw, e)) for e in rb.elements(raw))
    if type_ == rb.CODE_WITH_SCOPE:
        return holds_far_date(rb.OBJECT, raw[8 + rb.read_int32(raw, 4) :])
    if type_ != rb.DATE:
        return False
    milliseconds = rb.read_int64(raw, 0)
    far = not PYTHON_DATES[0] <= milliseconds <= PYTHON_DATES[1]
    return far and -(2**63) <= milliseconds * 1000 < 2**63


def test_every_bson_value_becomes_what_the_table_says() -> None:
    rng = random.Random(7)
    compared = 0
    with decimal.localcontext(decimal.Context(prec=50)):
        for _ in range(3000):
            type_, raw = random_values.value(rng, depth=rng.randrange(2))
            if holds_far_date(type_, raw):
                continue
            encoded, metadata = variant.from_value(type_, raw)
            got = VariantVal(encoded, metadata).toPython()
            assert same(got, expected(type_, raw)), (type_, raw.hex(), got)
            compared += 1
    assert compared > 2500


def test_integers_keep_their_width() -> None:
    value, _ = variant.from_value(rb.OBJECT, bson.encode({"a": 1, "b": bson.Int64(1)}))
    assert value.endswith(b"\x14\x01\x00\x00\x00" + b"\x18\x01\x00\x00\x00\x00\x00\x00\x00")


def test_of_a_name_that_occurs_twice_the_last_one_counts() -> None:
    parts = [rb.encode_element(rb.INT32, b"a", rb.encode_int32(number)) for number in (1, 2)]
    value, metadata = variant.from_value(rb.OBJECT, rb.encode_document(*parts))
    assert VariantVal(value, metadata).toPython() == {"a": 2}


@pytest.mark.parametrize("count", [255, 256, 257, 70_000])
def test_containers_of_every_size_class_are_read_back(count: int) -> None:
    document = {"array": list(range(count)), "object": {f"k{number}": number for number in range(min(count, 3000))}}
    value, metadata = variant.from_value(rb.OBJECT, bson.encode(document))
    assert VariantVal(value, metadata).toPython() == document


def test_strings_of_every_size_class_are_read_back() -> None:
    for size in (0, 1, 63, 64, 255, 256, 70_000):
        value, metadata = variant.from_value(rb.OBJECT, bson.encode({"s": "é" * size}))
        assert VariantVal(value, metadata).toPython() == {"s": "é" * size}


def test_damaged_bytes_are_an_error_not_a_crash() -> None:
    rng = random.Random(11)
    for _ in range(400):
        raw = bytearray(random_values.document(rng))
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            variant.from_value(rb.OBJECT, bytes(raw))
        except OplogFormatError:
            continue


def test_documents_nested_without_end_are_an_error_not_a_crash() -> None:
    document = rb.EMPTY_DOCUMENT
    for _ in range(2000):
        document = rb.encode_document(rb.encode_element(rb.OBJECT, b"n", document))
    with pytest.raises(OplogFormatError, match="nested"):
        variant.from_value(rb.OBJECT, document)
