"""A lake in a real object store: every event once and in order, whatever dies, is lost or is written twice; or a
refusal.

The tests of lakes in a directory are tests/unit/test_lake_*.py; these cover what is different in a store.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import obstore
import polars
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError, object_place
from tailrace.cli.main import main
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.lake.store import commit_log, part_writer
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import abort_batch, commit_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import drop_days, erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.lake_root import writable_root
from tailrace.lake.store.layout import LakeLayout
from tailrace.lake.store.manifest import Commit
from tailrace.lake.store.retention import expire
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tests.tables.object_server import REPEATED, SECRET, ObjectServer, as_given, held_in, put_back
from tests.tables.unkind_proxy import Fault, UnkindProxy
from tests.unit import test_lake_erasure
from tests.unit.lake_events import COLUMNS, STREAM, as_spark_plans, begin, make, planned_for, stage


@pytest.fixture
def root(object_store: ObjectServer, prefix: str, tmp_path: Path) -> ObjectPlace:
    return object_store.place(prefix, tmp_path / "state")


def put(root: Any, claim: str, number: int, numbers: range, checkpoint: Path | None = None) -> Commit | None:
    """A micro-batch as Spark gives it, of new files each time."""
    files = stage(root, numbers, stem=os.urandom(4).hex())
    planned = as_spark_plans(root, number, planned_for(files))
    return commit_batch(root, claim, number, planned, files, checkpoint=checkpoint)


def opened(root: Any, checkpoint: Path) -> str:
    """Open the lake as a stream does, and leave what Spark leaves."""
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    return claim


def table_of(root: ObjectPlace) -> DeltaTable:
    return DeltaTable(root.as_uri(), storage_options=dict(root.bucket.options))


def numbers_in(root: ObjectPlace) -> list[int]:
    """What a reader without Tailrace finds."""
    return list(table_of(root).to_pyarrow_table(columns=["token", "number"]).sort_by("token")["number"].to_pylist())


def data_files(root: ObjectPlace) -> set[str]:
    return {one.name for one in root.objects() if one.name.startswith("day=")}


def die_at(target: str, times: int, work: Callable[[], object]) -> int:
    """Run ``work`` in a process that SIGKILLs itself at the ``times``-th ``target``. Returns its exit code. It is not
    forked, since the store's library has threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_dying, args=(target, times, work))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _dying(target: str, times: int, work: Callable[[], object]) -> None:
    left = times

    def observe(step: str) -> None:
        nonlocal left
        left -= step == target
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    durable.observe_steps(observe)
    work()


# -- the same as in a directory ---------------------------------------------------------------------------------------


