"""PyMongo's own tests of change streams, with our client in place of PyMongo's, and PyMongo's beside it.

They come from PyMongo's source distribution and run in a process of their own (``suite_plugin`` is loaded there). What
they give with PyMongo itself is the measure: 127 passed and 28 skipped on 6.0.27; of the asynchronous twin, 118 and 37.
Nothing had run a program written for PyMongo against our client: 9 of 26 habits differed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tailrace.embedded import ReplicaSet
from tests.pymongo_source import NotFetchedError, pymongo_source

pytestmark = pytest.mark.mongod

_HERE = Path(__file__).parent
_GAPS: dict[str, dict[str, str]] = tomllib.loads((_HERE / "known_gaps.toml").read_text())
_FILES = {"sync": "test/test_change_stream.py", "async": "test/asynchronous/test_change_stream.py"}
#: What the whole file gives with PyMongo's client: passed and skipped.
_WITH_PYMONGO = {"sync": (127, 28), "async": (118, 37)}
#: A part that takes seconds.
_SLICE = "TestCollectionChangeStream and (resumetoken or update_resume_token or full_pipeline or batch_size or kill"
_SLICE += " or one_getmore)"
_SLICE_OF = {
    "sync": _SLICE,
    "async": _SLICE.replace("TestCollectionChangeStream", "TestAsyncCollectionAsyncChangeStream"),
}
_OUTCOME = re.compile(r"^\S*::(\S+?)::(.+?)(?: <- \S+)? (PASSED|FAILED|SKIPPED|ERROR)", re.MULTILINE)


def outcomes(engine: str, flavour: str, uri: str, directory: Path, select: str = "") -> dict[str, str]:
    """What became of each test, by class and name."""
    try:
        source = pymongo_source()
    except NotFetchedError as refused:
        pytest.skip(str(refused))
    (directory / "test").symlink_to(source / "test")  # PyMongo's own sources, beside it, are not to be imported
    host, _, port = uri.partition("://")[2].partition("/")[0].rpartition(":")
    environment = {
        **os.environ,
        "DB_IP": host,
        "DB_PORT": port,
        "PYTHONPATH": str(_HERE.parents[1]),
        "TAILRACE_SUITE_ENGINE": engine,
        "TAILRACE_SUITE_FLAVOUR": flavour,
    }
    command = [sys.executable, "-m", "pytest", "-vv", "--noconftest", "-p", "tests.ported.suite_plugin"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "--tb=line", "--color=no", _FILES[flavour]]
    command += ["-k", select] if select else []
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    found = {f"{kind}.{name}": result for kind, name, result in _OUTCOME.findall(done.stdout)}
    assert found, done.stdout + done.stderr
    return found


def names(found: dict[str, str], result: str) -> set[str]:
    return {name for name, outcome in found.items() if outcome == result}


def check(found: dict[str, str], gaps: dict[str, str]) -> None:
    """Every failure is a known gap, and every known gap fails: one that passes must be taken off the list."""
    failed = names(found, "FAILED") | names(found, "ERROR")
    assert failed - gaps.keys() == set()
    assert (gaps.keys() & found.keys()) - failed == set()


@pytest.mark.parametrize("engine", ["server", "oplog"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_part_of_pymongo_s_tests_passes(engine: str, flavour: str, replica_set: ReplicaSet, tmp_path: Path) -> None:
    found = outcomes(engine, flavour, replica_set.uri, tmp_path, _SLICE_OF[flavour])
    check(found, _GAPS.get(f"{engine} {flavour}", {}))
    assert len(found) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pymongo", "server", "oplog"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_pymongo_s_tests_give_what_they_give_with_pymongo(
    engine: str, flavour: str, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    found = outcomes(engine, flavour, replica_set.uri, tmp_path)
    gaps = _GAPS.get(f"{engine} {flavour}", {})
    check(found, gaps)
    passed, skipped = _WITH_PYMONGO[flavour]
    assert len(names(found, "PASSED")) == passed - len(gaps)
    assert len(names(found, "SKIPPED")) == skipped


def test_only_the_oplog_engine_has_gaps() -> None:
    assert all(engine.startswith("oplog ") for engine in _GAPS)
