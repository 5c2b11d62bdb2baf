"""Which tests a run on another server than the default has (``make test-version``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.embedded import find_mongod
from tests import server_in_use

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("in_use", "versions", "left_out"),
    [
        ("7.0.28", ["6.0.27"], True),
        ("7.0.28", ["5.0.4", "6.0.27"], True),
        ("7.0.28", ["6.0.27", "7.0.28"], False),
        ("7.0.28", [], False),
        ("6.0.27", ["5.0.4"], False),
    ],
)
def test_a_run_on_another_server_leaves_out_what_names_only_others(
    monkeypatch: pytest.MonkeyPatch, in_use: str, versions: list[str], left_out: bool
) -> None:
    monkeypatch.setattr(server_in_use, "SERVER_VERSION", in_use)
    assert server_in_use.is_of_other_versions(versions) == left_out


@pytest.mark.mongod
def test_the_server_that_is_named_takes_the_place_of_the_default() -> None:
    """The gateway's tests named 6.0.27, whatever server the run was for."""
    environment = {**os.environ, "TAILRACE_MONGOD": str(find_mongod("4.4.2").path)}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not slow", "tests/gateway/test_tokens.py"]
    listed = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert "[4.4.2" in listed
    assert "6.0.27" not in listed
    assert "5.0.4" not in listed
