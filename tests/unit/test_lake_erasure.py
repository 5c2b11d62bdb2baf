"""Erasing events from a lake: the right ones, from the log, the files and every reader; everything else stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import drop_days, erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.manifest import Gap, PlannedRange, StagedFile
from tailrace.lake.store.part_writer import PartWriter
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.retention import expire
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tests.unit.lake_events import COLUMNS, MIDNIGHT, STREAM, as_spark_plans, begin, numbers_in, put, token

NAMES = ("orders", "customers", "a/b")
LAKE_COLUMNS = [*COLUMNS, {"name": "collection", "type": "string", "nullable": True, "metadata": {}}]
SECRET = b"anna@example.com"


def event(number: int) -> bytes:
    """Event ``number``, of one of three collections; every 10th document is Anna's."""
    who = SECRET.decode() if number % 10 == 0 else "somebody else"
    return bson.encode(
        {
            "_id": {"_data": token(number)},
            "operationType": "insert",
            "ns": {"db": "shop", "coll": NAMES[number % 3]},
            "documentKey": {"_id": number},
            "fullDocument": {"_id": number, "who": who},
        }
    )


def stage(root: Path, numbers: Sequence[int], names: Sequence[str] = ()) -> tuple[StagedFile, ...]:
    batch = pa.record_batch(
        {
            "token": pa.array([token(n) for n in numbers], pa.string()),
            "number": pa.array(list(numbers), pa.int64()),
            "event": pa.array([event(n) for n in numbers], pa.binary()),
            "collection": pa.array([NAMES[n % 3] for n in numbers], pa.string()),
        }
    )
    return PartWriter(root, f"s{numbers[0]}", partitioning=Partitioning.of(names)).write_all([batch])


def fill(root: Path, names: Sequence[str] = ()) -> str:
    """Ten micro-batches of ten events, about midnight. Gives the claim."""
    checkpoint = root.with_name("checkpoint")
    claim = open_lake(root, checkpoint, STREAM, LAKE_COLUMNS, partitioning=Partitioning.of(names)).claim
    begin(checkpoint)
    for number in range(10):
        first = 86_350 + number * 10
        assert put(root, claim, number, stage(root, range(first, first + 10), names)) is not None
    return claim


def seen(root: Path) -> list[int]:
    return sorted(numbers_in(root))


def hers(root: Path) -> list[str]:
    """The files in the directory, whether the log names them or not, that hold something of Anna's."""
    found = []
    for path in root.rglob("*.parquet"):
        if path.parent.name != "_delta_log":
            events = pq.read_table(path, columns=["event"], partitioning=None).column("event").to_pylist()
            found += [str(path.relative_to(root))] * any(SECRET in one for one in events)
    return found


EVERYTHING = list(range(86_350, 86_450))


