"""What versions of the server answer differently, offline. The values were measured on 4.4.2, 5.0.4, 6.0.27 and 7.0.28
(``tests/differential/test_date_texts_live.py``, ``tests/gateway``): quick tests start none of them.
"""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions, DatetimeConversion

from tailrace.core.cursor.get_more import GetMoreCommand
from tailrace.core.cursor.reply import is_resumable
from tailrace.core.expression import compile_stages
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.errors import TailraceError, UsageError

VERSIONS = ((4, 4), (5, 0), (6, 0), (7, 0))
_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
#: Milliseconds, or the code of an error; 115 is ours, for what is refused by name.
DATES: list[tuple[str, dict[str, str], tuple[int, int, int, int]]] = [
    ("12020-01-02", {}, (946814519900, 946814519900, 946814519900, 946814510000)),
    ("-99999-01-01", {}, (115, 241, 241, -3217830796800000)),
    ("-9999999-01-01", {}, (115, 159, 159, 241)),
    ("@9223372036854775808", {}, (159, 159, 159, 241)),
    ("@-1.500000", {}, (115, 115, -1500, -1500)),
    ("2017-07-04T11", {}, (115, 115, 1499166000000, 1499166000000)),
    ("2020-01-02T03:04:05+010000", {}, (115, 115, 1577930645000, 1577930645000)),
    ("2038-025", {}, (115, 115, 2147990400000, 2147990400000)),
    ("2020-01-02T03:04:05.123456789Z", {}, (115, 1577934245123, 1577934245123, 1577934245123)),
    ("2020-01-02 EST", {"timezone": "UTC"}, (241, 241, 241, 1577941200000)),
    ("2020-01-02 EST", {"timezone": "GMT"}, (241, 241, 241, 241)),
    ("2020-01-02 EST", {"timezone": "+00:00"}, (1577941200000,) * 4),
    ("2020-01-02 Z:", {"format": "%Y-%m-%d %z:"}, (115, 115, 1577923200000, 1577923200000)),
]


def _date(text: str, more: dict[str, str], version: tuple[int, int]) -> int:
    given = {"dateString": {"$literal": text}, **more}
    try:
        made = compile_stages([bson.encode({"$replaceWith": {"r": {"$dateFromString": given}}})], version=version)
        return int(bson.decode(made.apply(bson.encode({})) or b"", _OPTIONS)["r"])
    except TailraceError as error:
        return error.code or -1


@pytest.mark.parametrize(("text", "more", "expected"), DATES)
def test_dates_are_read_as_each_version_reads_them(
    text: str, more: dict[str, str], expected: tuple[int, int, int, int]
) -> None:
    assert tuple(_date(text, more, version) for version in VERSIONS) == expected


def test_a_string_may_have_125_megabytes_in_the_making_from_7_0_on() -> None:
    document = bson.encode({"a": "x" * (8 << 20)})
    stages = [bson.encode({"$project": {"n": {"$concat": ["$a"] * 9}}})]
    codes = []
    for version in VERSIONS:
        with pytest.raises(TailraceError) as raised:
            compile_stages(stages, version=version).apply(document)
        codes.append(raised.value.code)
    assert codes == [13548, 13548, 13548, 16493]


def test_codes_limits_and_tokens_are_those_of_the_version() -> None:
    assert [is_resumable(63, version) for version in VERSIONS] == [True, True, True, False]
    assert [is_resumable(134, version) for version in VERSIONS] == [False, False, True, True]
    command = bson.encode({"getMore": bson.Int64(1), "collection": "c", "maxTimeMS": -1})
    said = []
    for version in VERSIONS:
        with pytest.raises(UsageError) as raised:
            GetMoreCommand.parse("shop", command, version)
        said.append(raised.value.message)
    assert said == [
        "maxTimeMS is out of range",
        "-1 value for maxTimeMS is out of range",
        "-1 value for maxTimeMS is out of range",
        "-1 value for maxTimeMS is out of range [0, 2147483647]",
    ]
    for asked, versions in ((None, [1, 2]), (False, [1, 1]), (True, [2, 2])):
        options = StreamOptions.parse(Scope.parse("shop.c"), generate_v2_tokens=asked)
        plans = [build_plan(options, profile_for(version)) for version in ("6.0.27", "7.0.28")]
        assert [plan.token_version for plan in plans] == versions
