"""A lake in an object store as an Iceberg table: equal to its commits, or refused, at a price that does not grow.

``tests/unit/test_lake_iceberg.py`` has what is the same in a directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest

from tailrace.base import durable
from tailrace.base.object_place import StoreAwayError, object_place
from tailrace.base.store_probe import check_store
from tailrace.cli.main import main
from tailrace.errors import SinkError, UsageError
from tailrace.lake.iceberg import lake_log
from tailrace.lake.iceberg.lake_mirror import LakeMirror, identifier_of, left_behind
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.store import commit_log
from tailrace.lake.store.changing import changed_name, commit_change, lake_before
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact, compact_after
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.manifest import LakeChange, StagedFile
from tailrace.lake.store.mirrored import ICEBERG
from tailrace.lake.store.part_writer import PartWriter, opened_checked
from tailrace.lake.store.retention import expire
from tailrace.lake.store.verification import verify
from tests.tables.iceberg import sql_catalog, sql_settings
from tests.tables.object_server import SECRET, ObjectServer, held_in, put_back
from tests.tables.rest_catalog import TOKEN, rest_catalog
from tests.tables.shown_lake import LAKE_COLUMNS, ShownLake, rows_of, shown
from tests.tables.test_iceberg_in_store import at_step, die, set_back
from tests.tables.unkind_proxy import Fault, UnkindProxy
from tests.unit.lake_events import STREAM, token

pytestmark = [
    pytest.mark.filterwarnings("ignore:Iceberg scan planning"),  # Polars would like a package of its own
    pytest.mark.parametrize("object_store", ["s3"], indirect=True),
]


@pytest.fixture
def lake(object_store: ObjectServer, prefix: str, tmp_path: Path) -> Iterator[ShownLake]:
    with shown(object_store, prefix, tmp_path) as found:
        yield found


# -- equal ------------------------------------------------------------------------------------------------------------


def test_every_commit_is_a_snapshot_that_every_reader_reads(lake: ShownLake) -> None:
    first = lake.head()
    for _ in range(3):
        lake.add()
    assert lake.versions() == [first + 1, first + 2, first + 3]
    assert lake.numbers() == list(range(9))
    assert lake.found().current_snapshot().summary["tailrace.token"] == token(8)
    assert lake.mirror.fault() is None
    assert verify(lake.root, full=True).sound
    shown = lake.found().metadata_location
    lake.mirror_at().follow()  # a process that knows nothing finds nothing to do
    assert lake.found().metadata_location == shown
    everything = b"".join(held_in(lake.root).values()) + (lake.folder / "catalog.db").read_bytes()
    assert SECRET.encode() not in everything
    assert len(sql_catalog(lake.folder).list_tables(identifier_of(lake.root)[0])) == 1


def test_partitions_are_read_and_pruned_by(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    lake = ShownLake(object_store, f"{prefix}/a-Z_0.x", tmp_path, "hour", "collection")
    for _ in range(2):
        lake.add(13)
    assert identifier_of(lake.root) == ("a-Z_0_x", "events")
    assert lake.numbers() == list(range(26))
    found = lake.found()
    assert found.scan("day = '2026-11-22'").to_arrow().num_rows == 2
    assert [row["number"] for row in rows_of(found.scan("hour = 1").to_arrow())] == [1, 25]
    assert sum(1 for _ in found.scan("collection = 'a/b'").plan_files()) < sum(1 for _ in found.scan().plan_files())
    compact(lake.root, release=lake.mirror.release)
    lake.mirror.follow()
    assert lake.numbers() == list(range(26))


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "number", "shown"),
    [
        ("commit.log", 1, 0),  # Delta has it
        ("commit.head", 1, 0),
        ("iceberg.put", 1, 0),  # the manifest
        ("iceberg.put", 2, 0),  # and the list of manifests
        ("iceberg.written", 1, 0),
        ("iceberg.put", 3, 0),  # and the metadata, which no catalogue names yet
        ("iceberg.shown", 1, 1),
    ],
)
def test_a_kill_at_each_step(lake: ShownLake, step: str, number: int, shown: int) -> None:
    """What readers have is whole at each moment; the next start brings the rest."""
    lake.add()
    at_step(step, number, die)
    with pytest.raises(KeyboardInterrupt):
        lake.add()
    durable.observe_steps(None)
    assert len(lake.versions()) == 1 + shown
    lake.opened()
    for _ in range(2):  # the second time there is nothing to do
        lake.mirror_at().follow()
        assert lake.versions()[-1] == lake.head()
    assert lake.numbers() == list(range(6))
    assert lake.mirror_at().fault() is None


@pytest.mark.parametrize(
    "step",
    [
        "iceberg.written",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("compaction.merged", "commit.log", "compaction.removed")
        ),
    ],
)
def test_a_kill_while_the_stream_compacts(lake: ShownLake, step: str) -> None:
    policy = CompactionPolicy(every=1, fan_in=2, retention=timedelta(0))
    for _ in range(6):
        lake.add()
    newest = next(iter(CommitLog(lake.root).commits(lake.head() - 1)))
    at_step(step, 1, die)
    with pytest.raises(KeyboardInterrupt):
        compact_after(lake.root, newest, policy, lake.mirror.release)
    durable.observe_steps(None)
    lake.versions()
    lake.opened()
    lake.mirror = lake.mirror_at()
    lake.mirror.follow()
    assert lake.numbers() == list(range(18))
    compact(lake.root, retention=timedelta(0), release=lake.mirror.release)
    lake.mirror.follow()
    assert lake.versions()[-1] == lake.head()
    assert lake.numbers() == list(range(18))
    assert verify(lake.root, full=True).problems == []


# -- two writers, and a lake that was set back ------------------------------------------------------------------------

_REPLACED = r"another writer has made a later version of s3://tests/"


def test_a_stream_that_was_replaced_shows_what_the_lake_has(lake: ShownLake) -> None:
    """It has committed, and stood still before the catalogue had it; another machine has gone on."""
    lake.add()
    lake.add(shown=False)
    other = lake.elsewhere()
    other.add(shown=False)
    lake.mirror.follow()
    assert lake.versions()[-1] == other.head()
    other.add()
    lake.mirror.follow()
    lake.mirror_at().follow()
    assert lake.versions()[-1] == other.head()
    with pytest.raises(SinkError, match="another state directory"):
        lake.add()
    assert lake.numbers() == list(range(12))


@pytest.mark.parametrize(
    ("step", "is_known"), [("iceberg.put", True), ("iceberg.written", True), ("iceberg.put", False)]
)
def test_a_stream_that_is_replaced_while_it_shows(lake: ShownLake, step: str, is_known: bool) -> None:
    """It has looked what the lake has, and another machine commits and shows that first: the catalogue's comparison
    decides. ``is_known``: it does not ask the catalogue before that."""
    lake.add()
    lake.add(shown=False)
    mirror = lake.mirror if is_known else lake.mirror_at()
    others: list[ShownLake] = []

    def come() -> None:
        others.append(lake.elsewhere())
        others[0].add()

    at_step(step, 1, come)
    with pytest.raises(SinkError, match=_REPLACED):
        mirror.follow()
    assert lake.versions()[-1] == others[0].head()
    mirror.follow()  # it reads the log again
    others[0].add()
    assert lake.numbers() == list(range(12))


def test_a_stream_that_stood_still_for_as_long_as_the_log_reaches(
    lake: ShownLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit after its own has gone by then; the head says that there are later ones."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 1)
    lake.add(shown=False)

    def come() -> None:
        other = lake.elsewhere()
        for _ in range(5):
            other.add()
        assert not CommitLog(other.root).layout.commit(lake_head + 1).exists()

    lake_head = lake.head()
    at_step("iceberg.written", 1, come)
    with pytest.raises(SinkError, match=_REPLACED):
        lake.mirror.follow()
    assert version_of(lake.found().current_snapshot()) == lake.head()
    assert lake.numbers() == list(range(18))


def test_a_store_that_was_set_back_is_shown_as_it_is(lake: ShownLake) -> None:
    """Also if it has grown again by then, to fewer commits, to as many or to more: some have the numbers of commits
    that no longer exist."""
    lake.add()
    copy = {name: content for name, content in held_in(lake.root).items() if not name.startswith(ICEBERG)}
    for _ in range(3):
        lake.add()
    kept = {name: content for name, content in held_in(lake.root).items() if name.startswith(ICEBERG)}
    for grown in range(3):
        known = lake.head()
        put_back(lake.root, copy | kept)
        for path in sorted(lake.checkpoint.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        lake.opened()
        lake.count, lake.number = 100 * (grown + 1), 0
        for _ in range((known - lake.head()) * min(1, grown) + grown // 2):
            lake.add(2, shown=False)
        lake.mirror.follow()  # it remembers a log that no longer exists
        assert version_of(lake.found().current_snapshot()) == lake.head()
        lake.versions()
        kept = {name: content for name, content in held_in(lake.root).items() if name.startswith(ICEBERG)}
        assert lake.head() - known == (-2, 0, 1)[grown]
    assert lake.numbers() == [*range(3), *range(300, lake.count)]


def test_everything_is_put_back_while_a_process_knows_it(lake: ShownLake) -> None:
    """The catalogue's file too: an open connection stays with the file that was there, which names metadata that the
    store no longer has. On a disk, tests had put back one of the two."""
    lake.add()
    copy = held_in(lake.root)
    shutil.copy(lake.folder / "catalog.db", lake.folder / "copy.db")
    shutil.copytree(lake.checkpoint, lake.folder / "copied")
    shutil.copytree(lake.state, lake.folder / "known")
    for _ in range(2):
        lake.add()
    for where, known in ((lake.checkpoint, "copied"), (lake.state, "known")):
        shutil.rmtree(where)
        shutil.move(lake.folder / known, where)
    put_back(lake.root, copy)
    (lake.folder / "copy.db").replace(lake.folder / "catalog.db")
    lake.opened()
    lake.count, lake.number = 100, 1
    lake.add()
    assert lake.versions()[-1] == lake.head()
    assert lake.numbers() == [*range(3), *range(100, 103)]


def test_a_catalogue_of_a_backup_is_brought_up_or_refused(lake: ShownLake) -> None:
    lake.add()
    old = lake.found().metadata_location
    for _ in range(2):
        lake.add()
    set_back(lake.folder, old)
    lake.add()
    assert lake.versions()[-1] == lake.head()
    old = lake.found().metadata_location
    for name in held_in(lake.metadata):
        if old.endswith(name):
            (lake.metadata / name).unlink()
    for ask in (LakeMirror.check, LakeMirror.follow):
        with pytest.raises(
            SinkError, match=r"the metadata of the Iceberg table .*\.events cannot be read: FileNotF"
        ) as told:
            ask(lake.mirror_at())
        assert "Drop it from the catalogue" in (told.value.hint or "")
    sql_catalog(lake.folder).drop_table(identifier_of(lake.root))
    lake.mirror_at().follow()
    assert lake.versions() == [lake.head()]
    assert lake.numbers() == list(range(12))


def test_the_catalogue_has_a_table_of_another_place(lake: ShownLake, object_store: ObjectServer) -> None:
    lake.add()
    place = lake.found().metadata_location
    for location in (place.replace("tests/", "tests/a", 1), place.replace("tests/", "other/"), "file:///nowhere"):
        set_back(lake.folder, location)
        for ask in (LakeMirror.check, LakeMirror.follow):
            with pytest.raises(SinkError, match=r"has other files: .* is not below s3://tests/"):
                ask(lake.mirror_at())
    set_back(lake.folder, place)
    copy = object_store.place(f"copy/{lake.prefix}", lake.state)
    with pytest.raises(SinkError, match=r"has other files: .* is not below s3://tests/copy/"):
        lake.mirror_at(copy).check()
    assert lake.versions() == [lake.head()]


def test_where_no_lake_of_iceberg_can_be(object_store: ObjectServer, tmp_path: Path) -> None:
    options = {"azure_storage_account_name": "a", "azure_storage_account_key": "a2V5"}
    for uri in ("az://container/lake", "abfss://container@account.dfs.core.windows.net/lake"):
        with pytest.raises(UsageError, match="a lake in Azure cannot have Iceberg snapshots"):
            LakeMirror(object_place(uri, beside=tmp_path, options=options), sql_settings(tmp_path))


# -- a lake that changes ----------------------------------------------------------------------------------------------


def test_a_lake_is_changed_erased_from_and_expires(lake: ShownLake) -> None:
    for _ in range(3):
        lake.add()
    late = [*LAKE_COLUMNS, {"name": "late", "type": "timestamp", "nullable": True, "metadata": {}}]
    with lake_before(lake.root) as before:
        made: list[StagedFile] = []
        for file in before.state.in_order:
            with opened_checked(lake.root, file) as parquet:
                table = parquet.read()
            moments = pa.array([datetime(2026, 11, 21, tzinfo=UTC)] * len(table), pa.timestamp("us", "UTC"))
            batches = table.append_column("late", moments).to_batches()
            made += PartWriter(lake.root, "merge-x", name=changed_name).write_all(batches)
        change = LakeChange("later", ("columns",))
        commit_change(before, change, {**STREAM, "x": 1}, late, gone=before.state.in_order, made=made)
    lake.mirror.follow()  # it knows the old columns
    assert "late" in lake.found().schema().as_arrow().names
    assert len(lake.versions()) == 4
    erase(lake.root, {"documentKey._id": 4}, vacuum=True, release=lake.mirror.release)
    lake.mirror.follow()
    assert lake.versions() == [lake.head()]
    assert lake.numbers() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert "lose their files" in (left_behind(lake.root) or "")
    with pytest.raises(UsageError, match="has Iceberg snapshots, which would lose their files"):
        expire(lake.root, timedelta(0))


def test_a_column_that_comes_while_a_process_looks(lake: ShownLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """``lake.json`` and the log change together: what was read of one before the change is not taken with the other."""
    lake.add()
    lake.add(shown=False)
    seen: list[Any] = []
    real = lake_log.next_commit

    def asked(log: CommitLog, number: int) -> Any:
        if number == lake.head() + 1 and not seen:
            seen.append(number)
            with lake_before(lake.root) as before:
                files = before.state.in_order
                late = [*LAKE_COLUMNS, {"name": "late", "type": "long", "nullable": True, "metadata": {}}]
                made: list[StagedFile] = []
                for file in files:
                    with opened_checked(lake.root, file) as parquet:
                        table = parquet.read()
                    batches = table.append_column("late", pa.array([7] * len(table), pa.int64())).to_batches()
                    made += PartWriter(lake.root, "merge-x", name=changed_name).write_all(batches)
                commit_change(
                    before, LakeChange("later", ("columns",)), {**STREAM, "x": 1}, late, gone=files, made=made
                )
        return real(log, number)

    monkeypatch.setattr(lake_log, "next_commit", asked)
    lake.mirror.follow()
    assert seen
    assert lake.versions()[-1] == lake.head()
    assert set(lake.found().scan().to_arrow().column("late").to_pylist()) == {7}


# -- requests ---------------------------------------------------------------------------------------------------------


def test_what_a_snapshot_costs(lake: ShownLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has these numbers. They are the same however long the log is, and however many files the lake has."""
    monkeypatch.setattr("tailrace.lake.iceberg.snapshot._FULL", 4)
    asked: list[str] = []
    with UnkindProxy(lake.store.address, lambda _, method, path: asked.append(f"{method} {path}")) as proxy:
        root = lake.place_by(proxy.address)
        check_store(root)
        mirror = lake.mirror_at(root)
        costs = []
        for _ in range(9):
            lake.add(1, shown=False)
            asked.clear()
            mirror.follow()
            costs.append(len(asked))
            assert [one.partition(" ")[0] for one in asked].count("PUT") == 3
        assert set(costs[1:]) == {10}, asked
        asked.clear()
        mirror.follow()  # a micro-batch without events
        assert len(asked) == 1, asked
        compact(lake.root, release=lambda _: None)
        asked.clear()
        mirror.follow()
        assert len(asked) == 10, asked
    lake.add()
    assert lake.numbers() == list(range(12))
    assert lake.mirror.fault() is None


