"""A lake in an object store that a catalogue follows, together with what had been tried on lakes without one: a
quarantine, a changed stream and columns, a checkpoint of the log, a damaged ``head.json``, a full disk.

test_lake_iceberg_in_store.py has the catalogue alone. Each part had tests of its own, and none had two of them at once.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, object_place
from tailrace.cli.main import main
from tailrace.errors import SinkError
from tailrace.lake.iceberg.lake_mirror import LakeMirror, identifier_of
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.store import commit_log
from tailrace.lake.store.changing import changed_name, commit_change, discard, lake_before, set_superseded_aside
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.layout import cluster_time_of
from tailrace.lake.store.manifest import LakeChange
from tailrace.lake.store.part_writer import PartWriter
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tests.small_disk import small_disk
from tests.tables.iceberg import sql_catalog, sql_settings
from tests.tables.object_server import REPEATED, ObjectServer
from tests.tables.shown_lake import LAKE_COLUMNS, ShownLake, batch_of, shown
from tests.tables.test_iceberg_in_store import at_step, die
from tests.tables.test_lake_in_store import die_at, keys_from
from tests.tables.test_lake_quarantine_in_store import aside_in
from tests.unit.lake_events import token
from tests.unit.test_lake_changing import WIDER

pytestmark = [
    pytest.mark.filterwarnings("ignore:Iceberg scan planning"),  # Polars would like a package of its own
    pytest.mark.parametrize("object_store", ["s3"], indirect=True),
]

LATE = [*LAKE_COLUMNS, {"name": "late", "type": "long", "nullable": True, "metadata": {}}]


@pytest.fixture
def lake(object_store: ObjectServer, prefix: str, tmp_path: Path) -> Iterator[ShownLake]:
    with shown(object_store, prefix, tmp_path) as found:
        yield found


def assert_equal(lake: ShownLake, numbers: list[int], aside: list[int] | None = None) -> None:
    """The newest snapshot is the lake, each older one is a commit of it, and all checks say so."""
    assert lake.versions()[-1] == lake.head()
    assert lake.numbers() == numbers
    assert lake.mirror_at().fault() is None
    report = verify(lake.root, full=True, checkpoint=lake.checkpoint)
    assert (report.problems, report.leftovers, report.rows) == ([], 0, len(numbers))
    aside = aside or []
    assert aside_in(lake.root) == aside
    assert (report.quarantined, lake_status(lake.root).quarantined) == (len(aside), len(aside))
    assert lake_status(lake.root).rows == len(numbers)


# -- quarantine -------------------------------------------------------------------------------------------------------


def test_what_was_put_aside_is_in_no_snapshot(
    lake: ShownLake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first micro-batch is of misfits alone: a snapshot without a file. What it states goes past them."""
    lake.add(0, aside=2)
    assert lake.found().scan().to_arrow().num_rows == 0
    assert lake.found().current_snapshot().summary["tailrace.token"] == token(1)
    assert_equal(lake, [], [0, 1])
    lake.add(3, aside=2)
    lake.add(0, aside=1)
    lake.add(2)
    assert_equal(lake, [2, 3, 4, 8, 9], [0, 1, 5, 6, 7])
    assert compact(lake.root, release=lake.mirror.release).aside_after == 1
    lake.mirror.follow()
    assert_equal(lake, [2, 3, 4, 8, 9], [0, 1, 5, 6, 7])
    assert erase(lake.root, {"documentKey._id": {"$in": [1, 6]}}, release=lake.mirror.release).quarantined == 2
    lake.mirror.follow()
    assert erase(lake.root, {"documentKey._id": {"$in": [3, 7]}}, release=lake.mirror.release).quarantined == 1
    lake.mirror.follow()
    assert_equal(lake, [2, 4, 8, 9], [0, 5])
    lake.add(0, aside=1)
    keys_from(lake.store, monkeypatch)
    given = ("--iceberg", sql_settings(lake.folder).properties["uri"])
    assert main(["lake", "verify", str(lake.root), "--full", *given]) == 0
    said = capsys.readouterr().out
    assert "has the files of the commit that it states" in said
    assert "3 events in quarantine" in said
    assert main(["lake", "status", str(lake.root)]) == 0
    assert "3 events in quarantine" in capsys.readouterr().out
    assert_equal(lake, [2, 4, 8, 9], [0, 5, 10])