def test_every_reader_finds_what_a_lake_in_a_directory_has(
    root: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits, checkpoints of the log, compaction, erasure, expiry: the same rows, names aside, from every reader."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 5)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 6)
    monkeypatch.setattr(part_writer, "_WHOLE_MAX", 1300)  # larger objects are read in parts
    local = tmp_path / "local" / "lake"
    for place, checkpoint in ((root, tmp_path / "one"), (local, tmp_path / "other")):
        claim = opened(place, checkpoint)
        for number in range(14):
            start = 86_400 - 70 + number * 10
            put(place, claim, number, range(start, start + 10), checkpoint)
        assert compact(place, retention=timedelta(0)).files_after == 2
        assert drop_days(place, _second_day()).rows == 70
        assert expire(place, timedelta(0)) == 1
        assert verify(place, full=True, checkpoint=checkpoint).problems == []
    expected = list(range(86_400, 86_470))
    assert numbers_in(root) == expected
    uri, options = root.as_uri(), as_given(root)
    frame = polars.scan_delta(uri, storage_options=options).sort("token").select("number", "event", "day").collect()
    truth = polars.scan_delta(str(local)).sort("token").select("number", "event", "day").collect()
    assert frame.equals(truth)
    lake = table_of(root).to_pyarrow_dataset()
    assert lake.count_rows() == duckdb.sql("SELECT count(DISTINCT token) FROM lake").fetchall()[0][0] == 70  # type: ignore[index]
    assert len(data_files(root)) == 1
    names = {one.name for one in root.objects() if one.name.startswith("_delta_log/")}
    assert any(".checkpoint." in name for name in names)
    assert len(names) < 14, "the log is kept short"
    one, other = lake_status(root), lake_status(local)
    assert (one.rows, one.files, one.days, one.last_token) == (other.rows, other.files, other.days, other.last_token)


def _second_day() -> Any:
    from datetime import date

    return date(2026, 11, 22)


def test_events_are_erased_and_no_object_holds_them(root: ObjectPlace, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    claim = open_lake(root, checkpoint, STREAM, test_lake_erasure.LAKE_COLUMNS).claim
    files = test_lake_erasure.stage(root, range(40))
    commit_batch(root, claim, 0, planned_for(files), files, checkpoint=checkpoint)
    done = erase(root, {"fullDocument.who": test_lake_erasure.SECRET.decode()}, vacuum=True)
    assert (done.rows, done.kept, done.removed, done.replaced) == (4, 36, 1, 0)
    assert numbers_in(root) == [number for number in range(40) if number % 10]
    for name in data_files(root):
        with pq.ParquetFile((root / name).open()) as file:
            assert not any(test_lake_erasure.SECRET in one for one in file.read()["event"].to_pylist())
    assert verify(root, full=True, checkpoint=checkpoint).problems == []


def test_documents_are_erased_by_name(
    object_store: ObjectServer, root: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    checkpoint = tmp_path / "checkpoint"
    claim = open_lake(root, checkpoint, STREAM, test_lake_erasure.LAKE_COLUMNS).claim
    files = test_lake_erasure.stage(root, range(40))
    commit_batch(root, claim, 0, planned_for(files), files, checkpoint=checkpoint)
    documents = [("--document", f"shop.{test_lake_erasure.NAMES[n % 3]}", str(n)) for n in range(0, 40, 10)]
    named = ["erase", *(word for one in documents for word in one), "--lake", root.as_uri()]
    assert main(named) == 1  # no state
    state = ["--state", str(tmp_path / "state")]
    assert main([*named, *state, "--dry-run"]) == 1
    assert numbers_in(root) == list(range(40))
    assert main([*named, *state]) == 0
    assert numbers_in(root) == [number for number in range(40) if number % 10]
    for name in data_files(root):
        with pq.ParquetFile((root / name).open()) as file:
            assert not any(test_lake_erasure.SECRET in one for one in file.read()["event"].to_pylist())
    assert verify(root, full=True, checkpoint=checkpoint).problems == []


def test_nothing_holds_a_key(root: ObjectPlace, tmp_path: Path) -> None:
    claim = opened(root, tmp_path / "checkpoint")
    put(root, claim, 0, range(10), tmp_path / "checkpoint")
    local = b"".join(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())
    assert SECRET.encode() not in b"".join(held_in(root).values()) + local
    assert list((tmp_path / "state" / "uploads").iterdir()) == []


def keys_from(object_store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variables by which commands and tasks find the store."""
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["commit.files", "commit.log", "commit.head", "commit.checkpoint"])
def test_a_commit_that_is_killed(root: ObjectPlace, tmp_path: Path, step: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    claim = opened(root, checkpoint)
    put(root, claim, 0, range(10), checkpoint)
    arguments = (root.as_uri(), str(tmp_path / "state"), dict(root.bucket.options), claim, checkpoint)
    assert die_at(step, 1, _Commit(*arguments)) == -signal.SIGKILL
    assert numbers_in(root) == list(range(10 if step == "commit.files" else 20))
    assert opened(root, checkpoint) == claim
    replayed = put(root, claim, 1, range(10, 20), checkpoint)
    assert (replayed is None) == (step != "commit.files")
    assert numbers_in(root) == list(range(20))
    put(root, claim, 2, range(20, 30), checkpoint)
    assert numbers_in(root) == list(range(30))
    assert len(data_files(root)) == 3, "the killed task's file was left"
    assert verify(root, full=True, checkpoint=checkpoint).problems == []


class _Commit:
    """A micro-batch in another process, which has to open the store itself."""

    def __init__(self, uri: str, state: str, options: dict[str, str], claim: str, checkpoint: Path) -> None:
        self.arguments = uri, state, options, claim, checkpoint

    def place(self) -> ObjectPlace:
        uri, state, options, _, _ = self.arguments
        options = {name: value for name, value in options.items() if name not in REPEATED}
        return object_place(uri, beside=Path(state), options=options)

    def __call__(self) -> None:
        put(self.place(), self.arguments[-2], 1, range(10, 20), self.arguments[-1])


@pytest.mark.parametrize("step", ["claim.checkpoint", "claim.lake", "commit.log", "commit.head", "claim.start"])
def test_an_opening_that_is_killed(root: ObjectPlace, tmp_path: Path, step: str) -> None:
    old, fresh = tmp_path / "old", tmp_path / "fresh"
    claim = opened(root, old)
    put(root, claim, 0, range(10), old)
    work = _Open(root.as_uri(), str(tmp_path / "state"), dict(root.bucket.options), claim, fresh)
    assert die_at(step, 1, work) == -signal.SIGKILL
    newer = opened(root, fresh)
    assert newer != claim
    with pytest.raises(UsageError, match="superseded"):
        make(root, old)
    with pytest.raises(SinkError, match="another checkpoint has taken over"):
        put(root, claim, 1, range(10, 20), old)
    put(root, newer, 0, range(10, 20), fresh)
    assert numbers_in(root) == list(range(20))
    assert len(data_files(root)) == 3
    assert opened(root, fresh) == newer
    assert len(data_files(root)) == 2
    assert verify(root, full=True, checkpoint=fresh).problems == []


class _Open(_Commit):
    """A stream with a fresh checkpoint, in another process."""

    def __call__(self) -> None:
        make(self.place(), self.arguments[-1])


@pytest.mark.parametrize("step", ["claim.checkpoint", "claim.lake", "commit.log", "commit.head"])
def test_a_making_that_is_killed(root: ObjectPlace, tmp_path: Path, step: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    work = _Open(root.as_uri(), str(tmp_path / "state"), dict(root.bucket.options), "", checkpoint)
    assert die_at(step, 1, work) == -signal.SIGKILL
    claim = opened(root, checkpoint)
    put(root, claim, 0, range(10), checkpoint)
    assert numbers_in(root) == list(range(10))
    assert verify(root, full=True, checkpoint=checkpoint).problems == []


def test_a_compaction_that_is_killed(root: ObjectPlace, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    claim = opened(root, checkpoint)
    for number in range(3):
        put(root, claim, number, range(number * 10, number * 10 + 10), checkpoint)
    work = _Compact(root.as_uri(), str(tmp_path / "state"), dict(root.bucket.options), claim, checkpoint)
    assert die_at("compaction.merged", 1, work) == -signal.SIGKILL
    assert len(data_files(root)) == 4
    assert verify(root).leftovers == 1
    opened(root, checkpoint)
    assert len(data_files(root)) == 3
    assert compact(root).files_after == 1
    assert numbers_in(root) == list(range(30))


class _Compact(_Commit):
    """A compaction by hand."""

    def __call__(self) -> None:
        compact(self.place())


# -- what stores and networks do --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        ("lost", 1 << 30),
        *(pytest.param(fault, 4, marks=pytest.mark.slow) for fault in ("lost", "cut", "slow down")),  # the same, longer
    ],
)
def test_a_bad_day(object_store: ObjectServer, prefix: str, tmp_path: Path, fault: Fault, every: int) -> None:
    """The first try to write each object goes wrong, and so does every fourth request, whatever it is."""
    tried: set[str] = set()

    def chosen(number: int, method: str, path: str) -> Fault | None:
        is_first = method == "PUT" and path not in tried
        tried.update([path] if method == "PUT" else ())
        return fault if is_first or number % every == 0 else None

    straight, checkpoint = object_store.place(prefix, tmp_path / "state"), tmp_path / "checkpoint"
    with UnkindProxy(object_store.address, chosen) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        claim = opened(root, checkpoint)
        for number in range(3):
            put(root, claim, number, range(number * 10, number * 10 + 10), checkpoint)
        assert opened(root, checkpoint) == claim
        put(root, claim, 3, range(30, 40), checkpoint)
        assert compact(root).files_after == 1
        assert proxy.faults[fault] > 10
    assert numbers_in(straight) == list(range(40))
    assert CommitLog(straight).head().number == 6, "a commit was written twice"
    assert verify(straight, full=True, checkpoint=checkpoint).problems == []


@pytest.mark.parametrize("places", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_store_that_does_not_answer_is_no_damage(
    object_store: ObjectServer, prefix: str, tmp_path: Path, places: int
) -> None:
    """Wherever in a micro-batch or a start the store goes away, that ends with an error, and the next start goes on."""
    away = never = 1 << 30
    checkpoint = tmp_path / "checkpoint"
    with UnkindProxy(object_store.address, lambda number, *_: "cut" if number >= away else None) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address, retry_s=0.0)
        claim, done = opened(root, checkpoint), 0

        def work() -> None:
            opened(root, checkpoint)
            put(root, claim, done, range(done * 10, done * 10 + 10), checkpoint)

        before = proxy.requests
        work()
        requests, done = proxy.requests - before, 1
        for turn in range(places):
            away = proxy.requests + 1 + turn * requests // places
            with pytest.raises(StoreAwayError) as caught:
                work()
            assert SECRET not in f"{caught.value} {caught.value.hint}"
            away = never
            work()
            done += 1
        assert numbers_in(root) == list(range(done * 10))
        opened(root, checkpoint)
        assert len(data_files(root)) == done
        assert verify(root, full=True, checkpoint=checkpoint).problems == []


def test_a_store_that_ignores_conditions_is_refused(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    with (
        UnkindProxy(object_store.address, lambda *_: "no condition") as proxy,
        pytest.raises(SinkError, match="overwrites an object"),
    ):
        make(object_store.place(prefix, tmp_path / "state", address=proxy.address), tmp_path / "checkpoint")
    assert not held_in(object_store.place(prefix, tmp_path / "state"))


# -- writers ----------------------------------------------------------------------------------------------------------


def test_the_stream_on_another_machine_takes_over(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    claim = opened(one, tmp_path / "first")
    put(one, claim, 0, range(10), tmp_path / "first")
    staged = stage(one, range(10, 20), stem="late")
    newer = opened(other, tmp_path / "second")
    assert len(data_files(one)) == 1, "what no commit can name any more is removed"
    with pytest.raises(SinkError, match="another state directory"):
        commit_batch(one, claim, 1, planned_for(staged), staged, checkpoint=tmp_path / "first")
    for refused in (compact, lambda root: expire(root, timedelta(0)), lambda root: drop_days(root, _second_day())):
        with pytest.raises(SinkError, match="another state directory"):
            refused(one)
    put(other, newer, 0, range(10, 20), tmp_path / "second")
    assert numbers_in(one) == list(range(20))
    assert verify(one, full=True, checkpoint=tmp_path / "first").problems == []


def test_a_writer_that_does_not_see_the_other_cannot_commit(
    object_store: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checked ``lake.json`` and its files just before the other stream came: the commit's number decides. No commit
    names removed files."""
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    claim = opened(one, tmp_path / "first")
    put(one, claim, 0, range(10), tmp_path / "first")

    def come(step: str) -> None:
        if step == "commit.files":
            durable.observe_steps(None)
            opened(other, tmp_path / "second")

    durable.observe_steps(come)
    try:
        with pytest.raises(SinkError, match="another program has written"):
            put(one, claim, 1, range(10, 20), tmp_path / "first")
    finally:
        durable.observe_steps(None)
    newer = opened(other, tmp_path / "second")
    put(other, newer, 0, range(10, 20), tmp_path / "second")
    assert numbers_in(other) == list(range(20))
    assert verify(other, full=True, checkpoint=tmp_path / "second").problems == []


def test_a_stream_that_comes_while_another_commits_starts_again(
    object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    claim = opened(one, tmp_path / "first")
    put(one, claim, 0, range(10), tmp_path / "first")
    late = stage(one, range(10, 20), stem="late")
    head = CommitLog(one).head()

    def come(step: str) -> None:
        if step == "claim.lake":  # the other one had looked before
            durable.observe_steps(None)
            mark = commit_log.BatchMark(
                head.number + 1, claim, 1, planned_for(late), late[0].first_token, late[0].last_token, 10
            )
            CommitLog(one).write(commit_log.append_commit(head, claim, 1, mark, late))

    durable.observe_steps(come)
    try:
        with pytest.raises(SinkError, match="another stream was still writing"):
            opened(other, tmp_path / "second")
    finally:
        durable.observe_steps(None)
    assert open_lake(other, tmp_path / "second", STREAM, COLUMNS).after == late[0].last_token
    assert numbers_in(one) == list(range(20))


def test_two_streams_that_open_the_lake_at_one_moment(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    put(one, opened(one, tmp_path / "first"), 0, range(10), tmp_path / "first")
    claims = []

    def come(step: str) -> None:
        if step == "claim.checkpoint":
            durable.observe_steps(None)
            claims.append(opened(other, tmp_path / "second"))

    durable.observe_steps(come)
    try:
        with pytest.raises(SinkError, match="another program has changed"):
            make(one, tmp_path / "third")
    finally:
        durable.observe_steps(None)
    put(other, claims[0], 0, range(10, 20), tmp_path / "second")
    assert numbers_in(other) == list(range(20))


def test_a_late_head_does_not_replace_a_newer_one(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """Between its commit and its ``head.json`` a writer is overtaken by another stream."""
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    claim = opened(one, tmp_path / "first")

    def come(step: str) -> None:
        if step == "commit.log":
            durable.observe_steps(None)
            opened(other, tmp_path / "second")

    durable.observe_steps(come)
    try:
        assert put(one, claim, 0, range(10), tmp_path / "first") is not None
    finally:
        durable.observe_steps(None)
    assert CommitLog(other).head().number == 2
    put(other, make(other, tmp_path / "second").claim, 0, range(10, 20), tmp_path / "second")
    assert numbers_in(other) == list(range(20))


def test_a_copy_of_the_state_and_the_checkpoint(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """Both copies have the same claim: the one that was opened last writes."""
    one, other = (object_store.place(prefix, tmp_path / name / "state") for name in ("one", "other"))
    claim = opened(one, tmp_path / "one" / "checkpoint")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    assert opened(other, tmp_path / "other" / "checkpoint") == claim
    with pytest.raises(SinkError, match="another state directory"):
        put(one, claim, 0, range(10), tmp_path / "one" / "checkpoint")
    put(other, claim, 0, range(10), tmp_path / "other" / "checkpoint")
    assert numbers_in(other) == list(range(10))


@pytest.mark.parametrize("left", ["everything", "all but the head"])
def test_a_store_that_was_set_back(root: ObjectPlace, tmp_path: Path, left: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    claim = opened(root, checkpoint)
    put(root, claim, 0, range(10), checkpoint)
    copy = held_in(root)
    put(root, claim, 1, range(10, 20), checkpoint)
    if left == "all but the head":
        del copy["_tailrace/head.json"]
    put_back(root, copy)
    with pytest.raises(SinkError, match="older than its checkpoint"):
        put(root, claim, 2, range(20, 30), checkpoint)
    with pytest.raises(SinkError, match="older than its checkpoint"):
        make(root, checkpoint)
    assert held_in(root).keys() >= copy.keys(), "nothing was removed"
    assert "older than its checkpoint" in verify(root, checkpoint=checkpoint).problems[0]
    fresh = opened(root, tmp_path / "fresh")
    put(root, fresh, 0, range(10, 30), tmp_path / "fresh")
    assert numbers_in(root) == list(range(30))


def test_other_checkpoints_lakes_and_streams_are_refused(
    object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    one, other = (object_store.place(f"{prefix}/{name}", tmp_path / name) for name in ("one", "other"))
    claim = opened(one, tmp_path / "first")
    old = shutil.copytree(tmp_path / "first", tmp_path / "older")
    put(one, claim, 0, range(10), tmp_path / "first")
    put(one, claim, 1, range(10, 20), tmp_path / "first")
    opened(other, tmp_path / "second")
    before = held_in(one)
    with pytest.raises(UsageError, match="belongs to another lake"):
        make(one, tmp_path / "second")
    with pytest.raises(UsageError, match="belongs to another stream"):
        open_lake(one, tmp_path / "first", {**STREAM, "documents": "bson"}, COLUMNS)
    (other / "day=2026-11-21" / "x").create(b"")
    foreign = object_store.place(f"{prefix}/foreign", tmp_path / "foreign")
    (foreign / "something").create(b"of somebody")
    with pytest.raises(UsageError, match="not empty and not a lake"):
        make(foreign, tmp_path / "third")
    assert held_in(one) == before
    with pytest.raises(SinkError, match="the checkpoint is behind the lake"):
        put(one, claim, 0, range(10, 20), old)


def test_an_aborted_batch_is_removed_by_the_next_start_alone(root: ObjectPlace, tmp_path: Path) -> None:
    """The request that commits it may still be on its way."""
    claim = opened(root, tmp_path / "checkpoint")
    files = stage(root, range(10))
    abort_batch(root, files)
    assert data_files(root) == {files[0].name}
    commit_batch(root, claim, 0, planned_for(files), files)
    assert numbers_in(root) == list(range(10))


def test_a_damaged_object_is_noticed(root: ObjectPlace, tmp_path: Path) -> None:
    claim = opened(root, tmp_path / "checkpoint")
    put(root, claim, 0, range(10))
    (name,) = data_files(root)
    content = (root / name).read_bytes()
    obstore.put(root.bucket.store, f"{root.key}/{name}", content[:200] + b"x" + content[201:])
    assert "is not what was written" in verify(root, full=True).problems[0]
    (root / name).unlink()
    assert "missing" in verify(root).problems[0]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(
    object_store: ObjectServer,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    uri, state = object_store.uri(prefix), tmp_path / "state"
    root = writable_root(uri, state)
    claim = opened(root, LakeLayout(root).default_checkpoint)
    for number in range(3):
        put(root, claim, number, range(number * 10, number * 10 + 10), state / "checkpoint")
    assert main(["lake", "status", uri]) == 0
    assert f"{uri}: 30 events in 3 files" in capsys.readouterr().out
    assert main(["lake", "verify", uri, "--full"]) == 0
    assert main(["lake", "verify", uri, "--state", str(state)]) == 0
    assert main(["lake", "compact", uri]) != 0
    assert "state directory" in capsys.readouterr().err
    assert main(["lake", "compact", uri, "--state", str(tmp_path / "another")]) != 0
    assert "another state directory" in capsys.readouterr().err
    assert main(["lake", "compact", uri, "--state", str(state), "--keep", "0s"]) == 0
    assert "3 files became 1" in capsys.readouterr().out
    assert main(["lake", "status", str(tmp_path), "--state", str(state)]) != 0
    assert main(["lake", "status", "gcs://bucket/lake"]) != 0
    assert numbers_in(root) == list(range(30))  # type: ignore[arg-type]


def test_errors_are_tailraces(root: ObjectPlace) -> None:
    with pytest.raises(TailraceError, match="not a lake"):
        lake_status(root)