@pytest.mark.parametrize("names", [(), ("hour", "collection")], ids=["day", "hour+collection"])
def test_the_events_that_match_go_and_nothing_else(names: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = fill(root, names)
    before = CommitLog(root).state().number
    report = erase(root, {"fullDocument.who": SECRET.decode()})
    left = [n for n in EVERYTHING if n % 10]
    assert (report.rows, report.searched, report.removed) == (10, 100, 0)
    assert (report.first_token, report.last_token) == (token(86_350), token(86_440))
    assert seen(root) == left
    assert verify(root, full=True).problems == []
    live = {file.name for file in CommitLog(root).live_files()}
    assert report.files == len(hers(root)) > 0
    assert not live & set(hers(root))
    assert report.replaced == report.files > 0
    # A reader of an earlier version finds what it opened, until the files are removed.
    assert sum(file.rows for file in CommitLog(root).state(before).in_order) == 100
    assert all((root / file.name).exists() for file in CommitLog(root).state(before).in_order)
    assert expire(root, timedelta(0)) == report.files
    assert hers(root) == []
    # The server's equality: 86351.0 is 86351. And the stream goes on.
    assert erase(root, {"ns.coll": NAMES[86_351 % 3], "documentKey._id": 86_351.0}, vacuum=True).rows == 1
    assert put(root, claim, 10, stage(root, range(86_450, 86_460), names)) is not None
    compact(root)
    assert seen(root) == [n for n in left if n != 86_351] + list(range(86_450, 86_460))
    found = verify(root, full=True)
    assert (found.problems, [one.rows for one in found.erasures]) == ([], [10, 1])


def test_the_lakes_last_events_can_go_and_are_not_written_again(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = fill(root)
    assert erase(root, {"documentKey._id": {"$gte": 86_445}}, vacuum=True).rows == 5
    found = verify(root, full=True)
    assert (found.problems, found.last_token) == ([], token(86_444))
    with pytest.raises(SinkError, match="already reaches"):
        put_after(root, claim, [86_446])
    assert open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS).after == token(86_449)
    assert erase(root, {"operationType": "insert"}, vacuum=True, everything=True).rows == 95
    assert (seen(root), verify(root, full=True).problems) == ([], [])
    assert lake_status(root).rows == 0
    assert list(root.rglob("*.parquet")) == []


def put_after(root: Path, claim: str, numbers: Sequence[int]) -> None:
    """As if Spark had planned these events for a later range."""
    later = ClusterTime.of(MIDNIGHT + 90_000, 1)
    put(root, claim, 10, stage(root, numbers), as_spark_plans(root, 10, PlannedRange(later, later.tick())))


def test_old_days_go_whole(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    fill(root)
    report = drop_days(root, date(2026, 11, 22))
    assert (report.rows, report.removed) == (50, 0)
    assert seen(root) == EVERYTHING[50:]
    assert verify(root, full=True).problems == []
    assert drop_days(root, date(2026, 11, 22), vacuum=True).rows == 0
    assert not (root / "day=2026-11-21").exists() or list((root / "day=2026-11-21").iterdir()) == []
    drop_days(root, date(2026, 12, 1), vacuum=True)
    (erasure,) = verify(root, full=True).erasures
    assert (erasure.rows, erasure.before) == (100, "2026-12-01"), "dropped days add up to one entry"


def test_erasures_and_gaps_outlive_the_commits_that_the_log_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lake.store.commit_log.CHECKPOINT_EVERY", 4)
    monkeypatch.setattr("tailrace.lake.store.commit_log.COMMITS_KEPT", 4)
    root = tmp_path / "lake"
    fill(root)
    erase(root, {"documentKey._id": 86_351}, vacuum=True)
    gap = Gap(token(86_449), ClusterTime.of(MIDNIGHT + 86_449, 1), ClusterTime.of(MIDNIGHT + 90_000, 1))
    claim = open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS, gap=gap).claim
    erase(root, {"documentKey._id": 86_352}, vacuum=True)
    for number in range(12):
        assert put(root, claim, number, stage(root, [90_001 + number])) is not None
    found = verify(root, full=True)
    assert found.problems == []
    assert ([one.rows for one in found.erasures], [one.until for one in found.gaps]) == ([1, 1], [gap.until])
    from deltalake import DeltaTable

    assert DeltaTable(root).metadata().configuration["delta.appendOnly"] == "false"


@pytest.mark.parametrize("step", ["erasure.files", "commit.log", "commit.head"])
def test_a_crash_in_the_middle_leaves_all_or_none(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill no ``except`` runs: new files stay, and the next start of a stream removes them."""
    root = tmp_path / "lake"
    fill(root)
    monkeypatch.setattr("tailrace.lake.store.erasure._Work.discard", lambda self: None)

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            erase(root, {"fullDocument.who": SECRET.decode()})
    finally:
        durable.observe_steps(lambda _: None)
    open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS)
    assert seen(root) == (EVERYTHING if step == "erasure.files" else [n for n in EVERYTHING if n % 10])
    found = verify(root, full=True)
    assert (found.problems, found.leftovers) == ([], 0)


def test_a_stream_commits_while_events_are_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the search and the commit a micro-batch comes, with an event to erase in it."""
    root = tmp_path / "lake"
    claim = fill(root)
    search, calls = CommitLog.state, []

    def state(self: CommitLog, version: int | None = None) -> Any:
        found = search(self, version)
        if not calls:
            calls.append(1)
            put(root, claim, 10, stage(root, range(86_450, 86_460)))
        return found

    monkeypatch.setattr(CommitLog, "state", state)
    assert erase(root, {"fullDocument.who": SECRET.decode()}).rows == 11
    assert seen(root) == [n for n in [*EVERYTHING, *range(86_450, 86_460)] if n % 10]
    assert verify(root, full=True).problems == []


def test_what_cannot_be_erased_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    fill(root)
    before = CommitLog(root).head()
    report = erase(root, {"documentKey._id": "nobody"})
    assert (report.rows, report.files, report.searched, report.first_token) == (0, 0, 100, None)
    assert drop_days(root, date(2020, 1, 1)).rows == 0
    # Only the empty document was refused before: these also say nothing about an event, or are true of every one.
    for everything in ({}, {"$comment": "Anna asked"}, {"$and": [{}, {"$comment": "x"}]}, {"$expr": True}):
        with pytest.raises(UsageError, match="would erase every event"):
            erase(root, everything)
    for selecting in ({"token": {"$exists": False}}, {"_id": {"$exists": True}}, {"ns.db": "shop"}):
        with pytest.raises(UsageError, match="selects all 100 of them"):
            erase(root, selecting)
    with pytest.raises(UsageError, match="unknown top level operator"):
        erase(root, {"$were": 1})
    for value in (1 << 80, object(), {1: 2}):  # only values that BSON has were tried before
        with pytest.raises(UsageError, match="cannot be written as BSON"):
            erase(root, {"a": value})
    with pytest.raises(UsageError, match="not a lake"):
        erase(tmp_path / "nothing", {"a": 1})
    victim = root / CommitLog(root).live_files()[3].name
    content = victim.read_bytes()
    victim.write_bytes(content[:100])
    with pytest.raises((SinkError, OSError, pa.ArrowException)):
        erase(root, {"fullDocument.who": SECRET.decode()})
    victim.write_bytes(content)
    assert CommitLog(root).head() == before
    assert verify(root, full=True).problems == []
    assert verify(root).leftovers == 0, "files that were made already are gone again"
    held = root / "_tailrace" / "lake.json"
    known = json.loads(held.read_text())
    known.pop("sha256")
    durable.write_sealed(held, {**known, "stream": {**known["stream"], "columns": ["token"]}})
    with pytest.raises(UsageError, match="no column 'event'"):
        erase(root, {"a": 1})


def test_the_command_line_erases_and_says_what_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "lake"
    fill(root)
    match = json.dumps({"ns.coll": NAMES[86_350 % 3], "documentKey._id": {"$numberLong": "86350"}})
    assert main(["lake", "erase", str(root), "--match", match]) == 0
    said = capsys.readouterr().out
    assert "1 event erased, of 100, in 1 file" in said
    assert f"1 replaced file may still hold erased events (tailrace lake expire {root} --keep 0s" in said
    (tmp_path / "match.json").write_text('{"fullDocument.who": "anna@example.com"}')
    assert main(["lake", "erase", str(root), "--match", f"@{tmp_path / 'match.json'}", "--vacuum"]) == 0
    said = capsys.readouterr().out
    assert "9 events erased, of 99" in said
    assert "replaced files removed" in said
    assert "anna" not in said
    assert main(["lake", "expire", str(root), "--older-than", "3650d", "--keep", "0s"]) == 0
    assert main(["lake", "status", str(root)]) == 0
    said = capsys.readouterr().out
    assert "erasure: 1 event that was chosen by what it holds, on " in said
    assert "erasure: 9 events that were chosen by what they hold, on " in said
    assert main(["lake", "verify", str(root), "--full"]) == 0
    for arguments, message, status in (
        (["erase", str(root)], "needs --match", 2),
        (["erase", str(root), "--match", "{"], "--match is not Extended JSON", 2),
        (["erase", str(root), "--match", "3"], "--match must be a document", 2),
        (["erase", str(root), "--match", "@nothing"], "cannot be read from the file 'nothing'", 2),
        (["erase", str(root), "--match", "{}"], "would erase every event", 1),
        (["erase", str(root), "--match", '{"ns.db": "shop"}'], "tailrace lake erase --all", 1),
        (["status", str(root), "--dry-run"], "--dry-run belongs to tailrace lake erase", 2),
        (["compact", str(root), "--all"], "--all belongs to tailrace lake erase", 2),
        (["verify", str(root), "--match", "{}"], "belongs to tailrace lake erase", 2),
        (["expire", str(root), "--older-than", "soon"], "not a duration", 1),
        (["expire", str(root), "--vacuum"], "belongs to tailrace lake erase", 2),
    ):
        assert main(["lake", *arguments]) == status
        assert message in capsys.readouterr().err
    assert hers(root) == []


def test_a_dry_run_shows_what_would_go_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "lake"
    fill(root, ("collection",))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    expected = [n for n in EVERYTHING if n % 10 == 0]
    assert main(["lake", "erase", str(root), "--match", '{"fullDocument.who": "anna@example.com"}', "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "10 events of 100 would be erased, in 10 files; nothing was changed"
    counts = {f"  shop.{name}: {sum(NAMES[n % 3] == name for n in expected)} events" for name in NAMES}
    assert set(said[1:4]) == counts
    names = {file.name for file in CommitLog(root).live_files()}
    assert all(line.split(":")[0].strip() in names and ": 1 of " in line for line in said[4:])
    assert len(said) == 14
    assert main(["lake", "erase", str(root), "--match", "{}", "--dry-run"]) == 0
    assert "100 events of 100 would be erased" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert after == before


def test_everything_goes_only_if_that_is_said(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = fill(root)
    assert erase(root, {"$comment": "all of it"}, everything=True).rows == 100
    assert seen(root) == []
    put(root, claim, 10, stage(root, range(86_450, 86_460)))
    assert seen(root) == list(range(86_450, 86_460))
    assert main(["lake", "erase", str(root), "--match", "{}", "--all", "--vacuum"]) == 0
    assert verify(root, full=True).problems == []
