"""The programs in ``examples/sinks`` answer a wrong call with their usage. They ended with a TypeError: no test had
called them from a command line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SINKS = sorted((Path(__file__).parents[2] / "examples" / "sinks").glob("*.py"))


@pytest.mark.parametrize("program", SINKS, ids=lambda path: path.stem)
def test_an_example_that_is_called_wrongly_says_how_it_is_called(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["one"]):
        monkeypatch.setattr(sys, "argv", [str(program), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program), run_name="__main__")
        assert f"python {program.name} URI" in str(ended.value.code), "a text: it is printed, and the status is 1"
    assert list(tmp_path.iterdir()) == []


def test_each_example_has_its_row() -> None:
    """A new program was once on no page, and no test noticed."""
    rows = (SINKS[0].parents[2] / "docs" / "how-to" / "sinks.md").read_text()
    assert [one.name for one in SINKS if f"\n| [`{one.name}`](../../examples/sinks/{one.name})" not in rows] == []
