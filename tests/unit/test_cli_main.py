"""The command line's common part: arguments of change streams, errors, exit statuses."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure

from tailrace.cli import main as main_module
from tailrace.cli.main import COMMANDS, main
from tailrace.cli.stream_arguments import Until, pipeline_of, read_time, stage_of
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.errors import InternalError, SourceError, UsageError

TOKEN = ResumeToken.high_water_mark(ClusterTime.of(5, 6))


def parsed(*arguments: str) -> argparse.Namespace:
    return main_module._parse(["watch", "mongodb://host", *arguments])


def test_every_command_has_help_and_a_line_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name} " in listed or f"\n    {name}\n" in listed  # a long name has a line of its own
        with pytest.raises(SystemExit) as done:
            main([name, "--help"])
        assert done.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: tailrace {name} ")


def test_the_list_of_commands_is_that_of_their_parsers() -> None:
    assert main_module.build_parser([]).format_help() == main_module.build_parser().format_help()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["wach"], []])
def test_help_and_version_load_no_command(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from tailrace.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "slow = {'numpy', 'pymongo', 'bson', 'numba', 'tailrace.watch', 'tailrace.core.plan'}\n"
        "sys.exit(repr(slow & set(sys.modules)) if slow & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_command_that_is_nearly_right_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["wach", "mongodb://host"])
    assert done.value.code == 2
    assert "Did you mean watch?" in capsys.readouterr().err


def test_only_what_was_said_goes_into_the_stage() -> None:
    assert stage_of(parsed()) == {}
    said = parsed(
        *("--full-document", "updateLookup", "--full-document-before-change", "required", "--show-expanded-events"),
        *("--show-system-events", "--show-migration-events", "--show-raw-update-description"),
        *("--match-collection-uuid-for-update-lookup", "--ignore-removed-shards"),
        *("--resume-after", TOKEN.data.lower()),
        *("--start-after", f'{{"_data": "{TOKEN.data}"}}', "--start-at-operation-time", "12,34"),
    )
    assert stage_of(said) == {
        "fullDocument": "updateLookup",
        "fullDocumentBeforeChange": "required",
        "resumeAfter": {"_data": TOKEN.data},
        "startAfter": {"_data": TOKEN.data},
        "startAtOperationTime": Timestamp(12, 34),
        "showExpandedEvents": True,
        "showSystemEvents": True,
        "showMigrationEvents": True,
        "showRawUpdateDescription": True,
        "matchCollectionUUIDForUpdateLookup": True,
        "ignoreRemovedShards": True,
    }


def test_the_namespace_may_stand_before_or_after_the_flags() -> None:
    assert parsed("shop.orders", "--format", "json").namespace == "shop.orders"
    assert parsed("--format", "json", "shop.orders").namespace == "shop.orders"
    assert parsed("--format", "json").namespace is None


@pytest.mark.parametrize("arguments", [["a", "b"], ["a", "--format", "json", "b"], ["--formt", "json"], ["--nope"]])
def test_arguments_too_many_or_unknown_are_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        parsed(*arguments)
    assert done.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_the_pipeline_is_extended_json() -> None:
    stages = pipeline_of(parsed("--pipeline", '[{"$match": {"n": {"$numberLong": "5"}}}, {"$unset": "x"}]'))
    assert stages == [{"$match": {"n": 5}}, {"$unset": "x"}]
    assert isinstance(stages[0]["$match"]["n"], Int64)


@pytest.mark.parametrize("text", ["", "[", "{}", "5", "[1]", '"x"', '[{"a": {"$oid": "zz"}}]', "[" * 20_000])
def test_a_pipeline_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--pipeline"):
        pipeline_of(parsed("--pipeline", text))


@pytest.mark.parametrize("text", ['[{"$match": {"a\\u0000": 1}}]', f'[{{"$match": {{"a": {"9" * 25}}}}}]'])
def test_a_pipeline_that_has_no_bson_is_a_usage_error_of_replay_too(text: str) -> None:
    """Only watch() checked this, which encodes the pipeline before the options are parsed."""
    with pytest.raises(UsageError, match="BSON"):
        StreamOptions.parse(Scope.cluster(), {}, pipeline_of(parsed("--pipeline", text)))


@pytest.mark.parametrize("text", ["²", "٣", "9" * 5000, "-1", ""])
def test_an_end_that_is_no_number_and_no_time_is_a_usage_error(text: str) -> None:
    """str.isdigit() accepts digits that int() does not; only ASCII numbers had been tried."""
    with pytest.raises(UsageError):
        Until.parse(text, None)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("5,6", ClusterTime.of(5, 6)),
        ("1970-01-01T00:01:40Z", ClusterTime.of(100, 0)),
        ("1970-01-01T01:01:40+01:00", ClusterTime.of(100, 0)),
        ("1970-01-01T00:01:40", ClusterTime.of(100, 0)),
    ],
)
def test_times_are_timestamps_or_dates(text: str, time: ClusterTime) -> None:
    assert read_time(text) == time


def test_a_cluster_time_is_shown_as_a_date_and_as_the_command_line_takes_it() -> None:
    assert str(ClusterTime.of(1795811772, 1)) == "2026-11-27 20:36:12 UTC (1795811772,1)"
    assert str(ClusterTime.of(1795811772, 0xFFFFFFFF)) == "2026-11-27 20:36:12 UTC"


def test_the_end_is_now_a_time_or_a_number_of_events() -> None:
    now = ClusterTime.of(9, 9)
    assert Until.parse(None, now) == Until()
    assert Until.parse("now", now) == Until(time=now)
    assert Until.parse("17", now) == Until(events=17)
    assert Until.parse("17,1", now) == Until(time=ClusterTime.of(17, 1))
    two = Until.parse("2", now)
    for left in (True, False):
        two.count()
        assert two.all_counted is not left
    end = Until(time=ClusterTime.of(5, 6))
    assert not end.is_before(TOKEN.to_bson())
    assert end.is_before(ResumeToken.high_water_mark(ClusterTime.of(5, 7)).to_bson())


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UsageError("wrong", hint="Do right"), 1, "tailrace: wrong. Do right.\n"),
        (SourceError("cannot use mongodb://ann:secret@h/"), 1, "tailrace: cannot use mongodb://ann:***@h/.\n"),
        (InternalError("odd"), 1, "tailrace: odd. This is a bug in tailrace: please report it.\n"),
        (KeyboardInterrupt(), 130, ""),
        # Any broken pipe was taken for that of standard output, whose reader has seen enough: exit status 0.
        (BrokenPipeError(32, "Broken pipe"), 1, "tailrace: Broken pipe.\n"),
        (OSError(28, "No space left on device", "/lake/x"), 1, "tailrace: /lake/x: No space left on device.\n"),
        (
            ModuleNotFoundError("No module named 'pyspark'", name="pyspark.sql"),
            1,
            "tailrace: this command needs the package pyspark. Install it: pip install 'tailrace[spark]'.\n",
        ),
    ],
)
def test_errors_are_one_sentence_and_an_exit_status(
    error: BaseException,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raising(args: Any) -> int:
        raise error

    monkeypatch.setattr("tailrace.cli.watch.run", raising)
    assert main(["watch", "mongodb://host"]) == status
    assert capsys.readouterr().err == text


def test_an_interrupt_while_the_commands_load_is_quiet_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts had been sent only once events came."""

    def interrupted(names: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "build_parser", interrupted)
    assert main(["watch", "mongodb://host"]) == 130


