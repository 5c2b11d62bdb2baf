"""What reaches a terminal: names, messages and documents with control characters; standard streams that are missing,
full, or not read."""

from __future__ import annotations

import datetime
import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cli import main as main_module
from tailrace.cli.doctor import _print
from tailrace.cli.finding import Finding
from tailrace.cli.main import main
from tailrace.cli.output import tell
from tailrace.core.printable import in_a_line, printable
from tailrace.errors import SourceError
from tailrace.watch.gateway.log import JsonLines, TextLines

#: Sets a title, clears a screen by C1, turns the direction of text, begins a line of its own.
HOSTILE = "a\x1b]0;owned\x07\x9b2J\u202egpj\u2028\nforged\x7f"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def test_what_steers_a_terminal_becomes_a_number() -> None:
    assert in_a_line(HOSTILE) == (
        "a\\u001b]0;owned\\u0007\\u009b2J\\u202egpj\\u2028\\u000aforged\\u007f"
    )  # fmt: skip
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("日本 é 😀 \u0915\u094d\u200d\u0937 \u05d0") == "日本 é 😀 \u0915\u094d\u200d\u0937 \u05d0"


@given(st.text())
def test_json_stays_the_same_value(text: str) -> None:
    written = printable(json.dumps({text: [text]}, ensure_ascii=False, indent=2))
    assert json.loads(written) == {text: [text]}
    assert not STEERING.search(written)
    written.encode()


def test_errors_warnings_and_complaints_of_the_parser_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages had only been tried with plain names."""

    def fail(args: Any) -> int:
        raise SourceError(f"{HOSTILE} is gone", hint=HOSTILE)

    monkeypatch.setattr("tailrace.cli.watch.run", fail)
    assert main(["watch", "mongodb://host"]) == 1
    with pytest.raises(SystemExit):
        main(["watch", "mongodb://host", "--format", HOSTILE])
    record = logging.LogRecord("tailrace.x", logging.WARNING, "", 0, HOSTILE, (), None)
    tell(main_module._Sentence("tailrace: %(message)s").format(record))
    tell(HOSTILE)
    said = capsys.readouterr().err
    assert not STEERING.search(said)
    assert "\nforged" not in said


def test_a_finding_of_the_doctor_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    _print(Finding("images", "ok", f"kept for {HOSTILE}", HOSTILE))
    said = capsys.readouterr().out
    assert said.count("\n") == 2
    assert not STEERING.search(said)


def test_a_line_of_the_gateways_log_cannot_be_forged() -> None:
    """A newline in a namespace made a second line."""
    record = logging.LogRecord("tailrace.gateway", logging.INFO, "", 0, "stream opened", (), None)
    record.fields = {"ns": f"shop.{HOSTILE}", "user": 'ann level=error x="', "n": 5}
    line = TextLines().format(record)
    assert "\n" not in line
    assert not STEERING.search(line)
    assert line.endswith('user="ann level=error x=\\"" n=5')
    written = JsonLines().format(record)
    assert not STEERING.search(written)
    assert json.loads(written)["ns"] == f"shop.{HOSTILE}"


def dump_of(folder: Path, collection: str, count: int = 1) -> Path:
    entry = {"t": Int64(1), "v": Int64(2), "op": "i", "ns": f"d.{collection}", "ui": Binary(bytes(16), 4)}
    entry |= {"wall": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "o2": {"_id": 1}}
    dump = folder / "oplog.bson"
    dump.write_bytes(
        b"".join(
            bson.encode(
                {"ts": Timestamp(5, number), **entry, "o": {"_id": number, "x": HOSTILE}, "o2": {"_id": number}}
            )
            for number in range(1, count + 1)
        )
    )
    return dump


@pytest.mark.parametrize("form", ["json", "pretty"])
def test_documents_are_escaped_and_json_is_exact(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(dump_of(tmp_path, HOSTILE)), "--format", form]) == 0
    said = capsys.readouterr().out
    assert not STEERING.search(said)
    body = said if form == "json" else said.partition("\n")[2]
    event = json.loads(body)
    assert event["fullDocument"]["x"] == HOSTILE
    assert event["ns"]["coll"] == HOSTILE


def test_documents_on_a_terminal_are_escaped(tmp_path: Path) -> None:
    """In colour, documents are written by rich, which parses JSON and writes it anew, without the escapes."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tailrace", "replay", str(dump_of(tmp_path, HOSTILE))]
    with subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # how a terminal ends
            pass
        assert process.wait() == 0
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).replace("\r\n", "\n")
    assert not STEERING.search(text)
    assert "\\u001b]0;owned" in text


COMMANDS = [
    ("token", "encode", "--timestamp", "1,1"),
    ("token", "decode", "8200000001000000012B0229296E04"),
    ("replay", "DUMP", "--format", "json", "--server-version", "6.0"),
    ("replay", "DUMP", "--format", "pretty", "--server-version", "6.0"),
    ("replay", "DUMP", "--format", "bson", "--server-version", "6.0"),
    ("replay", "DUMP", "--explain", "--server-version", "6.0"),
    ("--help",),
    ("--version",),
]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_a_failure_and_a_reader_that_left_is_none(command: tuple[str, ...], tmp_path: Path) -> None:
    dump = dump_of(tmp_path, "c", 2000)
    arguments = [str(dump) if word == "DUMP" else word for word in command]
    start = [sys.executable, "-m", "tailrace", *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(start, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"tailrace: [^\n]*No space left on device\.\n", done.stderr)
    reading, writing = os.pipe()
    os.close(reading)
    gone = subprocess.run(start, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (0, "")


def test_where_standard_error_is_closed_its_words_are_not_mixed_with_events(tmp_path: Path) -> None:
    """``print`` to a missing stream prints to standard output."""
    code = "import sys; sys.stderr = None; from tailrace.cli.output import tell; tell('words')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=True)
    assert done.stdout == b""


def test_where_nobody_can_be_told_the_work_goes_on() -> None:
    code = "import sys; sys.stderr = open('/dev/full', 'w'); from tailrace.cli.output import tell; tell('x'); print(1)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=300, check=False)
    assert done.stdout == b"1\n"
