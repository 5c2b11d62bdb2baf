"""Faults in a lake are found and named, and nothing outside is touched: damage, gaps, names that lead outside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import SinkError
from tailrace.lake import compact, files, verify
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import abort_batch
from tests.unit.lake_events import begin, make, planned_for, put, stage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def four(root: Path, checkpoint: Path) -> str:
    """Four commits of ten events; gives the claim."""
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    for number in range(4):
        put(root, claim, number, stage(root, range(number * 10, number * 10 + 10), stem=str(number), payload=200))
    return claim


def test_verify_names_what_is_wrong(root: Path, four: str) -> None:
    first, second, third, _ = sorted(root.glob("day=*/*.parquet"))
    (first.parent / "0000000009-00000.parquet").write_bytes(first.read_bytes())
    stage(root, range(100, 110), stem="running")
    second.write_bytes(third.read_bytes())
    first.unlink()
    third.write_bytes(b"PAR1")
    report = verify(root)
    text = "\n".join(report.problems)
    assert "0000000009-00000.parquet is not in the log" in text
    assert f"{first.name} is in the log and missing" in text
    assert f"{second.name}: its footer and the log name different tokens" in text
    assert f"{third.name} cannot be read" in text
    assert f"{third.name} has 4 bytes, and the log says" in text
    assert report.leftovers == 1


def test_a_lake_whose_making_was_cut_off_is_sound_and_one_whose_log_has_gone_is_not(
    root: Path, checkpoint: Path
) -> None:
    """The former ended ``verify --full`` with an OverflowError (a full disk under a lake's first start showed it), and
    the latter was sound. Only lakes that had a log had been verified, or had lost a part of it."""
    make(root, checkpoint)
    layout = CommitLog(root).layout
    layout.commit(0).unlink()
    layout.head.unlink()
    assert verify(root, full=True).problems == []
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    put(root, claim, 0, stage(root, range(10)))
    for number in (0, 1):
        layout.commit(number).unlink()
    layout.head.unlink()
    for full in (False, True):
        (problem,) = verify(root, full=full).problems
        assert "its log is gone" in problem


def test_what_spark_leaves_of_a_start_that_found_no_room_is_removed(root: Path, checkpoint: Path) -> None:
    """Spark refused the checkpoint ever after. A full disk had been tried where the checkpoint was on another one."""
    make(root, checkpoint)
    names = {".0.54fd7a86-14fe.tmp", "..0.54fd7a86-14fe.tmp.crc", ".12.54fd7a86-14fe.tmp", "other"}
    (checkpoint / "offsets").mkdir()
    for name in names:
        (checkpoint / "offsets" / name).touch()
    make(root, checkpoint)
    assert {path.name for path in (checkpoint / "offsets").iterdir()} == {".12.54fd7a86-14fe.tmp", "other"}
    begin(checkpoint)
    (checkpoint / "offsets" / ".0.54fd7a86-14fe.tmp").touch()
    make(root, checkpoint)  # once a stream has begun, this is up to Spark
    assert (checkpoint / "offsets" / ".0.54fd7a86-14fe.tmp").exists()


def test_a_flipped_byte_of_an_event_is_found_by_verify_in_full(root: Path, four: str) -> None:
    """It was reported as "sound": only tokens are read, and nothing covered the bytes of other columns. Now pages have
    checksums, which readers can check, and the log has the hash of each file."""
    import pyarrow.parquet as pq

    path = min(root.glob("day=*/*.parquet"))
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(2)
        assert chunk.path_in_schema == "event"
        at = chunk.data_page_offset + chunk.total_compressed_size // 2
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert verify(root).problems == []
    assert any("its SHA-256 differs" in problem for problem in verify(root, full=True).problems)
    with pytest.raises(OSError, match=r"CRC|checksum"), pq.ParquetFile(path, page_checksum_verification=True) as file:
        file.read(["event"])


@pytest.mark.parametrize("lost", [4, 2, 0])
def test_a_commit_that_was_deleted_by_hand_is_named_by_the_next_run_and_by_verify(
    root: Path, checkpoint: Path, four: str, lost: int
) -> None:
    """The next run ignored it, and wrote another one with its number. Gaps had only been tried with damaged
    manifests."""
    path = root / "_delta_log" / f"{lost:020d}.json"
    path.unlink()
    with pytest.raises(
        SinkError,
        match=rf"{path.name} is missing(: the lake's log has (lost its end|a hole)|, and no checkpoint holds)",
    ):
        make(root, checkpoint)
    with pytest.raises(SinkError, match=rf"{path.name} is missing"):
        files(root)
    try:
        problems = verify(root).problems
    except SinkError as error:
        problems = [error.message]
    assert any(path.name in problem for problem in problems)


@pytest.mark.parametrize("changed", [4, 2])
def test_a_commit_that_was_changed_by_hand_is_named(root: Path, checkpoint: Path, four: str, changed: int) -> None:
    path = root / "_delta_log" / f"{changed:020d}.json"
    path.write_text(path.read_text().replace("STREAMING UPDATE", "STREAMING UPDATe"))
    with pytest.raises(SinkError, match=rf"{path.name} was changed after it was written"):
        make(root, checkpoint)


BAD_NAMES = [
    "../outside.parquet",
    "day=2026-11-21/../../outside.parquet",
    "/etc/passwd",
    "day=2026-11-21/x.parquet",
    "day=2026-11-21/0000000000000000-00000-a" + "0" * 32 + ".parquet/..",
    "file:///etc/passwd",
    7,
    None,
    [],
    {"path": 1},
]


@pytest.mark.parametrize("action", ["add", "remove"])
@pytest.mark.parametrize("name", BAD_NAMES, ids=str)
def test_a_name_in_the_log_that_is_no_lakes_file_is_refused_and_nothing_outside_is_touched(
    root: Path, checkpoint: Path, four: str, action: str, name: object
) -> None:
    """A manifest with ``../`` moved or deleted files outside the lake, and one whose name was a number ended in a
    traceback: names were never checked where they were read."""
    outside = root.parent / "outside.parquet"
    outside.write_text("mine")
    path = root / "_delta_log" / f"{4:020d}.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if "add" not in line]
    lines.append({action: {"path": name, "deletionTimestamp": 1, "size": 1, "stats": "{}", "partitionValues": {}}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "_tailrace" / "head.json").unlink()
    for work in (
        lambda: make(root, checkpoint),
        lambda: verify(root),
        lambda: compact(root, retention=timedelta(0)),
        lambda: files(root),
        lambda: abort_batch(root, stage(root, range(50, 60))),
    ):
        with pytest.raises(SinkError, match=f"{path.name} is damaged"):
            work()
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("name", BAD_NAMES, ids=str)
def test_a_name_that_a_task_gives_is_checked_too(root: Path, four: str, name: object) -> None:
    outside = root.parent / "outside.parquet"
    outside.write_text("mine")
    bad = (replace(stage(root, range(50, 60))[0], name=name),)  # type: ignore[arg-type]
    for work in (lambda: abort_batch(root, bad), lambda: put(root, four, 4, bad, planned_for(stage(root, [70])))):
        with pytest.raises(SinkError, match="cannot be a file of a lake"):
            work()
    assert outside.read_text() == "mine"


DAMAGES = ["", "{", "[]", "7", "null", "{}", "[" * 50_000, "1" * 5_000, "\xff", '{"commitInfo": 5}']


@pytest.mark.parametrize("text", DAMAGES, ids=lambda text: text[:20])
@pytest.mark.parametrize(
    "which", ["_delta_log/00000000000000000004.json", "_tailrace/head.json", "_tailrace/lake.json"]
)
def test_a_damaged_file_of_the_lake_is_named_in_one_sentence(
    root: Path, checkpoint: Path, four: str, which: str, text: str
) -> None:
    path = root / which
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SinkError, match=path.name) as caught:
        make(root, checkpoint)
    assert "\n" not in str(caught.value)


def test_every_part_of_a_commit_may_be_of_a_wrong_type(root: Path, checkpoint: Path, four: str) -> None:
    """Whatever a damaged commit contains, the error names it in one sentence."""
    path = root / "_delta_log" / f"{4:020d}.json"
    original = [json.loads(line) for line in path.read_text().splitlines()]
    tried, messages = 0, []
    for place in _places(original):
        for wrong in (None, -1, "x", [], {}, 1e300, True):
            changed = json.loads(json.dumps(original))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            if type(inner[place[-1]]) is type(wrong):
                continue
            inner[place[-1]] = wrong
            path.write_text("".join(json.dumps(line) + "\n" for line in changed))
            (root / "_tailrace" / "head.json").unlink(missing_ok=True)
            try:
                CommitLog(root).state()
            except SinkError as error:
                messages.append(error.message)
            tried += 1
    assert tried > 200
    assert len(messages) > 100
    assert [message for message in messages if path.name not in message] == []


def _places(value: object, before: tuple[object, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        if before:
            yield (*before, key)
        yield from _places(inner, (*before, key))
