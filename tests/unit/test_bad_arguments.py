"""Every command with every kind of file and argument that it cannot use: one sentence, an exit status, no traceback.

Each reader had been tested with the damage that its author thought of; those below ended in tracebacks.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

import tailrace
from tailrace.cli.main import main
from tailrace.cli.stream_arguments import Until
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import OplogFormatError, TailraceError, UsageError
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.store.pipeline_file import load
from tests import commands
from tests.amounts import amount
from tests.bound_root import modes_can_hold, modes_hold

TOKEN = ResumeToken.high_water_mark(ClusterTime.of(5, 6))


def _missing(path: Path) -> None:
    pass


def _unreadable(path: Path) -> None:
    path.write_text("x")
    path.chmod(0)


#: What may stand where a file is expected.
BAD_FILES: dict[str, Callable[[Path], Any]] = {
    "missing": _missing,
    "empty": lambda path: path.write_bytes(b""),
    "directory": lambda path: path.mkdir(),
    "noise": lambda path: path.write_bytes(random.Random(7).randbytes(50_000)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\xfa: [\x00"),
    "zeros": lambda path: path.write_bytes(bytes(10_000)),
    "deep": lambda path: path.write_text("[\n" * 20_000),  # in lines: PyYAML looks for a key in each 1,024 characters
    "long number": lambda path: path.write_text("1" * 20_000),
    "long line": lambda path: path.write_text("x" * 2_000_000),
    "unreadable": _unreadable,
    "a loop": lambda path: path.symlink_to(path),
}
#: The commands, with the position of the file argument.
COMMANDS: dict[str, Sequence[str]] = {
    "run": ("run", "{}"),
    "run --compact": ("run", "{}", "--compact"),
    "run --verify": ("run", "{}", "--verify"),
    "replay": ("replay", "{}"),
    "replay --explain": ("replay", "-", "--explain", "--pipeline", "@{}"),
    "replay --collation": ("replay", "-", "--explain", "--collation", "@{}"),
    "watch": ("watch", "@{}"),
    "watch --pipeline": ("watch", "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=1", "--pipeline", "@{}"),
    "doctor": ("doctor", "@{}"),
    "token": ("token", "decode", "@{}"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_cannot_be_used_is_told_in_one_sentence(
    command: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind == "unreadable" and not modes_can_hold():
        pytest.skip("nothing is unreadable to this user")
    path = tmp_path / "file"
    BAD_FILES[kind](path)
    with modes_hold():
        status = main([part.format(path) for part in COMMANDS[command]])
    said = capfd.readouterr()
    assert ("Permission denied" in said.err) == (kind == "unreadable" and command != "token")  # which reads no file
    assert status == 1
    assert said.out == ""
    assert said.err.startswith("tailrace: ")
    assert len(said.err.splitlines()) == 1
    assert "bug" not in said.err
    assert len(said.err) < 2000


def test_a_dump_that_is_a_pipe_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The dump was opened twice, and the second time waited for ever."""
    os.mkfifo(tmp_path / "oplog.bson")
    assert main(["replay", str(tmp_path / "oplog.bson")]) == 1
    assert "standard input" in capfd.readouterr().err


def test_replay_takes_the_dump_from_standard_input(tmp_path: Path) -> None:
    entry = {"ts": Timestamp(5, 1), "t": Int64(1), "v": Int64(2), "op": "i", "ns": "d.c", "o2": {"_id": 1}}
    entry |= {"ui": Binary(bytes(16), 4), "wall": __import__("datetime").datetime(2026, 1, 1), "o": {"_id": 1}}
    for form in ("json", "bson"):
        command = ["replay", "-", "d.c", "--format", form, "--server-version", "6.0"]
        done = commands.run(*command, input=bson.encode(entry))
        assert (done.returncode, done.stderr) == (0, b"")
        event = json.loads(done.stdout) if form == "json" else bson.decode(done.stdout)
        assert event["documentKey"] == {"_id": 1}
    done = commands.run(*command, input=b"noise")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[\n" * 5000, "nested too deeply"),
        ("a: " + "1" * 5000, "digits"),
        ("source: {uri: 'mongodb://h'}\nlake: {path: a, path: b}", "'path' is given twice"),
        ("source: {uri: 'mongodb://h'}\nlake: {path: a}\nsource: {}", "'source' is given twice"),
    ],
)
def test_yaml_that_python_cannot_hold_or_that_contradicts_itself(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        load(path)


@pytest.mark.parametrize("value", [[], [1, 2], "text", 5, None, {}, {"clusterTime": {"t": 10**400, "i": 1}}, [[[]]]])
def test_an_offset_that_is_none_is_a_usage_error(value: Any) -> None:
    with pytest.raises(UsageError, match="this checkpoint"):
        Offset.from_json(value)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_token_documents_end_in_our_errors(seed: int) -> None:
    """Mutations had left ``_data`` a string: one that became a damaged document was quoted in the message by way of
    PyMongo's decoder, which raised."""
    rng = random.Random(seed)
    wholes = [
        TOKEN.to_bson(),
        bson.encode({"_data": {"a": 1, "b": [1, {"c": "x"}], "d": "82"}, "_typeBits": b"\x01\x02"}),
        bson.encode({"_data": TOKEN.data, "_typeBits": {"x": [1, 2.5, None]}}),
    ]
    refused = 0
    for number in range(rounds := amount(2_000, 10_000)):
        damaged = bytearray(wholes[number % len(wholes)])
        for _ in range(rng.choice((1, 1, 2, 4))):
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 2, 3, 4, 127, 255, rng.randrange(256)))
        try:
            _ = ResumeToken.parse(bytes(damaged)).parts
        except TailraceError as error:
            refused += bool(str(error))
    assert refused > rounds // 2


