"""The commit of a changed lake: complete or absent, whatever is killed, and closed to the lake's former stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.changed_rows import compared, rewritten
from tailrace.lake.store.changing import changed_name, commit_change, discard, lake_before, set_superseded_aside
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import drop_days
from tailrace.lake.store.identity import open_lake, read_identity
from tailrace.lake.store.lake_root import LakeRoot
from tailrace.lake.store.layout import cluster_time_of
from tailrace.lake.store.manifest import LakeChange, PlannedRange
from tailrace.lake.store.part_writer import PartWriter
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tests.unit.lake_events import COLUMNS, STREAM, batch, begin, make, numbers_in, put, stage, token

WIDER = {**STREAM, "settings": {"scope": "shop"}}
CLAIM = "the claim of the change"
UNTIL = cluster_time_of(token(60))
STEPS = ("change.files", "change.noted", "commit.log", "commit.head", "change.identity", "change.checkpoint")


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Every second event of the first 60, in three micro-batches."""
    root, checkpoint = tmp_path / "lake", tmp_path / "lake.checkpoint"
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    for number in range(3):
        numbers = range(number * 20, number * 20 + 20, 2)
        assert put(root, claim, number, stage(root, numbers, stem=str(number))) is not None
    return root


def widen(root: LakeRoot, numbers: range = range(60), *, checkpoint: Path | None = None, claim: str = CLAIM) -> None:
    """Add the other events."""
    with lake_before(root) as before:
        made = PartWriter(root, "merge-x", name=changed_name).write_all([batch(numbers)])
        try:
            found = compared(before, before.state.in_order, made, ["token", "event"], keep=True)
            change = LakeChange(claim, ("settings.scope",), cluster_time_of(token(0)), UNTIL, found.added)
            commit_change(before, change, WIDER, COLUMNS, gone=found.gone, made=found.made)
        finally:
            discard(before, made)
    set_superseded_aside(root, checkpoint or before.log.layout.default_checkpoint)


def killed_at(root: Path, step: str) -> None:
    pid = os.fork()
    if pid == 0:
        durable.observe_steps(lambda name: os._exit(9) if name == step else None)
        widen(root)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 9


def put_on(root: Path, checkpoint: Path, stream: dict[str, object]) -> None:
    """A stream goes on."""
    opening = open_lake(root, checkpoint, stream, COLUMNS)
    begin(checkpoint)
    assert put(root, opening.claim, 0, stage(root, range(61, 63), stem="more")) is not None


@pytest.mark.parametrize("step", STEPS)
def test_a_change_that_is_killed_has_happened_as_a_whole_or_not_at_all(lake: Path, tmp_path: Path, step: str) -> None:
    killed_at(lake, step)
    done = STEPS.index(step) >= STEPS.index("commit.log")
    assert numbers_in(lake) == list(range(60) if done else range(0, 60, 2))
    assert verify(lake, full=True).problems == []
    known = read_identity(lake)
    assert known is not None
    assert (known["stream"] == WIDER) is done
    assert (known["claim"] == CLAIM) is done
    if done:
        with pytest.raises(UsageError, match=r"settings\.scope is .* there and .* here"):
            open_lake(lake, tmp_path / "lake.checkpoint", STREAM, COLUMNS)
        if step != "change.checkpoint":
            with pytest.raises(UsageError, match="was superseded"):
                open_lake(lake, tmp_path / "lake.checkpoint", WIDER, COLUMNS)
            set_superseded_aside(lake, tmp_path / "lake.checkpoint")  # as the same command does
        put_on(lake, tmp_path / "lake.checkpoint", WIDER)
        assert numbers_in(lake) == [*range(60), 61, 62]
    else:
        put_on(lake, tmp_path / "another", STREAM)
        assert numbers_in(lake) == [*range(0, 60, 2), 61, 62]
    report = verify(lake, full=True)
    assert (report.problems, report.leftovers) == ([], 0)  # the start has removed what no commit names
    assert len(report.changes) == done


def test_a_note_whose_change_has_not_happened_never_counts(lake: Path, tmp_path: Path) -> None:
    """The old stream goes on, and its next commit takes the number meant for the change."""
    killed_at(lake, "change.noted")
    claim = str((read_identity(lake) or {})["claim"])
    assert put(lake, claim, 3, stage(lake, range(61, 63), stem="more")) is not None
    compact(lake)
    assert (read_identity(lake) or {})["stream"] == STREAM
    open_lake(lake, tmp_path / "another", STREAM, COLUMNS)
    assert b"changing" not in CommitLog(lake).layout.identity.read_bytes()