@pytest.mark.parametrize("numbers", [(2, 6, 12), pytest.param(range(1, 13), marks=pytest.mark.slow)], ids=len)
def test_a_store_that_is_away_is_no_damage(lake: ShownLake, numbers: Sequence[int]) -> None:
    """Whatever request it does not answer, the error says that, and the next start goes on."""
    lake.add()
    away: list[int] = []
    asked: list[str] = []

    def fault(_: int, method: str, path: str) -> Fault | None:
        asked.append(f"{method} {path}")
        return "cut" if away and len(asked) >= away[0] else None

    with UnkindProxy(lake.store.address, fault) as proxy:
        root = lake.place_by(proxy.address)
        mirror = lake.mirror_at(root)
        mirror.follow()
        lake.add(shown=False)
        for number in numbers:
            away[:], asked[:] = [number], []
            with pytest.raises(StoreAwayError) as found:
                mirror.follow()
            assert "Iceberg" not in found.value.message
            away[:] = []
            assert len(lake.versions()) == 1 or number > 9
        away[:] = []
        mirror.follow()
    assert lake.versions()[-1] == lake.head()
    assert lake.numbers() == list(range(6))


def test_answers_of_the_store_that_are_lost(lake: ShownLake) -> None:
    lost: set[str] = set()

    def fault(_: int, method: str, path: str) -> Fault | None:
        if method != "PUT" or path in lost:
            return None
        lost.add(path)
        return "lost"

    with UnkindProxy(lake.store.address, fault) as proxy:
        straight, lake.root = lake.root, lake.place_by(proxy.address, 60)
        lake.mirror = lake.mirror_at()
        for _ in range(3):
            lake.add()
        assert proxy.faults["lost"] > 12
        lake.root = straight
    first = lake.head() - 2
    assert lake.versions() == [first, first + 1, first + 2]
    assert lake.numbers() == list(range(9))