@pytest.mark.parametrize("cut", [2, 4, 10, 17, -4, -1])
def test_a_piece_of_a_token_says_that_it_is_one(cut: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "decode", TOKEN.data[:cut]]) == 1
    assert "whole _data" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86400)])
def test_an_end_may_be_a_duration(text: str, seconds: int) -> None:
    before = int(time.time())
    end = Until.parse(text, None)
    assert end.events is None
    assert end.time is not None
    assert before + seconds <= end.time.seconds <= int(time.time()) + seconds


@pytest.mark.parametrize("text", ["5 mins", "m", "5w", "-5m", "5m5", "1.5s", "99999999999m"])
def test_an_end_that_is_none_says_what_there_is(text: str) -> None:
    with pytest.raises(UsageError, match=r"--until: .* a duration such as 30s or 5m"):
        Until.parse(text, None)


def test_a_code_that_says_nothing_is_not_shown() -> None:
    error = OplogFormatError("x is damaged", position="byte 5")
    assert str(error) == "x is damaged. At byte 5"
    assert error.code == 8


def test_a_question_is_not_followed_by_a_full_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text("source: {databse: x}")
    assert main(["run", str(tmp_path / "p.yaml")]) == 1
    assert capsys.readouterr().err.endswith("Did you mean 'source.database'?\n")


def test_a_version_that_nobody_knows_is_refused() -> None:
    """Such a version was treated as the newest known one."""
    with pytest.raises(UsageError, match=r"9\.9.*8\.3 is the newest"):
        tailrace.connect("mongodb://h", server_version="9.9")
    assert main(["replay", "-", "--explain", "--server-version", "9.9"]) == 1
    tailrace.connect("mongodb://h", server_version="8.2").close()


def test_the_packages_names_are_those_that_it_exports() -> None:
    assert set(tailrace.__all__) <= set(dir(tailrace))
    assert [name for name in dir(tailrace) if not name.startswith("_")] == sorted(
        name for name in tailrace.__all__ if not name.startswith("_")
    )


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_takes_bold_too(no_color: str, tmp_path: Path) -> None:
    """Only colours were left out, but bold is an escape sequence too."""
    code = (
        "import sys, bson; sys.stdout.isatty = lambda: True\n"
        "from tailrace.cli.event_writer import new_writer\n"
        "new_writer('pretty').write(bson.encode({'operationType': 'drop', 'ns': {'db': 'd', 'coll': 'c'}}))"
    )
    environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "20"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=True, env=environment)
    assert (b"\x1b[" in done.stdout) is (not no_color)


def test_a_drivers_background_failure_is_no_traceback_on_the_terminal() -> None:
    """A member that died caused twenty lines of PyMongo's housekeeping between the events."""
    code = (
        "import logging\n"
        "from tailrace.cli.main import _log_in_sentences\n"
        "_log_in_sentences()\n"
        "try:\n    1 / 0\n"
        "except ZeroDivisionError:\n"
        "    logging.getLogger('pymongo.client').exception('MongoClient background task encountered an error:')\n"
        "    logging.getLogger('tailrace.source').warning('rs0: waiting', exc_info=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == "tailrace: rs0: waiting\n"


def test_an_archive_s_directory_alone_lacks_the_uri(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message said that the directory was missing, which was the only argument given."""
    monkeypatch.delenv("TAILRACE_URI", raising=False)
    assert main(["archive", "kept"]) == 1
    assert capfd.readouterr().err.startswith("tailrace: the connection URI is missing: kept is not one. ")


@pytest.mark.parametrize("command", ["watch", "doctor"])
@pytest.mark.parametrize(("word", "is_namespace"), [("shop.orders", True), ("shop", True), ("localhost:27017", False)])
def test_a_namespace_where_the_uri_was_left_out_is_told(
    command: str, word: str, is_namespace: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message said that it does not begin with mongodb://, which a namespace never does."""
    monkeypatch.delenv("TAILRACE_URI", raising=False)
    assert main([command, word]) == 1
    said = capfd.readouterr().err
    assert ("looks like a database or a collection. Give the URI before it" in said) == is_namespace
    assert ("does not begin with mongodb://" in said) != is_namespace
