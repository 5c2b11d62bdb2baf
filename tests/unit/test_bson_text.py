"""Values of every type in the server's messages, recorded from 6.0.27: as messages about tokens write them, and as
those that print BSON do.

``test_cursor_live.py`` compares whole messages. It had only numbers, strings, objects and null in them.
"""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.datetime_ms import DatetimeMS
from bson.int64 import Int64

from tailrace.core.event.bson_text import document_text, spaced_document_text

_TEXTS: list[tuple[Any, str, str]] = [
    (float("nan"), "nan", "nan.0"),
    (float("-inf"), "-inf", "-inf.0"),
    (1 / 3, "0.333333", "0.3333333333333333"),
    (1.0, "1", "1.0"),
    (123456789.125, "1.23457e+08", "123456789.125"),
    (1e-5, "1e-05", "1e-05.0"),
    (1e21, "1e+21", "1e+21.0"),
    (1.7976931348623157e308, "1.79769e+308", "1.797693134862316e+308"),
    (Int64(5), "5", "5"),
    (bson.Decimal128("1.50"), "1.50", "1.50"),
    (None, "null", "null"),
    (True, "true", "true"),
    (bson.ObjectId("0" * 24), "000000000000000000000000", "ObjectId('000000000000000000000000')"),
    (DatetimeMS(1577934245678), "2020-01-02T03:04:05.678Z", "new Date(1577934245678)"),
    (DatetimeMS(-1), "1969-12-31T23:59:59.999Z", "new Date(-1)"),
    (DatetimeMS(-62135596800001), "0000-12-31T23:59:59.999Z", "new Date(-62135596800001)"),
    (DatetimeMS(253402300799999), "9999-12-31T23:59:59.999Z", "new Date(253402300799999)"),
    (DatetimeMS(253402300800000), "illegal date", "new Date(253402300800000)"),
    (bson.Timestamp(5, 6), "Timestamp(5, 6)", "Timestamp(5, 6)"),
    (bson.Regex("a/b", "im"), "/a/b/im", "/a/b/im"),
    (bson.Code("x"), 'Code("x")', "x"),
    (bson.Code("x", {"a": 1}), 'CodeWScope("x", { a: 1 })', "CodeWScope( x, { a: 1 })"),
    (bson.MinKey(), "MinKey", "MinKey"),
    (bson.MaxKey(), "MaxKey", "MaxKey"),
    (bson.Binary(b"abc", 0), 'BinData(0, "616263")', "BinData(0, 616263)"),
    (bson.Binary(bytes(2), 4), 'BinData(4, "0000")', "BinData(4, 0000)"),
    ([1, "x"], '[1, "x"]', '[ 1, "x" ]'),
    ({"a": [1, {}]}, "{a: [1, {}]}", "{ a: [ 1, {} ] }"),
    ([], "[]", "[]"),
]


@pytest.mark.parametrize(("value", "text", "spaced"), _TEXTS, ids=[case[2][:30] for case in _TEXTS])
def test_a_value_reads_as_on_the_server(value: Any, text: str, spaced: str) -> None:
    document = bson.encode({"a": value})
    assert document_text(document) == f"{{a: {text}}}"
    assert spaced_document_text(document) == f"{{ a: {spaced} }}"
