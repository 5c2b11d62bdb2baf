"""``tailrace lake``: what it says of a lake, and what it does to one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.cli.main import main
from tailrace.lake.store.status import lake_status
from tests.unit.lake_events import begin, make, numbers_in, put, stage, token


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A lake of ten small files in two days, 100 events."""
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    for number in range(10):
        start = 86_400 - 50 + number * 10
        put(root, claim, number, stage(root, range(start, start + 10), stem=str(number)))
    return root


def test_the_status_says_what_is_there(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lake", "status", str(lake)]) == 0
    said = capsys.readouterr().out
    assert "100 events in 10 files" in said
    assert "shop.orders" in said
    assert "days: 2, from 2026-11-21 to 2026-11-22" in said
    assert main(["lake", "status", str(lake), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["files"], found["smallFiles"], found["days"]) == (100, 10, 10, 2)
    assert found["lastToken"] == token(86_400 + 49)
    assert found["lastCommit"] is not None


def test_files_are_merged_and_the_replaced_ones_removed(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = numbers_in(lake)
    assert main(["lake", "compact", str(lake)]) == 0
    assert "10 files became 2" in capsys.readouterr().out
    assert lake_status(lake).replaced == 10
    assert main(["lake", "expire", str(lake)]) == 0
    assert "0 replaced files removed" in capsys.readouterr().out
    assert main(["lake", "expire", str(lake), "--keep", "0s"]) == 0
    assert "10 replaced files removed" in capsys.readouterr().out
    status = lake_status(lake)
    assert (status.replaced, status.files, status.rows) == (0, 2, 100)
    assert numbers_in(lake) == before
    assert main(["lake", "verify", str(lake), "--full"]) == 0
    assert "100 events in 2 files of 2 days: sound" in capsys.readouterr().out


def test_a_damaged_lake_is_told_by_the_exit_status(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = next(lake.glob("day=*/*.parquet"))
    victim.unlink()
    assert main(["lake", "verify", str(lake)]) == 1
    assert victim.name in capsys.readouterr().out


def test_wrong_usage_is_refused(lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the flags that belong to one action, only two had been tried with another; the others, and 0, were ignored."""
    for arguments, said, status in (
        (["status", str(tmp_path)], "not a lake", 1),
        (["expire", str(tmp_path)], "is not a lake", 1),
        (["expire", str(lake), "--keep", "60d"], "30 days", 1),
        (["expire", str(lake), "--keep", "soon"], "not a duration", 1),
        (["status", str(lake), "--full"], "belongs to tailrace lake verify", 2),
        (["verify", str(lake), "--format", "json"], "belongs to tailrace lake status", 2),
        (["verify", str(lake), "--keep", "1d"], "belongs to tailrace lake compact and expire", 2),
        (["expire", str(lake), "--target-bytes", "0"], "belongs to tailrace lake compact", 2),
        (["compact", str(lake), "--target-bytes", "0"], "1 byte or more", 1),
    ):
        assert main(["lake", *arguments]) == status
        assert said in capsys.readouterr().err


def test_missing_words_of_a_command_are_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They gave 1, which is for failures; the parser's own errors give 2, as ``main`` promises for both."""
    (tmp_path / "_tailrace").mkdir()
    for arguments in (["status"], ["write", "mongodb://host"], ["as-of", str(tmp_path)], ["rebuild", str(tmp_path)]):
        assert main(["tables", *arguments]) == 2
        assert capsys.readouterr().err.startswith("tailrace: tailrace tables ")
