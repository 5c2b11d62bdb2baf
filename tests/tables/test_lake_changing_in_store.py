"""A change of a lake in a store: whole or not at all, whatever is killed, is lost, or comes in between.

The same in a directory, where one lock holds it together: tests/unit/test_lake_changing.py. With a server:
test_lake_changed_in_store.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import changing, commit_log
from tailrace.lake.store.changing import lake_before
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.identity import open_lake, read_identity
from tailrace.lake.store.verification import verify
from tests.tables.object_server import ObjectServer, held_in, put_back
from tests.tables.test_lake_in_store import _Commit, data_files, die_at, numbers_in, opened, put
from tests.tables.unkind_proxy import Fault, UnkindProxy
from tests.unit.lake_events import COLUMNS, STREAM, begin, stage
from tests.unit.test_lake_changing import CLAIM, STEPS, UNTIL, WIDER, widen

NARROW, WIDE = list(range(0, 60, 2)), list(range(60))


def filled(root: Any, checkpoint: Path) -> str:
    """Every second event of the first 60, in three micro-batches."""
    claim = opened(root, checkpoint)
    for number in range(3):
        numbers = range(number * 20, number * 20 + 20, 2)
        assert put(root, claim, number, numbers, checkpoint) is not None
    return claim


@pytest.fixture
def root(object_store: ObjectServer, prefix: str, tmp_path: Path) -> ObjectPlace:
    place = object_store.place(prefix, tmp_path / "state")
    filled(place, tmp_path / "checkpoint")
    return place


def put_on(root: Any, checkpoint: Path, stream: dict[str, Any]) -> None:
    """A stream goes on."""
    claim = open_lake(root, checkpoint, stream, COLUMNS).claim
    begin(checkpoint)
    assert put(root, claim, 0, range(61, 63), checkpoint) is not None


def is_changed(root: Any) -> bool:
    """What ``lake.json`` says, and the log too."""
    known = read_identity(root)
    assert known is not None
    changes = CommitLog(root).state().changes
    assert (known["stream"] == WIDER) is bool(changes)
    assert numbers_in(root)[: len(WIDE)] in (WIDE, [*NARROW, 61, 62], NARROW)
    assert (numbers_in(root)[: len(WIDE)] == WIDE) is bool(changes)
    return bool(changes)


def assert_whole(root: Any, checkpoint: Path, expected: list[int]) -> None:
    """After a start: nothing is left over, and no note."""
    report = verify(root, full=True, checkpoint=checkpoint)
    assert (report.problems, report.leftovers) == ([], 0)
    assert numbers_in(root) == expected
    assert b"changing" not in (root / "_tailrace" / "lake.json").read_bytes()


@contextmanager
def coming(at: str, what: Callable[[], object]) -> Iterator[None]:
    """Let something happen once, at a step."""

    def observe(step: str) -> None:
        if step == at:
            durable.observe_steps(None)
            what()

    durable.observe_steps(observe)
    try:
        yield
    finally:
        durable.observe_steps(None)


class _Widen(_Commit):
    """A change in another process."""

    def __call__(self) -> None:
        widen(self.place(), checkpoint=self.arguments[-1], claim=os.urandom(8).hex())


def killed_at(root: ObjectPlace, step: str, checkpoint: Path) -> None:
    state = str(root.bucket.beside)
    work = _Widen(root.as_uri(), state, dict(root.bucket.options), "", checkpoint)
    assert die_at(step, 1, work) == -signal.SIGKILL


@pytest.mark.parametrize("step", STEPS)
def test_a_change_that_is_killed(root: ObjectPlace, tmp_path: Path, step: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    killed_at(root, step, checkpoint)
    done = STEPS.index(step) >= STEPS.index("commit.log")
    assert is_changed(root) is done
    assert verify(root, full=True).problems == []
    if done:
        with pytest.raises(UsageError, match=r"settings\.scope is .* there and .* here"):
            open_lake(root, checkpoint, STREAM, COLUMNS)
        if step != "change.checkpoint":
            with pytest.raises(UsageError, match="was superseded"):
                open_lake(root, checkpoint, WIDER, COLUMNS)
        changing.set_superseded_aside(root, checkpoint)  # as the same command does
        put_on(root, checkpoint, WIDER)
        assert_whole(root, checkpoint, [*WIDE, 61, 62])
    else:
        assert opened(root, checkpoint) is not None
        assert_whole(root, checkpoint, NARROW)
        put_on(root, tmp_path / "another", STREAM)
        assert_whole(root, tmp_path / "another", [*NARROW, 61, 62])


@pytest.mark.parametrize("step", ["change.files", "change.noted"])
def test_a_change_that_was_killed_is_made_by_the_next_one(root: ObjectPlace, tmp_path: Path, step: str) -> None:
    """Also if that is killed, where it takes the number of the first one's commit."""
    checkpoint = tmp_path / "checkpoint"
    killed_at(root, step, checkpoint)
    if step == "change.noted":
        killed_at(root, "change.fence", checkpoint)
        assert not is_changed(root)
        killed_at(root, "change.noted", checkpoint)
    widen(root, checkpoint=checkpoint)
    assert is_changed(root)
    put_on(root, checkpoint, WIDER)
    assert_whole(root, checkpoint, [*WIDE, 61, 62])