@pytest.mark.parametrize("older", ["lake.json", "lake.json and head.json"])
def test_an_older_lake_json_is_refused_after_a_change(lake: Path, tmp_path: Path, older: str) -> None:
    """Nothing had said so, and nobody had put it back in a test: the old stream went on in the changed lake."""
    names = ["lake.json", "head.json"][: older.count("json")]
    held = {name: (lake / "_tailrace" / name).read_bytes() for name in names}
    widen(lake)
    newer = (lake / "_tailrace" / "lake.json").read_bytes()
    for name, content in held.items():
        (lake / "_tailrace" / name).write_bytes(content)
    for fresh, stream in (("one", STREAM), ("other", WIDER)):
        with pytest.raises((SinkError, UsageError), match=r"older than the lake's log|belongs to another stream"):
            open_lake(lake, tmp_path / fresh, stream, COLUMNS)
    with pytest.raises(SinkError, match="older than the lake's log"):
        widen(lake)
    assert "is older than the lake's log" in verify(lake).problems[0]
    (lake / "_tailrace" / "lake.json").write_bytes(newer)
    put_on(lake, tmp_path / "fresh", WIDER)
    assert verify(lake, full=True).problems == []


@pytest.mark.parametrize("head", ["newest", "older", "of an earlier release", "lost"])
def test_a_running_stream_of_the_old_lake_json_is_stopped(lake: Path, head: str) -> None:
    """Only openings were compared with the log: a stream that ran through the change, and through the copy of
    ``lake.json`` that was put back after it, added events of the old stream. No test had left a stream running."""
    identity, witness = CommitLog(lake).layout.identity, CommitLog(lake).layout.head
    older, claim = identity.read_bytes(), str((read_identity(lake) or {})["claim"])
    assert isinstance(witness, Path)
    heads = {"older": witness.read_bytes(), "lost": None}
    widen(lake)
    identity.write_bytes(older)  # type: ignore[union-attr]
    if head == "of an earlier release":
        known = durable.read_sealed(witness) or {}
        del known["changed"]
        durable.write_sealed(witness, known)
    elif head != "newest" and (content := heads[head]) is not None:
        witness.write_bytes(content)
    elif head == "lost":
        witness.unlink()
    for numbers in (range(61, 63), range(0)):
        with pytest.raises(SinkError, match="is older than the lake's log"):
            put(lake, claim, 3, stage(lake, numbers, stem="more") if numbers else ())
    with pytest.raises(SinkError, match="is older than the lake's log"):
        drop_days(lake, date(2100, 1, 1))
    assert numbers_in(lake) == list(range(60))


