"""The programs in ``examples/sinks`` answer a wrong call with their usage. They ended with a TypeError: no test had
called them from a command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SINKS = sorted((Path(__file__).parents[2] / "examples" / "sinks").glob("*.py"))


@pytest.mark.parametrize("program", SINKS, ids=lambda path: path.stem)
def test_an_example_that_is_called_wrongly_says_how_it_is_called(program: Path, tmp_path: Path) -> None:
    for arguments in ([], ["one"]):
        done = subprocess.run(
            [sys.executable, program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert f"python {program.name} MONGODB_URI" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