def test_damaged_and_missing_objects(lake: ShownLake) -> None:
    lake.add()
    for name, content in held_in(lake.metadata).items():
        if name.endswith(".avro"):
            obstore.put(lake.root.bucket.store, (lake.metadata / name).key, content[:40])
    assert "cannot be read" in (lake.mirror_at().fault() or "")
    lake.mirror_at().follow()
    assert lake.numbers() == [0, 1, 2]
    head = CommitLog(lake.root).layout.head.read_bytes()
    lake.add(shown=False)
    (CommitLog(lake.root).layout.commit(lake.head())).unlink()
    with pytest.raises(SinkError, match="the lake's log has lost its end"):
        lake.mirror.follow()
    obstore.put(lake.root.bucket.store, CommitLog(lake.root).layout.head.key, head)
    lake.mirror.follow()
    assert lake.versions() == [lake.head()]


# -- commands, and a REST catalogue -----------------------------------------------------------------------------------


def test_commands_bring_the_catalogue_up(
    lake: ShownLake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in lake.store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    root, given = lake.store.uri(lake.prefix), ("--iceberg", sql_settings(lake.folder).properties["uri"])
    state = ("--state", str(lake.state))
    for _ in range(3):
        lake.add()
    assert main(["lake", "compact", root, *state]) == 1
    assert "which would lose their files" in capsys.readouterr().err
    assert main(["lake", "compact", root, *state, *given]) == 0
    assert len(lake.versions()) == 4
    assert main(["lake", "expire", root, *state, "--keep", "0s", *given]) == 0
    assert lake.versions() == [lake.head()]
    match = ("--match", '{"documentKey._id": 4}')
    assert main(["lake", "erase", root, *state, *match, *given]) == 0
    assert lake.versions()[-1] == lake.head()
    assert main(["lake", "erase", root, *state, "--match", '{"documentKey._id": 5}']) == 0
    assert "Iceberg snapshots name them, or have lost them" in capsys.readouterr().out
    assert main(["lake", "verify", root, *given]) == 0
    assert "has the files of the commit that it states" in capsys.readouterr().out
    lake.mirror.follow()
    assert lake.numbers() == [0, 1, 2, 3, 6, 7, 8]
    (lake.root / CommitLog(lake.root).live_files()[0].name).unlink()
    assert main(["lake", "verify", root, *given]) == 1
    assert "the Iceberg table lacks its data file" in capsys.readouterr().out
    assert main(["lake", "compact", root, *given]) != 0
    assert "state directory" in capsys.readouterr().err


def test_a_rest_catalogue(lake: ShownLake, tmp_path: Path) -> None:
    """It writes the metadata itself; an answer of its commit that is lost is no second snapshot."""
    with rest_catalog(tmp_path / "catalog.db", **lake.store.for_iceberg()) as rest:
        lake.mirror = LakeMirror(lake.root, IcebergSettings.of({"uri": rest.uri, "token": TOKEN}, "lake.iceberg"))
        for number in range(3):
            rest.lost = number % 2
            lake.add()
        assert lake.mirror.fault() is None
        compact(lake.root, retention=timedelta(0), release=lake.mirror.release)
        lake.mirror.follow()
    assert lake.versions() == [lake.head()]
    assert lake.numbers() == list(range(9))
