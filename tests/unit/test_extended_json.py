"""JSON columns keep the types that PyMongo's codec loses."""

from __future__ import annotations

import json

import bson
import pytest
from bson import json_util

from tailrace.core import raw_bson
from tailrace.core.event.event_block import EventBlock
from tailrace.lake.spark.reading.columns import EventColumns

OID = bytes(range(12))
POINTER = raw_bson.encode_string("shop.orders") + OID
CASES = [
    (raw_bson.SYMBOL, raw_bson.encode_string("né"), {"$symbol": "né"}),
    (raw_bson.UNDEFINED, b"", {"$undefined": True}),
    (raw_bson.DB_POINTER, POINTER, {"$dbPointer": {"$ref": "shop.orders", "$id": {"$oid": OID.hex()}}}),
]


def column(document: bytes, name: str = "full_document") -> str:
    event = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"fullDocument", document))
    return str(EventColumns([name], "json").batch(EventBlock.of_bson([event])).column(0)[0].as_py())


@pytest.mark.parametrize(("kind", "value", "form"), CASES)
def test_a_type_that_the_codec_loses_is_extended_json_at_any_depth(kind: int, value: bytes, form: object) -> None:
    """They became plain text, null and a DBRef: earlier tests compared JSON columns with the codec itself."""
    leaf = raw_bson.encode_document(raw_bson.encode_element(kind, b"x", value))
    array = raw_bson.encode_document(
        raw_bson.encode_element(kind, b"0", value), raw_bson.encode_element(raw_bson.INT32, b"1", b"\1\0\0\0")
    )
    document = raw_bson.encode_document(
        raw_bson.encode_element(kind, b"a", value),
        raw_bson.encode_element(raw_bson.OBJECT, b"b", leaf),
        raw_bson.encode_element(raw_bson.ARRAY, b"c", array),
        raw_bson.encode_element(raw_bson.STRING, b"d", raw_bson.encode_string("kept")),
    )
    text = column(document)
    assert json.loads(text) == {"a": form, "b": {"x": form}, "c": [form, 1], "d": "kept"}
    assert json_util.loads(text)["d"] == "kept"


def test_other_rare_types_stay_what_json_util_writes() -> None:
    value = {
        "regex": bson.Regex("a", "i"),
        "code": bson.Code("f()", {"n": 1}),
        "ref": bson.DBRef("c", 1),
        "decimal": bson.Decimal128("1E+6000"),
    }
    encoded = bson.encode(value)
    expected = json_util.dumps(bson.decode(encoded), json_options=json_util.RELAXED_JSON_OPTIONS)
    assert column(encoded) == expected


def test_a_scope_of_code_keeps_them_too() -> None:
    scope = raw_bson.encode_document(raw_bson.encode_element(raw_bson.SYMBOL, b"s", raw_bson.encode_string("x")))
    code = raw_bson.encode_string("f()") + scope
    value = raw_bson.encode_int32(4 + len(code)) + code
    document = raw_bson.encode_document(raw_bson.encode_element(raw_bson.CODE_WITH_SCOPE, b"c", value))
    assert json.loads(column(document)) == {"c": {"$code": "f()", "$scope": {"s": {"$symbol": "x"}}}}
