"""Where a command gets its connection URI from, so that its arguments need not contain a password."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from tailrace.cli import main as main_module
from tailrace.cli.main import main
from tailrace.lake.spark.store.pipeline_file import load
from tests import commands

SECRET = "tr0ub4dor"
URI = f"mongodb://ann:{SECRET}@127.0.0.1:1/?serverSelectionTimeoutMS=50"


def parsed(*arguments: str) -> argparse.Namespace:
    return main_module._parse(arguments)


@pytest.mark.parametrize("flags", list(itertools.permutations(["U", "shop.orders", "--format json", "--explain"])))
def test_uri_and_namespace_stand_anywhere_in_their_order(flags: tuple[str, ...]) -> None:
    if flags.index("U") > flags.index("shop.orders"):
        return
    words = [word for flag in flags for word in flag.split()]
    args = parsed("watch", *("mongodb://h" if word == "U" else word for word in words))
    assert (args.uri, args.namespace, args.format, args.explain) == ("mongodb://h", "shop.orders", "json", True)


def test_the_namespace_alone_is_one_where_the_environment_has_the_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILRACE_URI", raising=False)
    assert parsed("watch", "shop.orders").uri == "shop.orders"  # then told as no URI
    assert parsed("watch", "@file").uri == "@file"
    monkeypatch.setenv("TAILRACE_URI", URI)
    for arguments in (["shop.orders"], ["--format", "json", "shop.orders"], ["shop.orders", "--explain"]):
        args = parsed("watch", *arguments)
        assert (args.uri, args.namespace) == (None, "shop.orders")
    for uri in ("mongodb://h", "mongodb+srv://h", "@file"):
        args = parsed("watch", uri)
        assert (args.uri, args.namespace) == (uri, None)
    args = parsed("watch")
    assert (args.uri, args.namespace) == (None, None)
    assert parsed("doctor").uri is None


@pytest.mark.long
@pytest.mark.parametrize("command", ["watch", "doctor"])
def test_every_command_reads_the_uri_from_the_environment_or_a_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It could only be given as an argument, which every user of the machine can see."""
    (tmp_path / "uri").write_text(URI)
    monkeypatch.delenv("TAILRACE_URI", raising=False)
    assert main([command]) == 1
    assert "no connection URI was given" in capfd.readouterr().err
    for arguments, environment in (([f"@{tmp_path / 'uri'}"], ""), ([], URI), ([], f"@{tmp_path / 'uri'}")):
        monkeypatch.setenv("TAILRACE_URI", environment)
        assert main([command, *arguments]) == 1
        said = capfd.readouterr()
        assert "cannot reach 127.0.0.1:1: connection refused" in said.out + said.err
        assert SECRET not in said.out + said.err


def test_a_pipeline_file_takes_the_uri_from_the_environment_or_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    (tmp_path / "uri").write_text(URI)
    path.write_text("lake: {path: lake}\n")
    assert load(path, {"TAILRACE_URI": URI}).source["uri"] == URI
    assert load(path, {"TAILRACE_URI": f"@{tmp_path / 'uri'}"}).source["uri"] == URI
    path.write_text("source: {uri: '@uri'}\nlake: {path: lake}\n")
    assert load(path, {"TAILRACE_URI": "mongodb://other"}).source["uri"] == URI


@pytest.mark.parametrize(
    "arguments",
    [
        ["watch", URI, "shop", URI],
        ["watch", f"ann:{SECRET}@host:27017", "shop", "more"],
        ["watch", URI, "--format", URI],
        [URI],
        ["doctor", URI, f"ann:{SECRET}@host/"],
    ],
)
def test_wrong_usage_does_not_show_the_password(arguments: list[str]) -> None:
    """argparse quotes what it does not understand; only our own messages were masked."""
    done = commands.run_text(*arguments)
    assert done.returncode == 2
    assert "usage: tailrace" in done.stderr
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["watch", "shop.orders", URI], "without a flag, as in: tailrace watch URI db[.coll]"),
        (["watch", "--uri", URI, "shop.orders"], "without a flag, as in: tailrace watch URI db[.coll]"),
        (["doctor", f"--uri={URI}"], "without a flag, as in: tailrace doctor URI"),
        (["archive", "DIR", URI], "without a flag, as in: tailrace archive URI DIR"),
        (["streams", "--uri", URI], "without a flag, as in: tailrace streams URI"),
        (["view", URI, "verify"], "invalid choice"),
        (["gateway", URI], "is given with --upstream"),
        (["gateway", "--uri", URI], "is given with --upstream"),
        (["listen", URI, "os:getcwd", "--resource", "x"], "is given with --uri"),
        (["listen", "os:getcwd", URI, "--resource", "x"], "is given with --uri"),
        (["replay", URI], "takes no connection URI: it reads a dump or an archive"),
        (["replay", "DUMP", "--uri", URI], "takes no connection URI: it reads a dump or an archive"),
        (["run", URI], "takes no connection URI: the pipeline file names the deployment"),
        (["run", "pipeline.yaml", "--uri", URI], "takes no connection URI: the pipeline file names the deployment"),
        (["lake", "status", URI], "takes no connection URI"),
        (["tables", "write", "DIR", URI, "shop.*"], "comes first: tailrace tables write URI DIR 'shop.*'"),
        (["tables", "write", "DIR", "shop.*", URI, "--once"], "comes first: tailrace tables write URI DIR 'shop.*'"),
        (["tables", "verify", "DIR", URI], "comes first: tailrace tables verify URI DIR"),
        (["tables", "as-of", URI, "DIR", "shop.orders", "1,1"], "is given with --uri"),
        (["tables", "compact", URI, "DIR"], "takes no connection URI"),
        (["tables", "status", "DIR", URI], "takes no connection URI"),
    ],
)
def test_a_uri_in_another_place_is_answered_with_its_own(arguments: list[str], told: str) -> None:
    """It was taken for a namespace ("write it with a dot"), a file, or an option ("did you mean --until"). The URI's
    place differs among the commands, and each test had it in the right place."""
    done = commands.run_text(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert SECRET not in done.stderr


def test_the_tables_words_may_stand_before_or_after_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tables write --once URI DIR 'shop.*'` ended in "unrecognized arguments", since argparse had assigned no words to
    the positional arguments."""
    expected = [URI, "DIR", "shop.*"]
    for arguments in (["--once", *expected], [*expected, "--once"], [URI, "--once", "DIR", "shop.*"]):
        args = parsed("tables", "write", *arguments)
        assert (args.words, args.once) == (expected, True)
    monkeypatch.setenv("TAILRACE_URI", URI)
    done = commands.run_text("tables", "write", "DIR", "shop.*", env={"TAILRACE_URI": URI})
    assert "cannot reach 127.0.0.1:1: connection refused" in done.stderr


@pytest.mark.parametrize("command", [["watch", URI], ["replay", "DUMP"], ["tables", "write", URI, "DIR"]])
def test_a_namespace_with_a_slash_is_answered_with_the_dot(command: list[str]) -> None:
    done = commands.run_text(*command, "shop/orders")
    assert done.returncode == 1
    assert "'shop/orders'" in done.stderr
    assert done.stderr.count("shop.orders") == 1
