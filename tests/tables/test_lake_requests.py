"""How many requests a stream makes to its lake's object store, and that it does not omit necessary ones because of what
it remembers: counts, not times."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.store import remembered
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.compaction import compact, compact_idle
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.manifest import PlannedRange
from tailrace.lake.store.retention import expire
from tailrace.lake.store.verification import verify
from tests.tables.object_server import ObjectServer, held_in, put_back
from tests.tables.test_lake_in_store import data_files, numbers_in, opened, put
from tests.tables.unkind_proxy import UnkindProxy
from tests.unit.lake_events import planned_for, stage
from tests.unit.test_lake_changing import widen

POLICY = CompactionPolicy()
#: The request that writes a file; the commit checks whether the file exists.
PER_FILE = 2


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Forget everything, like a process that has just begun."""
    remembered._lakes.clear()
    yield
    remembered._lakes.clear()


def idle(root: ObjectPlace, claim: str, number: int, checkpoint: Path, policy: CompactionPolicy = POLICY) -> None:
    """A micro-batch without events, which the sink commits after reading a second further."""
    reached = CommitLog(root).head().reached
    assert reached is not None
    planned = PlannedRange(reached, ClusterTime.of(reached.seconds + 1, 1))
    assert commit_batch(root, claim, number, planned, (), checkpoint=checkpoint) is None
    compact_idle(root, policy)


@contextmanager
def counted(server: ObjectServer, prefix: str, state: Path) -> Iterator[tuple[ObjectPlace, list[str]]]:
    """A place whose requests are noted."""
    asked: list[str] = []
    with UnkindProxy(server.address, lambda _, method, path: asked.append(f"{method} {path}")) as proxy:
        yield server.place(prefix, state, address=proxy.address), asked


