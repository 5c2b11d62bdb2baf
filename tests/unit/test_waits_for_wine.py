"""On a machine without Wine the tests that want a mongod 7.0 are skipped, and the last line of a run says how many: it
must not look as if 7.0 had been tested. Nothing had tested that line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.embedded import wine

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.wine
def test_marked(): pass

@pytest.mark.parametrize("version", ["6.0.27", "7.0.28", "7.0.25"])
def test_of_versions(version): pass

def test_other(): pass
"""


def last_words(folder: Path, *, has_wine: bool, options: list[str]) -> list[str]:
    """The output of a run of ``TESTS``, with the hooks of the project's tests."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "conftest.py").write_text(
        f"from tailrace.embedded import wine\nwine.is_installed = lambda: {has_wine}\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'wine: wants Wine')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", "none.ini", "--rootdir", str(folder)]
    (folder / "none.ini").write_text("[pytest]\n")
    command[command.index("none.ini")] = str(folder / "none.ini")
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # what it adds comes last
    done = subprocess.run(
        [*command, *options, str(folder)], cwd=ROOT, env=own, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["one process", "two processes"])
def test_the_last_line_says_how_many_tests_wait(tmp_path: Path, options: list[str]) -> None:
    said = last_words(tmp_path, has_wine=False, options=options)
    assert f"3 tests wait for wine64, to run on mongod 7.0: {wine.INSTALL}" in said[-2:], said


def test_with_wine_all_run_and_no_test_waits(tmp_path: Path) -> None:
    said = last_words(tmp_path, has_wine=True, options=[])
    assert not [line for line in said if "wait" in line]
    assert "....." in said[0]