@pytest.mark.parametrize("step", ["commit.log", "commit.quarantine", "iceberg.written", "iceberg.shown"])
@pytest.mark.parametrize("events", [2, pytest.param(0, marks=pytest.mark.slow)])  # the same steps
def test_killed_between_a_quarantine_and_a_snapshot(lake: ShownLake, step: str, events: int) -> None:
    lake.add(2, aside=1)
    at_step(step, 1, die)
    with pytest.raises(KeyboardInterrupt):
        lake.add(events, aside=2)
    durable.observe_steps(None)
    lake.versions()
    lake.count, lake.number = 5 + events, 2
    lake.opened()
    lake.mirror = lake.mirror_at()
    lake.mirror.follow()
    rows = [0, 1, *range(3, 3 + events)]
    assert_equal(lake, rows, [2, 3 + events, 4 + events])
    lake.add(1)
    assert_equal(lake, [*rows, 5 + events], [2, 3 + events, 4 + events])


# -- changes ----------------------------------------------------------------------------------------------------------


class _Change:
    """A wider filter and a further column, and what the command does before and after it; also in a process of its
    own."""

    def __init__(self, lake: ShownLake) -> None:
        self.place = str(lake.root), str(lake.root.bucket.beside), dict(lake.root.bucket.options)
        self.count, self.checkpoint, self.folder = lake.count, lake.checkpoint, lake.folder

    def __call__(self) -> None:
        uri, state, options = self.place
        options = {name: value for name, value in options.items() if name not in REPEATED}
        root = object_place(uri, beside=Path(state), options=options)
        mirror = LakeMirror(root, sql_settings(self.folder))
        try:
            mirror.check()
            self.change(root)
            mirror.follow()
        finally:
            mirror.close()

    def change(self, root: ObjectPlace) -> None:
        with lake_before(root) as before:
            numbers = range(self.count)
            batch = batch_of(numbers).append_column("late", pa.array(numbers, pa.int64()))
            made = PartWriter(root, "merge-x", name=changed_name).write_all([batch])
            since, until = cluster_time_of(token(0)), cluster_time_of(token(self.count))
            change = LakeChange("later", ("columns", "settings.scope"), since, until, 3)
            try:
                commit_change(before, change, WIDER, LATE, gone=before.state.in_order, made=made)
            finally:
                discard(before, made)
        set_superseded_aside(root, self.checkpoint)


def narrow(lake: ShownLake) -> list[int]:
    """Three events that the lake's stream leaves out, between others. Returns those that it has."""
    lake.add()
    lake.count += 3
    lake.add()
    return [0, 1, 2, 6, 7, 8]


def go_on_changed(lake: ShownLake) -> None:
    """The changed stream, with a fresh checkpoint."""
    lake.stream, lake.columns, lake.number = WIDER, LATE, 0
    lake.opened()
    lake.mirror.close()
    lake.mirror = lake.mirror_at()
    lake.mirror.follow()
    lake.add()


def late_of(lake: ShownLake) -> list[int]:
    found: list[int] = lake.found().scan().to_arrow().column("late").to_pylist()
    return sorted(found)


def test_a_lake_that_is_changed_keeps_its_older_snapshots(lake: ShownLake) -> None:
    """Each is read with the columns of its time."""
    held = narrow(lake)
    before = {version_of(one): one.snapshot_id for one in lake.found().snapshots()}
    _Change(lake)()
    go_on_changed(lake)
    assert_equal(lake, list(range(12)))
    assert late_of(lake) == list(range(12))
    assert set(before) < set(lake.versions())
    older = lake.found().scan(snapshot_id=before[max(before)]).to_arrow()
    assert sorted(older.column("number").to_pylist()) == held
    assert "late" not in older.column_names
    compact(lake.root, release=lake.mirror.release)
    lake.mirror.follow()
    assert_equal(lake, list(range(12)))


_STEPS = [
    ("change.files", 1),
    ("change.noted", 1),
    ("commit.log", 1),
    ("commit.head", 1),
    ("change.identity", 1),
    ("change.checkpoint", 1),
    ("iceberg.put", 1),
    ("iceberg.put", 3),
    ("iceberg.written", 1),
    ("iceberg.shown", 1),
]
_GUARDS = ("change.noted", "commit.log", "iceberg.written")


