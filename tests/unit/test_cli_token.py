"""``tailrace token``, from its arguments to what it prints."""

from __future__ import annotations

import argparse
import json

import bson
import pytest

from tailrace.cli import token as command
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError

DATA = "826B00D256000000022B022C0100296E5A100497135FD0A6444263ADD9BA9780AE0A51461E5F6964002B020004"


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["token", *arguments])
    code: int = args.run(args)
    return code


def test_decode_prints_the_parts_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("decode", DATA.lower()) == 0
    printed = capsys.readouterr().out
    for words in ("Timestamp(1795215958, 2)", "2026-11-20T23:05:58Z", "97135fd0-a644-4263-add9-ba9780ae0a51"):
        assert words in printed


def test_decode_reads_a_whole_token_document_with_its_type_bits(capsys: pytest.CaptureFixture[str]) -> None:
    token = ResumeToken(ClusterTime.of(9, 1), uuid=bytes(16), event_identifier=bson.encode({"_id": 5.5}))
    document = {"_data": token.data, "_typeBits": {"$binary": {"base64": "QA==", "subType": "00"}}}
    assert run("decode", "--format", "json", json.dumps(document)) == 0
    parts = json.loads(capsys.readouterr().out)
    assert parts["eventIdentifier"] == {"_id": {"$numberDouble": "5.5"}}
    assert parts["tokenType"] == "event"
    assert parts["clusterTime"] == {"t": 9, "i": 1}


@pytest.mark.parametrize(
    ("arguments", "cluster_time", "version"),
    [
        (("--time", "2026-11-21T10:00:00Z"), ClusterTime.of(1795255200, 0), 1),
        (("--time", "2026-11-21T12:00:00+02:00"), ClusterTime.of(1795255200, 0), 1),
        (("--timestamp", "1795255200,7", "--version", "2"), ClusterTime.of(1795255200, 7), 2),
    ],
)
def test_encode_makes_a_high_water_mark(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], cluster_time: ClusterTime, version: int
) -> None:
    assert run("encode", *arguments) == 0
    token = ResumeToken.parse(json.loads(capsys.readouterr().out))
    assert token == ResumeToken.high_water_mark(cluster_time, version)


@pytest.mark.parametrize(
    "arguments",
    [
        ("decode", "zz"),
        ("decode", "{"),
        ("decode", '{"_data": {"$numberDecimal": "x"}}'),
        ("decode", '{"a": 1}'),
        ("decode", "82"),
        ("decode", '{"_data": ' + "[" * 20_000),  # too deep for the JSON parser: only flat documents were tried before
        ("encode", "--time", "yesterday"),
        ("encode", "--time", "1901-01-01"),
        ("encode", "--timestamp", "1,x"),
        ("encode", "--timestamp", "1,4294967296"),
    ],
)
def test_bad_arguments_end_in_a_named_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(TailraceError):
        run(*arguments)