def test_an_idle_stream_asks_little(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """Every ten seconds, each search for files to merge read the whole log since its last checkpoint, up to a hundred
    commits; no test had counted."""
    checkpoint = tmp_path / "checkpoint"
    with counted(object_store, prefix, tmp_path / "state") as (root, asked):
        claim = opened(root, checkpoint)
        for number in range(6):
            put(root, claim, number, range(number * 10, number * 10 + 10), checkpoint)
        counts = []
        for number in range(6, 10):
            asked.clear()
            idle(root, claim, number, checkpoint)
            counts.append(len(asked) - 1)  # one is this test's own
        print(counts, asked)
        # Who the lake's is, the head, its commit, that there is none after it; the head written; and the head for the
        # look. The first look reads the log.
        assert counts[1:] == [6, 6, 6]
        assert counts[0] <= 6 + 2 + 8
        put(root, claim, 10, range(200, 210), checkpoint)
        asked.clear()
        idle(root, claim, 11, checkpoint)
        assert len(asked) - 1 <= 7, "of a log that has grown what is new is read"


def test_a_micro_batch_asks_little(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    with counted(object_store, prefix, tmp_path / "state") as (root, asked):
        claim = opened(root, checkpoint)
        put(root, claim, 0, range(10), checkpoint)
        asked.clear()
        files = stage(root, range(10, 20)) + stage(root, range(20, 30), stem="1-0")
        print(asked)
        assert len(asked) == 2 * PER_FILE
        commit_batch(root, claim, 1, planned_for(files), files, checkpoint=checkpoint)
        print(asked)
        assert len(asked) == 6 + 2 * (PER_FILE + 1)
        heads = [one.partition(" ")[0] for one in asked if "head.json" in one]
        assert heads == ["GET", "PUT"], "it was read twice more before it was written"


def test_an_idle_stream_still_merges_and_removes(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """What it found at a commit is valid until there is another one, or until files are old enough to be removed."""
    checkpoint = tmp_path / "checkpoint"
    root = object_store.place(prefix, tmp_path / "state")
    claim = opened(root, checkpoint)
    for number in range(4):
        put(root, claim, number, range(number * 10, number * 10 + 10), checkpoint)
    waits = CompactionPolicy(fan_in=5)
    for number in (4, 5):
        idle(root, claim, number, checkpoint, waits)
    assert len(data_files(root)) == 4
    put(root, claim, 6, range(50, 60), checkpoint)
    idle(root, claim, 7, checkpoint, waits)
    assert len(data_files(root)) == 6, "five and what they became"
    for number in (8, 9):
        idle(root, claim, number, checkpoint, waits)
    assert len(data_files(root)) == 6
    idle(root, claim, 10, checkpoint, CompactionPolicy(fan_in=5, retention=timedelta(0)))
    assert len(data_files(root)) == 1
    assert numbers_in(root) == [*range(40), *range(50, 60)]
    assert verify(root, full=True, checkpoint=checkpoint).problems == []


def test_files_go_when_they_are_old_enough(
    object_store: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    root = object_store.place(prefix, tmp_path / "state")
    claim = opened(root, checkpoint)
    for number in range(2):
        put(root, claim, number, range(number * 10, number * 10 + 10), checkpoint)
    compact(root)
    policy = CompactionPolicy(retention=timedelta(days=1))
    idle(root, claim, 2, checkpoint, policy)
    known = remembered._lakes[root]
    assert known.idle is not None
    until = known.idle[1]
    assert until is not None
    assert known.is_idle(policy, until - timedelta(seconds=1))
    assert not known.is_idle(policy, until)
    assert not known.is_idle(POLICY if policy != POLICY else CompactionPolicy(fan_in=2), until - timedelta(seconds=1))
    assert len(data_files(root)) == 3


@pytest.mark.parametrize("left", ["everything", "the log"])
def test_an_idle_stream_notices_a_store_that_was_set_back(
    object_store: ObjectServer, prefix: str, tmp_path: Path, left: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    root = object_store.place(prefix, tmp_path / "state")
    claim = opened(root, checkpoint)
    put(root, claim, 0, range(10), checkpoint)
    copy = held_in(root)
    put(root, claim, 1, range(10, 20), checkpoint)
    idle(root, claim, 2, checkpoint)
    if left == "the log":
        copy = held_in(root)
        del copy[max(name for name in copy if name.startswith("_delta_log/"))]
    put_back(root, copy)
    with pytest.raises(SinkError, match=r"older than its checkpoint|lost its end"):
        idle(root, claim, 3, checkpoint)
    assert held_in(root) == copy, "nothing was written"


def test_an_idle_stream_notices_another_writer_and_a_foreign_commit(
    object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    claim = opened(one, tmp_path / "first")
    put(one, claim, 0, range(10), tmp_path / "first")
    idle(one, claim, 1, tmp_path / "first")
    before = held_in(one)
    number = CommitLog(one).head().number + 1
    (one / "_delta_log" / f"{number:020d}.json").create(b'{"commitInfo":{"operation":"WRITE"}}\n')
    with pytest.raises(SinkError, match="was not written by Tailrace"):
        idle(one, claim, 2, tmp_path / "first")
    put_back(one, before)
    opened(other, tmp_path / "second")
    with pytest.raises(SinkError, match="another state directory"):
        idle(one, claim, 2, tmp_path / "first")
    with pytest.raises(SinkError, match="another state directory"):
        expire(one, timedelta(0))


def test_a_stream_that_ran_through_a_change_is_stopped(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """``lake.json`` of before the change was put back, with the claim of a stream that was running. The head, which is
    read in any case, says that there was a change."""
    checkpoint = tmp_path / "checkpoint"
    root = object_store.place(prefix, tmp_path / "state")
    claim = opened(root, checkpoint)
    put(root, claim, 0, range(0, 60, 2), checkpoint)
    older = held_in(root)
    widen(root, checkpoint=tmp_path / "elsewhere")
    put_back(root, {**held_in(root), "_tailrace/lake.json": older["_tailrace/lake.json"]})
    with pytest.raises(SinkError, match="is older than the lake's log"):
        put(root, claim, 1, range(61, 63), checkpoint)
    assert numbers_in(root) == list(range(60))


def test_what_is_remembered_is_of_one_commit(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """Another lake in the place of the one that was there, with as many commits."""
    root, other = (object_store.place(f"{prefix}/{name}", tmp_path / name) for name in ("one", "other"))
    for place, rows in ((root, 10), (other, 20)):
        claim = opened(place, tmp_path / f"{rows}")
        for number in range(2):
            put(place, claim, number, range(number * rows, number * rows + rows), tmp_path / f"{rows}")
    idle(root, CommitLog(root).head().newest.claim, 2, tmp_path / "10")  # type: ignore[union-attr]
    put_back(root, held_in(other))
    known, state = remembered.remembered(CommitLog(root))
    assert sorted(state.files) == sorted(CommitLog(root).state().files) == sorted(data_files(root))
    assert known.idle is None


def test_a_stream_with_a_copy_of_the_claim_that_opens_between_two_looks(
    object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    """The other stream opened the lake after this one had checked ``lake.json`` and before it checked the head, with
    the same claim: this one took the number after the other's commit, and named files that the other had removed as
    leftovers. In other tests it comes before or after both checks."""
    checkpoint, copied = tmp_path / "one" / "checkpoint", tmp_path / "other" / "checkpoint"
    straight = object_store.place(prefix, tmp_path / "one" / "state")
    other = object_store.place(prefix, tmp_path / "other" / "state")
    claim = opened(straight, checkpoint)
    put(straight, claim, 0, range(10), checkpoint)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    files = stage(straight, range(10, 20), stem="late")
    has_come, may_end = threading.Event(), threading.Event()
    opening = threading.Thread(target=opened, args=(other, copied))

    def step(name: str) -> None:
        if name == "claim.start" and threading.current_thread() is opening:
            has_come.set()
            may_end.wait(60)
        if name == "commit.files":
            may_end.set()
            opening.join()

    def look(_: int, method: str, path: str) -> None:
        if "head.json" in path and not opening.ident:
            opening.start()
            assert has_come.wait(60)

    durable.observe_steps(step)
    try:
        with UnkindProxy(object_store.address, look) as proxy:
            root = object_store.place(prefix, tmp_path / "one" / "state", address=proxy.address)
            with pytest.raises(SinkError, match="another state directory"):
                commit_batch(root, claim, 1, planned_for(files), files, checkpoint=checkpoint)
    finally:
        may_end.set()
        if opening.ident:
            opening.join()
        durable.observe_steps(None)
    assert verify(other, full=True, checkpoint=copied).problems == []
    assert numbers_in(other) == list(range(10))