@pytest.mark.parametrize(
    ("step", "number"),
    [one if one[0] in _GUARDS else pytest.param(*one, marks=pytest.mark.slow) for one in _STEPS],
)
def test_a_change_that_is_killed_is_shown_whole_or_not_at_all(lake: ShownLake, step: str, number: int) -> None:
    held = narrow(lake)
    before = lake.head()
    assert die_at(step, number, _Change(lake)) == -signal.SIGKILL
    done = _STEPS.index((step, number)) >= 2
    lake.versions()  # what the catalogue has
    lake.mirror.follow()  # by a process that knows the lake as it was, which asks the head alone
    lake.versions()
    lake.mirror_at().follow()
    assert lake.versions()[-1] == before + done
    assert lake.numbers() == (list(range(9)) if done else held)
    assert ("late" in lake.found().schema().as_arrow().names) is done
    if done:
        set_superseded_aside(lake.root, lake.checkpoint)  # as the same command does
    else:
        _Change(lake)()
    go_on_changed(lake)
    assert_equal(lake, list(range(12)))
    assert late_of(lake) == list(range(12))


def test_a_lake_json_of_before_the_change_is_not_shown(lake: ShownLake) -> None:
    """Its columns are not those of the files."""
    narrow(lake)
    place = CommitLog(lake.root).layout.identity
    assert isinstance(place, ObjectPlace)
    older = place.read_bytes()
    _Change(lake)()
    newer = place.read_bytes()
    shown = lake.found().metadata_location
    obstore.put(lake.root.bucket.store, place.key, older)
    for mirror in (lake.mirror, lake.mirror_at()):
        for look in (mirror.follow, mirror.fault):
            with pytest.raises(SinkError, match="is older than the lake's log"):
                look()
    assert lake.found().metadata_location == shown
    obstore.put(lake.root.bucket.store, place.key, newer)
    go_on_changed(lake)
    assert_equal(lake, list(range(12)))


# -- a checkpoint of the log ------------------------------------------------------------------------------------------


def test_a_log_that_goes_past_its_checkpoint(
    object_store: ObjectServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that follows all the time, one that knows nothing, and one that stood still until the commits after its
    own were gone. The partitions come from the checkpoint then."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 4)
    lake = ShownLake(object_store, prefix, tmp_path, "hour", "collection")
    still = lake.mirror_at()
    for number in range(6):
        lake.add(2, aside=number % 2)
        if number == 1:
            still.follow()
    assert (lake.root / "_delta_log" / f"{4:020}.checkpoint.parquet").exists()
    aside = [4, 9, 14]
    rows = [number for number in range(lake.count) if number not in aside]
    assert lake.versions()[-1] == lake.head()
    assert lake.numbers() == rows
    shown = lake.found().metadata_location
    lake.mirror_at().follow()
    still.follow()
    assert lake.found().metadata_location == shown, "nothing was to do"
    assert_equal(lake, rows, aside)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 1)
    for _ in range(4):
        lake.add(1, shown=False)
        rows.append(lake.count - 1)
    assert CommitLog(lake.root).commit(4) is None
    still.follow()
    assert version_of(lake.found().current_snapshot()) == lake.head()
    assert lake.numbers() == rows
    sql_catalog(lake.folder).drop_table(identifier_of(lake.root))
    lake.mirror_at().follow()
    lake.mirror.follow()
    assert lake.versions() == [lake.head()]
    assert_equal(lake, rows, aside)


def test_a_changed_lake_whose_change_is_in_a_checkpoint_alone(lake: ShownLake, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(lake)
    _Change(lake)()
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 1)
    changed = lake.head()
    go_on_changed(lake)
    for _ in range(4):
        lake.add()
    assert CommitLog(lake.root).commit(changed) is None
    lake.mirror_at().follow()
    assert version_of(lake.found().current_snapshot()) == lake.head()
    assert lake.numbers() == late_of(lake) == list(range(lake.count))
    assert lake.mirror_at().fault() is None
    assert verify(lake.root, full=True, checkpoint=lake.checkpoint).problems == []


@pytest.mark.slow  # the two above, with shorter logs
def test_the_hundredth_commit(lake: ShownLake) -> None:
    while lake.head() < 97:
        lake.add(1, shown=False)
    for _ in range(6):
        lake.add(1)
    assert lake.versions()[-1] == lake.head() == 103
    sql_catalog(lake.folder).drop_table(identifier_of(lake.root))
    lake.mirror_at().follow()
    assert_equal(lake, list(range(lake.count)))


# -- a damaged head ---------------------------------------------------------------------------------------------------


def flips(text: str) -> Iterator[tuple[str, bytes]]:
    """Each field of a sealed object with another name and with another value, by one bit that leaves JSON valid."""
    end = 0
    for line in text.splitlines(keepends=True):
        start, end = end, end + len(line)
        name, _, value = line.strip().rstrip(",").partition(": ")
        for part in (name, value):
            at = next((n for n in range(len(part) - 1, -1, -1) if part[n].isalnum()), None)
            if at is None or part in ("null", "true", "false"):
                continue
            content = bytearray(text.encode())
            content[start + (line.rindex(part) if part is value else line.index(part)) + at] ^= 1
            assert json.loads(content) != json.loads(text), line
            yield line.strip(), bytes(content)