def test_an_interrupt_that_a_package_turns_into_another_error_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts had been tried while our own modules load. One in pyarrow's look for pandas printed a traceback."""

    def half_loaded(args: Any) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None
        return 0

    monkeypatch.setattr("tailrace.cli.watch.run", half_loaded)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a session of Spark's has set its own
    try:
        assert main(["watch", "mongodb://host"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setattr("tailrace.cli.watch.run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["watch", "mongodb://host"])


# Only plain text on an open standard output had been tried: the two tests below failed with tracebacks.


def test_text_that_the_output_cannot_hold_is_escaped(tmp_path: Path) -> None:
    entry = {"ts": Timestamp(5, 1), "t": Int64(1), "v": Int64(2), "op": "i", "ns": "d.c", "o2": {"_id": 1}}
    entry |= {"ui": Binary(bytes(16), 4), "wall": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}
    dump = tmp_path / "oplog.bson"
    dump.write_bytes(bson.encode({**entry, "o": {"_id": 1, "text": "日本 😀"}}))
    for form in ("json", "pretty"):
        command = [sys.executable, "-m", "tailrace", "replay", str(dump), "--format", form, "--server-version", "6.0"]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, capture_output=True, timeout=300, check=False, env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
        if form == "json":
            assert json.loads(done.stdout)["fullDocument"]["text"] == "日本 😀"
        else:
            assert rb"\u65e5" in done.stdout


def test_a_closed_standard_output_is_an_error_in_one_sentence() -> None:
    command = f'"{sys.executable}" -m tailrace token encode --timestamp 1,1 >&-'
    done = subprocess.run(command, shell=True, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, b"tailrace: standard output is closed.\n")


def test_a_missing_package_of_ours_is_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tailrace.watch.client", None)
    with pytest.raises(ModuleNotFoundError):
        main(["watch", "mongodb://host"])


def test_the_parsers_of_all_commands_load_no_spark_driver_or_engine() -> None:
    """``--help`` took a second of processor, since most commands loaded the whole language of pipelines for two
    names."""
    heavy = ("pyspark", "pandas", "pyarrow", "numpy", "pymongo", "rich", "numba", "tailrace.core.expression")
    code = (
        f"import sys, tailrace.cli.main as main; main.build_parser(); print([x for x in {heavy} if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_loads_no_modules_of_others() -> None:
    """Each start loaded the modules of all commands: ``tailrace token`` took 0.7 s of processor instead of 0.1."""
    code = (
        "import sys, tailrace.cli.main as main; main.main(['token', 'encode', '--timestamp', '1,1']);"
        "print([name for name in ('tailrace.watch.client', 'tailrace.act.consumer', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "No such file"),
        (".", "Is a directory"),
        ("binary", "not UTF-8"),
        ("a\0b", "not the name"),
        ("", "not the name"),
    ],
)
def test_a_file_that_an_argument_names_and_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=f"--pipeline cannot be read from the file .*{reason}"):
        pipeline_of(parsed("--pipeline", f"@{name}"))


def test_an_option_that_is_misspelt_is_answered_with_the_one_that_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "mongodb://h", "--full-documnt", "x"])
    assert "unrecognized arguments: --full-documnt x. Did you mean --full-document?" in capsys.readouterr().err