def test_a_lake_json_that_is_exchanged_while_a_stream_waits_for_the_lock(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read before the lock was taken: another stream could be given the lake meanwhile, and what was read was
    written over it. Two openings had not met in a test."""
    place = CommitLog(lake).layout.identity
    begun: list[str] = []

    @contextmanager
    def locked(path: Path, **how: Any) -> Iterator[bool]:
        if not begun:
            begun.append("the other")
            begun.append(open_lake(lake, tmp_path / "other", STREAM, COLUMNS).claim)
            known = durable.read_sealed(place) or {}  # type: ignore[arg-type]
            durable.write_sealed(place, {**known, "later": "kept"})  # type: ignore[arg-type]
        with straight(path, **how) as mine:
            yield mine

    straight = durable.locked
    monkeypatch.setattr(durable, "locked", locked)
    with pytest.raises(UsageError, match="was superseded"):
        open_lake(lake, tmp_path / "lake.checkpoint", STREAM, COLUMNS)
    begun.clear()
    fresh = open_lake(lake, tmp_path / "fresh", STREAM, COLUMNS)
    known = durable.read_sealed(place) or {}  # type: ignore[arg-type]
    assert (known["claim"], known["later"]) == (fresh.claim, "kept")


def test_a_changed_lake_goes_on_where_its_stream_stood(lake: Path, tmp_path: Path) -> None:
    """The change has already added what the wider stream gives after the last event, up to there."""
    widen(lake)
    opening = open_lake(lake, tmp_path / "fresh", WIDER, COLUMNS)
    assert (opening.after, opening.start) == (token(59), UNTIL.tick())
    # If that checkpoint is lost before its first event, the next one begins there again; after an event, at the event.
    assert open_lake(lake, tmp_path / "second", WIDER, COLUMNS).start == UNTIL.tick()
    put_on(lake, tmp_path / "third", WIDER)
    assert open_lake(lake, tmp_path / "fourth", WIDER, COLUMNS).start is None


def test_files_to_which_nothing_is_added_stay_and_compaction_goes_on(lake: Path) -> None:
    held = {file.name for file in CommitLog(lake).live_files()}
    with lake_before(lake) as before:
        made = PartWriter(lake, "merge-x", name=changed_name).write_all([batch(range(0, 60, 2))])
        found = compared(before, before.state.in_order, made, ["token", "event"], keep=True)
        assert (found.gone, found.made, found.unneeded, found.added) == ((), (), made, 0)
        discard(before, made)
    assert {file.name for file in CommitLog(lake).live_files()} == held
    widen(lake)
    put_on(lake, lake.with_name("fresh"), WIDER)
    compact(lake)
    assert verify(lake, full=True).problems == []
    assert numbers_in(lake) == [*range(60), 61, 62]


def test_a_stream_that_starts_meanwhile_takes_nothing_away(lake: Path, tmp_path: Path) -> None:
    """It removes leftovers, and takes the lake over; until it commits something, the change goes on."""
    with lake_before(lake) as before:
        made = PartWriter(lake, "merge-x", name=changed_name).write_all([batch(range(60))])
        opening = open_lake(lake, tmp_path / "another", STREAM, COLUMNS)
        found = compared(before, before.state.in_order, made, ["token", "event"], keep=True)
        change = LakeChange(CLAIM, ("settings.scope",), cluster_time_of(token(0)), UNTIL, found.added)
        commit_change(before, change, WIDER, COLUMNS, gone=found.gone, made=found.made)
    assert numbers_in(lake) == list(range(60))
    with pytest.raises(SinkError, match="another checkpoint has taken over"):
        put(lake, opening.claim, 0, stage(lake, range(61, 63), stem="more"))
    assert verify(lake, full=True).problems == []


@pytest.mark.parametrize("numbers", [range(0, 58, 2), range(2, 60, 2), range(0, 60, 4), range(60, 120)])
def test_a_lake_loses_no_event_by_a_change(lake: Path, numbers: range) -> None:
    with pytest.raises(UsageError, match="is not among those of the new stream"):
        widen(lake, numbers)
    assert numbers_in(lake) == list(range(0, 60, 2))
    assert verify(lake).leftovers == 0


def test_other_bytes_of_an_event_are_noticed(lake: Path) -> None:
    with lake_before(lake) as before:
        made = PartWriter(lake, "merge-x", name=changed_name).write_all([batch(range(60), payload=21)])
        with pytest.raises(UsageError, match="or is another one there"):
            compared(before, before.state.in_order, made, ["token", "event"], keep=True)


def test_rows_that_are_lost_while_files_are_written_anew_are_noticed(lake: Path) -> None:
    def fewer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (one.slice(1) for one in batches)

    with lake_before(lake) as before, pytest.raises(SinkError, match="does not hold the 10 rows that the log says"):
        list(rewritten(before, ["token", "event"], fewer, {}))


def test_the_log_knows_the_change_when_it_has_forgotten_its_commit(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.lake.store.commit_log.CHECKPOINT_EVERY", 5)
    monkeypatch.setattr("tailrace.lake.store.commit_log.COMMITS_KEPT", 2)
    killed_at(lake, "commit.head")  # lake.json has the note only
    checkpoint = lake.with_name("fresh")
    opening = open_lake(lake, checkpoint, WIDER, COLUMNS)
    begin(checkpoint)
    for number in range(8):
        files = stage(lake, range(61 + 2 * number, 63 + 2 * number), stem=str(number))
        assert put(lake, opening.claim, number, files) is not None
    assert not CommitLog(lake).layout.commit(4).exists()
    (change,) = lake_status(lake).changes
    assert (change.since, change.until, change.rows) == (cluster_time_of(token(0)), UNTIL, 30)
    assert CommitLog(lake).state().begins == ClusterTime(int(cluster_time_of(token(0))) - (1 << 32))


@pytest.mark.parametrize(
    ("versions", "begins"),
    [
        (("", "6.0", "6.0"), 0),
        (("", "", ""), 0),
        (("6.0", "6.0", "7.0"), 2),  # what came before would have been other events
        (("5.0", "6.0", "6.0"), 1),
        (("", "6.0", "7.0"), 2),
    ],
)
def test_a_lake_says_where_the_events_of_its_version_begin(
    tmp_path: Path, versions: tuple[str, str, str], begins: int
) -> None:
    """Its first micro-batches have no events."""
    root, checkpoint = tmp_path / "lake", tmp_path / "lake.checkpoint"
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    times = [cluster_time_of(token(number)) for number in (0, 10, 20, 30)]
    for number, version in enumerate(versions):
        planned = PlannedRange(times[number], times[number + 1], server_version=version)
        files = stage(root, range(25, 30)) if number == 2 else ()
        put(root, claim, number, files, planned)
    assert CommitLog(root).state().begins == times[begins]
    assert verify(root, full=True).problems == []