def test_a_bit_of_the_head_that_is_flipped(lake: ShownLake) -> None:
    """Whoever looks refuses it, and the catalogue stays as it was. ``changed`` had been in no head of a test."""
    narrow(lake)
    _Change(lake)()
    go_on_changed(lake)
    lake.add(shown=False)
    place = CommitLog(lake.root).layout.head
    assert isinstance(place, ObjectPlace)
    whole = place.read_bytes()
    assert len(json.loads(whole)["changed"]) == 64
    shown, tried = lake.found().metadata_location, set()
    looks: list[Callable[[], Any]] = [
        lake.mirror.follow,
        lambda: lake.mirror_at().follow(),
        lambda: lake.mirror_at().fault(),
        lambda: lake_status(lake.root),
        lambda: verify(lake.root),
        lake.opened,
        lake.add,
    ]
    for number, (line, content) in enumerate(flips(whole.decode())):
        obstore.put(lake.root.bucket.store, place.key, content)
        tried.add(line.partition('"')[2].partition('"')[0])
        for look in looks if number < 2 or '"changed"' in line else (looks[number % 2], looks[2 + number % 5]):
            with pytest.raises(SinkError, match=r"head\.json is damaged") as told:
                look()
            assert "Restore it from a copy" in (told.value.hint or ""), line
        assert place.read_bytes() == content
    assert tried >= json.loads(whole).keys()
    assert lake.found().metadata_location == shown
    obstore.put(lake.root.bucket.store, place.key, whole)
    lake.opened()
    lake.mirror.follow()
    assert_equal(lake, list(range(15)))
    assert late_of(lake) == list(range(15))


# -- a full disk ------------------------------------------------------------------------------------------------------


_NO_ROOM_HERE = r"no room left to write .*tailrace-lake\.json"
_NO_ROOM_THERE = r"the Iceberg catalogue 'tailrace' has no room left: OperationalError: database or disk is full\."


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("commit.head", _NO_ROOM_HERE),
        ("iceberg.written", _NO_ROOM_THERE),
        pytest.param("commit.log", _NO_ROOM_HERE, marks=pytest.mark.slow),  # commit.head
        pytest.param("iceberg.put", _NO_ROOM_THERE, marks=pytest.mark.slow),  # iceberg.written
    ],
    ids=lambda one: one if " " not in one else "",
)
def test_a_full_disk_while_a_snapshot_is_written(
    object_store: ObjectServer, prefix: str, tmp_path: Path, step: str, said: str
) -> None:
    """The state directory, the checkpoint and the catalogue's file are on it. Of a snapshot only the catalogue's row
    needs room there: the store has the rest already, and the next run names it. A catalogue with a full disk was asked
    for a minute, and said not to answer, since only the tables' directory had been on a full disk in a test."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        lake = ShownLake(object_store, prefix, disk.path)
        lake.add(2, aside=1)
        shown, head = lake.versions(), lake.head()
        at_step(step, 1, lambda: disk.leave(0))
        with pytest.raises(SinkError, match=said):
            lake.add(2, aside=1)
        durable.observe_steps(None)
        assert (lake.versions(), lake.head()) == (shown, head + 1)
        with pytest.raises(SinkError, match=_NO_ROOM_THERE):
            lake.mirror.follow()
        disk.make_room()
        lake.count, lake.number = 6, 2
        lake.opened()  # the next run
        lake.mirror.close()
        lake.mirror = lake.mirror_at()
        lake.mirror.follow()
        assert_equal(lake, [0, 1, 3, 4], [2, 5])
        lake.add(2)
        assert lake.versions()[-1] == lake.head()
        lake.mirror.close()


def test_a_snapshot_needs_no_room_beside_the_store(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """The catalogue has room, and the disk of the state directory is full."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        lake = ShownLake(object_store, prefix, tmp_path, state="disk/state")
        lake.add(2, aside=1)
        at_step("commit.head", 1, lambda: disk.leave(0))
        with pytest.raises(SinkError, match=_NO_ROOM_HERE):
            lake.add(2, aside=1)
        durable.observe_steps(None)
        lake.mirror_at().follow()
        assert lake.versions()[-1] == lake.head()
        disk.make_room()
        lake.count, lake.number = 6, 2
        lake.opened()
        lake.add(1)
        assert_equal(lake, [0, 1, 3, 4, 6], [2, 5])
        lake.mirror.close()