def test_sigterm_ends_a_command_as_an_interrupt_does(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def work(args: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            closed.append(True)
        return 0

    monkeypatch.setattr("tailrace.cli.watch.run", work)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert main(["watch", "mongodb://host"]) == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert closed == [True]


def test_what_a_driver_complains_of_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server error that no command expected ended in a traceback."""
    text = 'not authorized on shop to execute command { insert: "orders", documents: [ { pin: 1 } ] }'

    def refused(args: argparse.Namespace) -> int:
        raise OperationFailure(text, 13, {"ok": 0.0, "errmsg": text, "code": 13})

    monkeypatch.setattr("tailrace.cli.watch.run", refused)
    assert main(["watch", "mongodb://h"]) == 1
    assert capsys.readouterr().err == "tailrace: not authorized on shop to execute insert.\n"


def test_the_gateway_looks_for_the_package_of_statistics_before_it_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["gateway", "--upstream", "mongodb://127.0.0.1:1", "--metrics", "127.0.0.1:0"]) == 1
    assert capsys.readouterr().err == (
        "tailrace: this command needs the package prometheus_client. Install it: pip install 'tailrace[gateway]'.\n"
    )


def test_tables_in_a_store_are_told_of_the_one_extra_that_has_it_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message named the extra ``tables``, and then, after its installation, ``s3``."""
    monkeypatch.setattr("tailrace.cli.tables.run", _lacks_pyarrow)
    for uri in ("s3://bucket/tables", "abfss://box@shop.dfs.core.windows.net/tables"):
        assert main(["tables", "write", "mongodb://h", uri, "shop.*", "--state", "state"]) == 1
        assert capsys.readouterr().err == (
            "tailrace: this command needs the package pyarrow. Install it: pip install 'tailrace[s3]'.\n"
        )
    assert main(["tables", "write", "mongodb://h", "tables", "shop.*"]) == 1
    assert "'tailrace[tables]'" in capsys.readouterr().err


def _lacks_pyarrow(args: Any) -> int:
    raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.parquet")


def test_a_package_of_others_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, package, wanted in (("watch", "odd", "odd"), ("archive", "pyarrow", "'tailrace[archive]'")):

        def missing(args: argparse.Namespace, package: str = package) -> int:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)

        monkeypatch.setattr(f"tailrace.cli.{command}.run", missing)
        assert main([command, "mongodb://h", *(["dir"] if command == "archive" else [])]) == 1
        assert capsys.readouterr().err.endswith(f"Install it: pip install {wanted}.\n")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer in this system")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_drops_comes_again(number: signal.Signals) -> None:
    """A watch went on after Ctrl-C once in some hundred tries: the signal had come in a callback of an import. The test
    of interrupts at any moment meets that far too rarely."""
    program = f"""
import os, sys, time
from tailrace.cli import main

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})
        time.sleep(30)

def run(arguments):
    Dropping()
    time.sleep(30)
    return 0

main._run = run
sys.exit(main.main([]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=25, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
