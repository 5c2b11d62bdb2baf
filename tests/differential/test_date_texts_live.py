"""Dates out of texts, thousands of them at once, beside a running mongod.

The fuzz had made its texts by writing dates in ten formats. Whatever else the server reads was refused; and where
reading a format accepts more than writing it produces, results were wrong, silently with ``onError``.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import bson
import pymongo
import pytest
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS

from tailrace.core.expression import compile_stages
from tailrace.core.expression.operators.zone_names import ABBREVIATIONS
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tests.differential.date_texts import date_text, text_and_format
from tests.server_in_use import IS_FOR_WINDOWS, LANGUAGE

pytestmark = pytest.mark.mongod

REFUSED = 115
_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)
Pair = tuple[str, str | None]


def expression(text: str, layout: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"dateString": {"$literal": text}, "onError": "no date"}
    return {"$dateFromString": found if layout is None else {**found, "format": {"$literal": layout}}}


def server(uri: str, pairs: list[Pair]) -> list[Any]:
    """What the server reads: milliseconds, or "no date"."""
    found: list[Any] = []
    with pymongo.MongoClient[Any](uri) as client:
        collection = client.get_database("date_texts", codec_options=_OPTIONS)["one"]
        collection.replace_one({"_id": 1}, {}, upsert=True)
        for some in _batches(pairs):
            stages = [{"$replaceWith": {"r": [expression(*pair) for pair in some]}}]
            found += next(iter(collection.aggregate(stages)))["r"]
        client.drop_database("date_texts")
    return [int(one) if isinstance(one, DatetimeMS) else one for one in found]


def _batches(pairs: list[Pair]) -> list[list[Pair]]:
    return [pairs[start : start + 1000] for start in range(0, len(pairs), 1000)]


def ours(text: str, layout: str | None) -> Any:
    try:
        made = compile_stages([bson.encode({"$replaceWith": {"r": expression(text, layout)}})], version=LANGUAGE).apply(
            bson.encode({})
        )
    except TailraceError as error:
        return error.code
    value = bson.decode(made or b"", _OPTIONS)["r"]
    return int(value) if isinstance(value, DatetimeMS) else value


def check(replica_set: ReplicaSet, pairs: list[Pair], *, refused: float) -> None:
    """All results must be equal; at most this share of the texts may be refused by name."""
    mine = [ours(*pair) for pair in pairs]
    wrong = [
        (pair, theirs, own)
        for pair, theirs, own in zip(pairs, server(replica_set.uri, pairs), mine, strict=True)
        if own not in (theirs, REFUSED)
    ]
    assert wrong == []
    assert mine.count(REFUSED) <= refused * len(pairs)


#: What only 4.4 and 5.0 read in this way is refused by name, so more is refused than of later servers.
IS_OLD = LANGUAGE < (6, 0)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_texts_give_the_servers_dates(replica_set: ReplicaSet, seed: int) -> None:
    rng = random.Random(seed)
    check(replica_set, [(date_text(rng), None) for _ in range(1500)], refused=0.15 if IS_OLD else 0.03)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_texts_with_formats_give_the_servers_dates(replica_set: ReplicaSet, seed: int) -> None:
    rng = random.Random(seed)
    check(replica_set, [text_and_format(rng) for _ in range(1500)], refused=0.07 if IS_OLD else 0)


def test_abbreviations_of_zones_mean_what_they_mean_on_the_server(replica_set: ReplicaSet) -> None:
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefgmnpstwz", k=rng.choice((1, 2, 3, 3, 4, 5)))) for _ in range(1500)]
    texts = [f"2020-01-02T03:04:05 {word}" for word in (*ABBREVIATIONS, *words)]
    check(replica_set, [(text, "%Y-%m-%dT%H:%M:%S%z") for text in texts], refused=0)


def test_fractions_of_a_second_of_any_length_give_the_servers_dates(replica_set: ReplicaSet) -> None:
    """4.4 finds no date in nine digits, where we read one. No random text had more than eight."""
    layouts = [
        "2020-01-02T03:04:05.{}",
        "2020-01-02T03:04:05.{}Z",
        "2020/01/02\t03:04:05.{}",
        "20200102\t03:04:05.{}+01:00",
    ]
    digits = ["123456789123"[:size] for size in range(1, 13)]
    check(replica_set, [(one.format(some), None) for one in layouts for some in digits], refused=0.5 if IS_OLD else 0)


#: Texts that people write: of programs, of mail, of logs.
TEXTS = """Thu, 02 Jan 2020 03:04:05 +0000|Thu Jan  2 03:04:05 UTC 2020|Thursday, 02-Jan-20 03:04:05 UTC
02/Jan/2020:03:04:05 +0000|2008:08:07 18:11:31|20080701T22:35:17|2017-W27-2|2017W272|2017.185|2017-185|@1499169362
July 4th, 2017|4 July 2017|Jul-04-2017|4.7.2017|7/4/2017 11:56 AM|17-07-04|1-1-1|July 4, 2017 11:56:02 +02:00
2017-07-04T11:56:02.813Z|2017-07-04 11:56:02 EST|2017-07-04T11|2017-07-04 noon|2017-07-04 +1 day|-2020-01-02
2017-07-04 11:56:02 Europe/Berlin|2017-02-30|2017|July|tomorrow|2nd of January 2020|2017-07-04T11:56:02,5|12020-01-02"""


def test_texts_that_people_write_give_the_servers_dates(replica_set: ReplicaSet) -> None:
    check(replica_set, [(text, None) for text in TEXTS.replace("\n", "|").split("|")], refused=0.1 if IS_OLD else 0)


def test_what_is_null_or_no_string_is_found_in_the_servers_order(replica_set: ReplicaSet) -> None:
    fields = {
        "number": 5,
        "text": "x",
        "null": None,
        "date": "2020-01-02",
        "zoned": "2020-01-02 EST",
        "layout": "%Y-%m-%d",
    }
    document = {"_id": 1, **fields, "bad": "%q", "utc": "UTC", "nowhere": "Nope"}
    wrong = []
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        collection = client.get_database("date_texts", codec_options=_OPTIONS)["two"]
        collection.replace_one({"_id": 1}, document, upsert=True)
        zones = ("GMT", "+0000", "-00", "Etc/UTC", "Zulu", "+01:00", "Europe/London")
        texts = ("2020-01-02 +02:00", "2020-01-02T03:04:05Z", "2020-01-02T03:04:05")
        for date, layout, zone, on_error in itertools.chain(
            itertools.product(
                ("$number", "$null", "$none", "$date", "$zoned"),
                (None, "$null", "$none", "$number", "$bad", "$layout"),
                (None, "$null", "$none", "$number", "$utc", "$nowhere"),
                (None, "failed"),
            ),
            itertools.product(("$zoned", *texts), (None, "%Y-%m-%d %z"), ("$utc", *zones), (None, "failed")),
        ):
            given = {"dateString": date, "format": layout, "timezone": zone, "onError": on_error}
            stages = [
                {"$project": {"_id": 0, "r": {"$dateFromString": {k: v for k, v in given.items() if v is not None}}}}
            ]
            theirs: Any
            try:
                theirs = bson.encode(next(iter(collection.aggregate(stages))))
            except pymongo.errors.OperationFailure as error:
                theirs = error.code
            mine: Any
            try:
                mine = compile_stages([bson.encode(stage) for stage in stages], version=LANGUAGE).apply(
                    bson.encode(document)
                )
            except TailraceError as error:
                mine = error.code
            if mine != theirs:
                wrong.append((given, theirs, mine))
        client.drop_database("date_texts")
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "@9999999999999",
        "@-999999999999999",
        "@" + "9" * 5000,
        "@9223372036854775807",
        "@9223372036854775808",
        "@-9223372036854775808",
        "@-9223372036854775809",
        "@000000000000000000000001",
        "@-000000000000000000000001",
        "+99999999-01-01",
        "-99999-01-01",
        "-9999999-01-01",
        "-99998-01-01",
        "2020-01-01 +9999999 years",
        "2020-01-01 +9999999999999 sec",
        "2020-01-01 +9999999999999 months",
    ],
)
def test_dates_near_the_ends_of_what_64_bits_hold_end_as_on_the_server(replica_set: ReplicaSet, text: str) -> None:
    stages = [{"$replaceWith": {"r": {"$dateFromString": {"dateString": {"$literal": text}}}}}]
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        collection = client.get_database("date_texts", codec_options=_OPTIONS)["three"]
        collection.replace_one({"_id": 1}, {}, upsert=True)
        theirs: Any
        try:
            theirs = next(iter(collection.aggregate(stages)))
        except pymongo.errors.OperationFailure as error:
            theirs = error.code
        client.drop_database("date_texts")
    mine: Any
    try:
        made = compile_stages([bson.encode(stage) for stage in stages], version=LANGUAGE).apply(bson.encode({}))
        mine = bson.decode(made or b"", _OPTIONS)
    except TailraceError as error:
        mine = error.code
    assert mine == theirs or (IS_OLD and mine == REFUSED)


def test_offsets_in_minutes_that_do_not_fit_wrap_around_as_on_the_server(replica_set: ReplicaSet) -> None:
    # A long of Windows has 32 bits: there the digits wrap around elsewhere.
    numbers = ["9" * size for size in (5, 8, 9, *(() if IS_FOR_WINDOWS else (10, 15, 19, 20, 5000)))]
    check(replica_set, [(f"2020-01-01 {sign}{n}", "%Y-%m-%d %Z") for n in numbers for sign in "+-"], refused=0)
