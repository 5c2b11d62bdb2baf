"""Regular expressions without a server: the limits work, and what PCRE2 cannot express is refused by name.

That a search ends was tested with one short pattern, for which the former library checked its clock. For a long row of
letters it did not, and every test took its patterns from a short list of ones that were known to work.
"""

from __future__ import annotations

import random
from typing import Any

import bson
import pytest

from tailrace.core.expression import compile_stages
from tailrace.errors import ServerError, TailraceError, UsageError
from tests.amounts import amount
from tests.differential import expression_patterns


def found(pattern: str, text: str | bytes, options: str = "") -> bool:
    stage = {"$match": {"s": {"$regex": pattern, "$options": options}}}
    return compile_stages([bson.encode(stage)]).apply(document(text)) is not None


def document(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    body = b"\x02s\x00" + (len(data) + 1).to_bytes(4, "little") + data + b"\x00"
    return (len(body) + 5).to_bytes(4, "little") + body + b"\x00"


def computed(operator: str, pattern: str, text: str | bytes) -> Any:
    stage = {"$project": {"r": {operator: {"input": "$s", "regex": pattern}}}}
    out = compile_stages([bson.encode(stage)]).apply(document(text))
    assert out is not None
    return bson.decode(out)["r"]


RUNAWAYS = [
    ("(a+)+$", "a" * 60 + "b"),
    ("(a|aa)+$", "a" * 60 + "b"),
    (r"(\w+\s?)*$", "ab " * 40 + "!"),
    ("^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 60),
    (".*.*.*.*.*x[yz]$", "ax" * 2000),
    ("(x?){60}x{60}[ab]", "x" * 70 + "c"),
    ("(?:a|b)*$", "ab" * 5000 + "c"),
    ("((a)|b)*[xy]", "ab" * 200_000),
    ("^(a|b(?1))*[xy]", "b" * 9000),
]


@pytest.mark.parametrize(("pattern", "text"), RUNAWAYS)
def test_a_search_that_runs_away_finds_nothing_in_a_query_and_is_an_error_in_an_expression(
    pattern: str, text: str
) -> None:
    assert not found(pattern, text)
    for operator in ("$regexMatch", "$regexFind", "$regexFindAll"):
        with pytest.raises(ServerError) as raised:
            computed(operator, pattern, text)
        assert raised.value.code == 51156
        assert "stage 0 of the pipeline, $project" in str(raised.value)


def test_a_long_plain_pattern_is_searched_in_a_long_text() -> None:
    text = "c" * 50_000 + "d" * 50_000
    assert found("c" * 4000, text)
    assert found("c" * 4000 + "d", text)
    assert not found("c" * 4000 + "e", text)
    assert not found("d" * 4000 + "c+", text)


@pytest.mark.parametrize("data", [b"a\xffb", b"a\xc3", b"\xed\xa0\x80a", b"a\xf4\x90\x80\x80"])
def test_bytes_that_are_no_text_match_nothing_and_are_an_error_in_an_expression(data: bytes) -> None:
    for pattern in ("a", "^a|b", "(?i)A"):
        assert not found(pattern, data)
        with pytest.raises(ServerError) as raised:
            computed("$regexMatch", pattern, data)
        assert raised.value.code == 51156


def test_a_nul_in_the_input_is_a_letter() -> None:
    assert found(r"a\x00b", b"a\x00b")
    assert found("a.b$", b"a\x00b")
    assert found("b", b"a\x00b")


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"s": {"$regex": "a\0b"}}, 2),
        ({"$jsonSchema": {"properties": {"s": {"pattern": "a\0b"}}}}, 2),
        ({"$jsonSchema": {"patternProperties": {"(": {}}}}, 2),
        ({"s": {"$regex": "a", "$options": "i\0"}}, 51108),
        ({"s": {"$regex": "(?x)a # the end is in the comment"}}, 51091),
        ({"s": {"$regex": "a" * 32_762}}, 51091),
        ({"s": {"$regex": "(" * 250 + ")" * 250}}, 51091),
    ],
)
def test_a_query_s_pattern_is_checked_when_the_stream_is_opened(query: dict[str, Any], code: int) -> None:
    """A NUL was passed into the regular expression that is sent to the server, which was cut off there."""
    with pytest.raises(UsageError) as raised:
        compile_stages([bson.encode({"$match": query})])
    assert raised.value.code == code


@pytest.mark.parametrize("pattern", ["a" * 32_761, "(" * 249 + ")" * 249, "(?x)a # here it ends\n"])
def test_the_longest_and_deepest_patterns_of_a_query_are_taken(pattern: str) -> None:
    compile_stages([bson.encode({"$match": {"s": {"$regex": pattern}}})])


@pytest.mark.parametrize(
    "pattern",
    [r"\C", r"(?=a\Kb)", "(?X)a", r"(?i)[\p{Lu}]", r"(?<=(?1))b(a)", r"(?<=\X{2})a", "(?=(*SKIP:m)a)"],
)
def test_what_cannot_be_said_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not supported") as raised:
        compile_stages([bson.encode({"$match": {"s": {"$regex": pattern}}})])
    assert raised.value.code == 115


def test_no_random_pattern_gives_a_foreign_error() -> None:
    rng = random.Random(7)
    for _ in range(amount(600, 3000)):
        text = expression_patterns.pattern(rng)
        cut = text[: rng.randrange(len(text) + 1)]
        for pattern in (text, cut, text + cut):
            try:
                computed("$regexFindAll", pattern.lstrip("$"), expression_patterns.subject(rng))
            except TailraceError as error:
                assert error.code in (51111, 51156, 115), pattern  # noqa: PT017
