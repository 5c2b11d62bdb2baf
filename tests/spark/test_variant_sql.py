"""VARIANT as Spark's own engine reads it."""

from __future__ import annotations

import datetime
import struct
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp
from pyspark.sql import DataFrame, SparkSession

from tailrace.core import raw_bson as rb

pytestmark = pytest.mark.spark

DOCUMENT: dict[str, Any] = {
    "a": {"b": "x", "": "empty name"},
    "i": 5,
    "l": Int64(2**62),
    "d": 1.5,
    "nan": float("nan"),
    "inf": float("-inf"),
    "dec": Decimal128("1.10"),
    "thousand": Decimal128("-1E+3"),
    "digits34": Decimal128("1234567890123456789012345678901234"),
    "zero": Decimal128("-0.00"),
    "toobig": Decimal128("1E+40"),
    "decnan": Decimal128("NaN"),
    "t": datetime.datetime(2024, 5, 1, 12, 0, 0, 123000),
    "last": DatetimeMS(253402300799999),
    "later": DatetimeMS(253402300800000),
    "bin": b"\x01\x02",
    "uuid": Binary(uuid.UUID(int=5).bytes, 4),
    "oid": ObjectId("65f000000000000000000001"),
    "md5": Binary(b"zz", 5),
    "re": Regex("^a", "i"),
    "ts": Timestamp(2**32 - 1, 6),
    "min": MinKey(),
    "max": MaxKey(),
    "code": Code("f()"),
    "scoped": Code("g()", {"q": 1}),
    "null": None,
    "yes": True,
    "arr": [1, [2, {"x": [3]}]],
}


def to_variants(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Events with a ``fullDocument`` each, through the source's own columns."""
    from tailrace.core.event.event_block import EventBlock
    from tailrace.lake.spark.reading.columns import EventColumns

    columns = EventColumns(("full_document",), "variant")
    for batch in batches:
        yield columns.batch(EventBlock.of_bson(batch.column(0).to_pylist()))


def variants(spark: SparkSession, *documents: bytes) -> DataFrame:
    events = [
        (bytearray(rb.encode_document(rb.encode_element(rb.OBJECT, b"fullDocument", document))),)
        for document in documents
    ]
    frame = spark.createDataFrame(events, "event binary").coalesce(1)
    return frame.mapInArrow(to_variants, "v variant")


def test_paths_and_casts_find_every_type(spark: SparkSession) -> None:
    expected = {
        "v:a.b::string": "x",
        "v:i::int": 5,
        "v:l::bigint": 2**62,
        "v:d::double": 1.5,
        "v:inf::double": float("-inf"),
        "isnan(v:nan::double)": True,
        "v:dec::decimal(10,2)": Decimal("1.10"),
        "v:thousand::decimal(10,0)": Decimal(-1000),
        "v:digits34::decimal(38,0)": Decimal("1234567890123456789012345678901234"),
        "v:zero::decimal(4,2)": Decimal("0.00"),
        "v:toobig['$numberDecimal']::string": "1E+40",
        "v:decnan['$numberDecimal']::string": "NaN",
        "v:t::timestamp = timestamp'2024-05-01 12:00:00.123'": True,
        "v:last::timestamp = timestamp'9999-12-31 23:59:59.999'": True,
        # Collecting a row with a timestamp of that year in Python failed.
        "v:later['$date']['$numberLong']::string": "253402300800000",
        "v:bin::binary": b"\x01\x02",
        "v:uuid::string": "00000000-0000-0000-0000-000000000005",
        "v:oid::string": "65f000000000000000000001",
        "v:md5['$binary'].subType::string": "05",
        "v:re['$regularExpression'].pattern::string": "^a",
        "v:ts['$timestamp'].t::bigint": 2**32 - 1,
        "v:min['$minKey']::int": 1,
        "v:max['$maxKey']::int": 1,
        "v:code['$code']::string": "f()",
        "v:scoped['$scope'].q::int": 1,
        "is_variant_null(v:null)": True,
        "v:absent is null": True,
        "v:yes::boolean": True,
        "v:arr[1][1].x[0]::int": 3,
    }
    row = variants(spark, bson.encode(DOCUMENT)).selectExpr(*expected).collect()[0]
    assert dict(zip(expected, row, strict=True)) == expected


def test_the_schema_and_the_text_of_a_variant_are_what_the_document_is(spark: SparkSession) -> None:
    frame = variants(spark, bson.encode(DOCUMENT))
    schema, text = frame.selectExpr("schema_of_variant(v)", "to_json(v)").collect()[0]
    for field in (
        "a: OBJECT<``: STRING, b: STRING>",
        "l: BIGINT",
        "digits34: DECIMAL(34,0)",
        "t: TIMESTAMP",
        "bin: BINARY",
    ):
        assert field in schema
    assert '"a":{"":"empty name","b":"x"}' in text
    assert '"null":null' in text


def test_wide_objects_are_searched_in_the_order_of_java_strings(spark: SparkSession) -> None:
    # Spark bisects objects of 32 fields and more. UTF-16 order differs from that of code points beyond U+FFFF.
    names = [f"{head}{number}" for number in range(100) for head in ("k", "\ue000", "\U0001f600", "é")]
    document = {name: index for index, name in enumerate(names)}
    row = variants(spark, bson.encode(document)).selectExpr(*(f"""variant_get(v, '$["{n}"]', 'int')""" for n in names))
    assert list(row.collect()[0]) == list(range(len(names)))


def test_large_arrays_and_deep_documents_are_read(spark: SparkSession) -> None:
    deep: dict[str, Any] = {}
    for _ in range(98):
        deep = {"n": deep}
    frame = variants(spark, bson.encode({"a": list(range(70_000))}), bson.encode(deep), bson.encode({}))
    rows = frame.selectExpr("v:a[69999]::int", "length(to_json(v))").collect()
    assert rows[0][0] == 69_999
    assert rows[1][1] == len('{"n":') * 98 + len("{}") + 98
    assert rows[2][1] == len("{}")


def test_of_two_fields_with_one_name_the_last_is_seen_and_bad_text_is_replaced(spark: SparkSession) -> None:
    twice = rb.encode_document(
        *(rb.encode_element(rb.DOUBLE, b"x", struct.pack("<d", number)) for number in (1.0, 2.0)),
        rb.encode_element(rb.STRING, b"bad", rb.encode_string(b"\xff")),
    )
    row = variants(spark, twice).selectExpr("v:x::double", "v:bad::string").collect()[0]
    assert tuple(row) == (2.0, "\N{REPLACEMENT CHARACTER}")