def test_a_start_that_is_killed_while_it_takes_a_note_away(root: ObjectPlace, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    killed_at(root, "change.noted", checkpoint)
    for step in ("claim.lake", "claim.start"):
        work = _Reopen(root.as_uri(), str(tmp_path / "state"), dict(root.bucket.options), "", checkpoint)
        assert die_at(step, 1, work) == -signal.SIGKILL
        assert not is_changed(root)
        assert b"changing" in (root / "_tailrace" / "lake.json").read_bytes()
    opened(root, checkpoint)
    assert_whole(root, checkpoint, NARROW)


class _Reopen(_Commit):
    """The stream goes on, in another process."""

    def __call__(self) -> None:
        opened(self.place(), self.arguments[-1])


def test_a_running_stream_goes_on_past_a_note(root: ObjectPlace, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    killed_at(root, "change.noted", checkpoint)
    claim = str((read_identity(root) or {})["claim"])
    assert put(root, claim, 3, range(61, 63), checkpoint) is not None
    compact(root)
    assert not is_changed(root)
    opened(root, checkpoint)
    assert_whole(root, checkpoint, [*NARROW, 61, 62])


# -- an answer that was lost ------------------------------------------------------------------------------------------


@pytest.fixture
def late(root: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A change has lost its store at its commit; the request is on its way still. It arrives when this is called."""
    sent: list[tuple[ObjectPlace, bytes]] = []

    def away(place: ObjectPlace, content: bytes, beside: object) -> None:
        sent.append((place, content))
        raise StoreAwayError(f"cannot write {place}")

    with monkeypatch.context() as patch:
        patch.setattr(commit_log, "publish", away)
        with pytest.raises(StoreAwayError, match=r"Whether the lake .* was changed is not known"):
            widen(root, checkpoint=tmp_path / "checkpoint")
    ((place, content),) = sent
    return lambda: (place.create(content), None)[1]


def test_the_commit_may_still_come(root: ObjectPlace, late: Callable[[], None], tmp_path: Path) -> None:
    """So its files and its note have stayed, and what comes next finds it."""
    late()
    assert is_changed(root)
    with pytest.raises(UsageError, match=r"settings\.scope is .* there and .* here"):
        open_lake(root, tmp_path / "checkpoint", STREAM, COLUMNS)
    put_on(root, tmp_path / "fresh", WIDER)
    assert_whole(root, tmp_path / "fresh", [*WIDE, 61, 62])


def test_the_commit_comes_while_a_stream_starts(root: ObjectPlace, late: Callable[[], None], tmp_path: Path) -> None:
    """The start has looked for it in vain. It keeps the note until the number is its own."""
    with coming("claim.lake", late), pytest.raises(SinkError, match="another stream was still writing"):
        opened(root, tmp_path / "checkpoint")
    assert is_changed(root)
    put_on(root, tmp_path / "fresh", WIDER)
    assert_whole(root, tmp_path / "fresh", [*WIDE, 61, 62])


def test_the_commit_comes_too_late(root: ObjectPlace, late: Callable[[], None], tmp_path: Path) -> None:
    opened(root, tmp_path / "checkpoint")
    with pytest.raises(FileExistsError):
        late()
    assert_whole(root, tmp_path / "checkpoint", NARROW)


@pytest.mark.parametrize("at", ["change.files", "change.noted"])
def test_the_commit_comes_during_the_next_change(
    root: ObjectPlace, late: Callable[[], None], tmp_path: Path, at: str
) -> None:
    """The next change takes the number before it takes the note away."""
    checkpoint = tmp_path / "checkpoint"
    refused = []

    def come() -> None:
        try:
            late()
        except FileExistsError:
            refused.append(at)

    with coming(at, come), suppress(SinkError):
        widen(root, checkpoint=checkpoint, claim="another claim")
    assert is_changed(root)
    assert bool(refused) is (at == "change.noted")
    put_on(root, tmp_path / "fresh", WIDER)
    assert_whole(root, tmp_path / "fresh", [*WIDE, 61, 62])


@pytest.mark.parametrize("places", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_store_that_goes_away_during_a_change(
    object_store: ObjectServer, prefix: str, tmp_path: Path, places: int
) -> None:
    """At any request, which is done or not. The same change again is made, or has been."""
    never = 1 << 30
    away, seen = never, [0, 0]
    for turn in range(-1, places):
        where = f"{prefix}/{turn}"
        straight, checkpoint = object_store.place(where, tmp_path / f"{turn}"), tmp_path / f"checkpoint{turn}"
        filled(straight, checkpoint)

        def fault(number: int, method: str, path: str) -> Fault | None:
            return None if number < away else "lost" if number == away else "cut"  # noqa: B023  this turn's

        with UnkindProxy(object_store.address, fault) as proxy:
            root = object_store.place(where, tmp_path / f"{turn}", address=proxy.address, retry_s=0.0)
            if turn < 0:
                widen(root, checkpoint=checkpoint)
                requests = proxy.requests
                continue
            away = requests - (turn + 1) * requests // (2 * places)  # the second half: what comes before only reads
            with suppress(StoreAwayError):
                widen(root, checkpoint=checkpoint)
            away = never
        done = is_changed(straight)
        seen[done] += 1
        if done:
            changing.set_superseded_aside(straight, checkpoint)
        else:
            widen(straight, checkpoint=checkpoint)
        put_on(straight, checkpoint, WIDER)
        assert_whole(straight, checkpoint, [*WIDE, 61, 62])
    assert all(seen) or places < 10, seen


@pytest.mark.parametrize("fault", ["lost", pytest.param("slow down", marks=pytest.mark.slow)])
def test_a_bad_day(object_store: ObjectServer, prefix: str, tmp_path: Path, fault: Fault) -> None:
    """The first try to write each object goes wrong."""
    tried: set[str] = set()

    def chosen(_: int, method: str, path: str) -> Fault | None:
        is_first = method == "PUT" and path not in tried
        tried.update([path] if method == "PUT" else ())
        return fault if is_first else None

    straight, checkpoint = object_store.place(prefix, tmp_path / "state"), tmp_path / "checkpoint"
    filled(straight, checkpoint)
    head = CommitLog(straight).head().number
    with UnkindProxy(object_store.address, chosen) as proxy:
        widen(object_store.place(prefix, tmp_path / "state", address=proxy.address), checkpoint=checkpoint)
        assert proxy.faults[fault] >= 4
    assert CommitLog(straight).head().number == head + 1
    put_on(straight, checkpoint, WIDER)
    assert_whole(straight, checkpoint, [*WIDE, 61, 62])


# -- other writers ----------------------------------------------------------------------------------------------------


def test_another_machine_is_refused(object_store: ObjectServer, root: ObjectPlace, prefix: str, tmp_path: Path) -> None:
    other = object_store.place(prefix, tmp_path / "other")
    with pytest.raises(SinkError, match="another state directory"), lake_before(other):
        pass
    held = held_in(root)
    opened(other, tmp_path / "fresh")
    with pytest.raises(SinkError, match="another state directory"):
        widen(root)
    assert data_files(root) == {name for name in held if name.startswith("day=")}
    assert not is_changed(root)


@pytest.mark.parametrize("at", ["change.files", "change.noted"])
def test_a_stream_that_starts_elsewhere_meanwhile_stops_the_change(
    object_store: ObjectServer, root: ObjectPlace, prefix: str, tmp_path: Path, at: str
) -> None:
    """The lake is its own then, and no commit names what it has removed."""
    other, fresh = object_store.place(prefix, tmp_path / "other"), tmp_path / "fresh"
    with coming(at, lambda: opened(other, fresh)), pytest.raises(SinkError, match="another program has"):
        widen(root, checkpoint=tmp_path / "checkpoint")
    assert not is_changed(root)
    claim = opened(other, fresh)
    put(other, claim, 0, range(61, 63), fresh)
    assert_whole(other, fresh, [*NARROW, 61, 62])
    widen(other, range(63), checkpoint=fresh)
    open_lake(other, fresh, WIDER, COLUMNS)
    assert_whole(other, fresh, list(range(63)))


def test_a_stream_that_starts_elsewhere_after_the_commit(
    object_store: ObjectServer, root: ObjectPlace, prefix: str, tmp_path: Path
) -> None:
    """The change was made, and says so; the note is no longer its own to take away."""
    other, fresh = object_store.place(prefix, tmp_path / "other"), tmp_path / "fresh"

    def come() -> None:
        with pytest.raises(UsageError, match="belongs to another stream"):
            open_lake(other, fresh, STREAM, COLUMNS)
        open_lake(other, fresh, WIDER, COLUMNS)
        begin(fresh)

    with coming("commit.log", come):
        widen(root, checkpoint=tmp_path / "checkpoint")
    assert is_changed(root)
    assert not (tmp_path / "checkpoint").exists()
    claim = open_lake(other, fresh, WIDER, COLUMNS).claim
    put(other, claim, 0, range(61, 63), fresh)
    assert_whole(other, fresh, [*WIDE, 61, 62])


def test_a_start_that_dies_before_its_own_commit_keeps_the_note(
    object_store: ObjectServer, root: ObjectPlace, prefix: str, tmp_path: Path
) -> None:
    """Between the note and the commit it gives itself the lake. The commit comes first, and the lake is changed."""
    other, fresh = object_store.place(prefix, tmp_path / "other"), tmp_path / "fresh"

    def die() -> None:
        raise KeyboardInterrupt

    def come() -> None:
        with coming("claim.lake", die), pytest.raises(KeyboardInterrupt):
            open_lake(other, fresh, STREAM, COLUMNS)

    with coming("change.noted", come):
        widen(root, checkpoint=tmp_path / "checkpoint")
    assert is_changed(root)
    with pytest.raises(UsageError, match="belongs to another stream"):
        open_lake(other, fresh, STREAM, COLUMNS)
    put_on(other, tmp_path / "newer", WIDER)
    assert_whole(other, tmp_path / "newer", [*WIDE, 61, 62])


@pytest.mark.parametrize("at", ["change.files", "change.noted"])
def test_a_stream_with_a_copy_of_the_state_commits_meanwhile(
    object_store: ObjectServer, root: ObjectPlace, prefix: str, tmp_path: Path, at: str
) -> None:
    """No lock and no session keeps it out: the commit's number decides."""
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "sessions.json").write_bytes((tmp_path / "state" / "sessions.json").read_bytes())
    other, checkpoint = object_store.place(prefix, copied), tmp_path / "checkpoint"
    claim = str((read_identity(root) or {})["claim"])
    with (
        coming(at, lambda: put(other, claim, 3, range(61, 63), checkpoint)),
        pytest.raises(SinkError, match="another program has written"),
    ):
        widen(root, checkpoint=checkpoint)
    assert not is_changed(root)
    assert b"changing" not in (root / "_tailrace" / "lake.json").read_bytes()
    opened(root, checkpoint)
    assert_whole(root, checkpoint, [*NARROW, 61, 62])


def test_two_changes_with_one_state(object_store: ObjectServer, root: ObjectPlace, prefix: str, tmp_path: Path) -> None:
    """Of two copies of the state: one of them is made, whole, and the other one says that it was not."""
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "sessions.json").write_bytes((tmp_path / "state" / "sessions.json").read_bytes())
    other, checkpoint = object_store.place(prefix, copied), tmp_path / "checkpoint"
    with (
        coming("change.noted", lambda: widen(other, checkpoint=checkpoint, claim="another claim")),
        pytest.raises(SinkError, match="another program has written"),
    ):
        widen(root, checkpoint=checkpoint)
    assert is_changed(root)
    (change,) = CommitLog(root).state().changes
    assert change.claim == "another claim"
    put_on(root, checkpoint, WIDER)
    assert_whole(root, checkpoint, [*WIDE, 61, 62])


# -- a store that was set back ----------------------------------------------------------------------------------------


def test_a_head_that_was_set_back_moves_on(root: ObjectPlace, tmp_path: Path) -> None:
    place = root / "_tailrace" / "head.json"
    older = place.read_bytes()
    widen(root, checkpoint=tmp_path / "checkpoint")
    place.swap(older, place.head()[1])
    assert is_changed(root)
    opening = open_lake(root, tmp_path / "checkpoint", WIDER, COLUMNS)
    assert opening.start == UNTIL.tick()
    begin(tmp_path / "checkpoint")
    put(root, opening.claim, 0, range(61, 63), tmp_path / "checkpoint")
    assert_whole(root, tmp_path / "checkpoint", [*WIDE, 61, 62])


def test_a_lake_that_was_set_back_is_changed_again_or_refused(root: ObjectPlace, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    older = held_in(root)
    widen(root, checkpoint=checkpoint)
    put_on(root, checkpoint, WIDER)
    newer = held_in(root)
    put_back(root, older)
    with pytest.raises(UsageError, match="belongs to another stream"):
        open_lake(root, checkpoint, WIDER, COLUMNS)
    widen(root, checkpoint=checkpoint)  # what stood aside before is of a lake that was changed, too
    put_on(root, checkpoint, WIDER)
    assert_whole(root, checkpoint, [*WIDE, 61, 62])
    put_back(root, {**newer, "_tailrace/lake.json": older["_tailrace/lake.json"]})
    with pytest.raises(SinkError, match="is older than the lake's log"):
        open_lake(root, tmp_path / "fresh", STREAM, COLUMNS)
    with pytest.raises(SinkError, match="is older than the lake's log"):
        widen(root)


def test_a_lake_json_that_is_set_back_during_the_change(root: ObjectPlace, tmp_path: Path) -> None:
    place = root / "_tailrace" / "lake.json"
    older = place.read_bytes()
    with (
        coming("commit.log", lambda: place.swap(older, place.head()[1])),
        pytest.raises(SinkError, match="is older than the lake's log"),
    ):
        widen(root, checkpoint=tmp_path / "checkpoint")
    assert CLAIM not in older.decode()
    with pytest.raises(SinkError, match="is older than the lake's log"):
        opened(root, tmp_path / "checkpoint")
    assert [*stage(root, range(3))] != []  # nothing else is wrong: files can be written
