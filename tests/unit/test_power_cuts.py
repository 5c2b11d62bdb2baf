"""The power is cut at each moment while stores write: what was acknowledged is there and complete, and nothing else is
taken for it.

Without these tests nobody would notice if every ``fsync`` were removed: killed processes leave the system's buffers as
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bson
import pytest
from deltalake import DeltaTable

from tailrace.base import durable
from tailrace.core import raw_bson
from tailrace.lake import verify
from tailrace.lake.store import delta
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact
from tailrace.lake.tables.merging import tidy
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.state import TableState
from tailrace.lake.tables.state_file import finish_rewriting, rewrite_file
from tailrace.lake.tables.versions import Keeping
from tailrace.read.archive.layout import DESCRIPTION, HEAD, Description, Reach, VersionNote, oplog_folder
from tailrace.read.archive.record import write_record
from tailrace.read.archive.segment import ImagesWriter, SegmentWriter
from tailrace.read.archive.source import ArchiveSource
from tests.tables.equality import read
from tests.tables.features import Made
from tests.unit.lake_events import begin, make, numbers_in, put, stage
from tests.unit.power_cut import PowerCuts
from tests.unit.test_archive import entry, entry_time, time_of

COMMITS = 3
#: Events of a commit, entries of a segment.
EACH = 10


def write_lake(top: Path, cuts: PowerCuts) -> None:
    root, checkpoint = top / "lake", top / "checkpoint"
    claim = make(root, checkpoint).claim
    begin(checkpoint)
    for number in range(COMMITS):
        assert put(root, claim, number, stage(root, range(number * EACH, (number + 1) * EACH), stem=str(number)))
        cuts.acknowledged += 1
    compact(root)


def check_lake(top: Path, acknowledged: int) -> None:
    root = top / "lake"
    if acknowledged == 0 and CommitLog(root).head().newest is None:
        return
    numbers = numbers_in(root)
    assert len(numbers) in (acknowledged * EACH, (acknowledged + 1) * EACH)
    assert sorted(numbers) == list(range(len(numbers)))
    assert verify(root).problems == []


def write_archive(top: Path, cuts: PowerCuts) -> None:
    root = top / "archive"
    durable.make_private(root)
    write_record(root / DESCRIPTION, Description("rs0", (VersionNote("6.0.27"),), {}).document())
    folder = oplog_folder(root, "rs0")
    folder.mkdir()
    durable.sync_directory(root)
    durable.sync_directory(top)
    start = after = time_of(0)
    previous = ""
    for number in range(COMMITS):
        part = [entry(at) for at in range(number * EACH + 1, (number + 1) * EACH + 1)]
        until = entry_time(part[-1])
        with SegmentWriter(folder, after) as writer, ImagesWriter(folder, after) as images:
            writer.add(b"".join(part))
            previous = writer.publish(until, images, previous).digest
        after = until
        write_record(folder / HEAD, Reach(start, until, previous).document())
        cuts.acknowledged += 1


def check_archive(top: Path, acknowledged: int) -> None:
    if acknowledged == 0:
        return
    source = ArchiveSource(top / "archive")
    newest = source.newest()
    entries = [one for batch in source.read(time_of(0), newest) for one in raw_bson.split(batch.raw)]
    assert len(entries) in (acknowledged * EACH, (acknowledged + 1) * EACH)
    assert [bson.decode(one)["o"]["_id"] for one in entries] == list(range(1, len(entries) + 1))


def write_records(top: Path, cuts: PowerCuts) -> None:
    """As leases' files, marks, positions and reports are written."""
    for number in range(1, COMMITS + 1):
        durable.write_sealed(top / "mark.json", {"number": number})
        durable.publish(top / f"{number}.json", b"%d" % number * 100, top)
        cuts.acknowledged += 1


def check_records(top: Path, acknowledged: int) -> None:
    mark = durable.read_sealed(top / "mark.json")
    assert (0 if mark is None else mark["number"]) in (acknowledged, acknowledged + 1)
    for number in range(1, COMMITS + 1):
        path = top / f"{number}.json"
        if number <= acknowledged or path.exists():
            assert path.read_bytes() == b"%d" % number * 100


def write_table(top: Path, cuts: PowerCuts) -> None:
    """A table's log with a checkpoint at every version, and without the commits that it makes needless."""
    table = Made(top / "table", TableSchema())
    for number in range(COMMITS):
        table.change([{"_id": one, "n": number} for one in range(EACH)])
        cuts.acknowledged += 1
        if number:
            table.table.make_checkpoint()
            table.table.expire(Keeping(grace_h=0))


def check_table(top: Path, acknowledged: int) -> None:
    root = top / "table"
    if acknowledged == 0 and not delta.commits_in(root):
        return
    found = DeltaTable(str(root)).to_pyarrow_table(columns=["n"]).column("n").to_pylist()
    assert found in [[number - 1] * EACH for number in (acknowledged, acknowledged + 1) if number]


def write_marked(top: Path, cuts: PowerCuts) -> None:
    """A table that is merged on read: rows are marked as gone, files are merged, and a checkpoint has vectors."""
    table = Made(top / "table", TableSchema(), merges=True)
    for number in range(COMMITS):
        table.change([{"_id": one, "n": number} for one in range(EACH) if not number or one % 5 == 1])
        cuts.acknowledged += 1
        if number:
            tidy(table.table)
            table.table.make_checkpoint()
            table.table.expire(Keeping(grace_h=0))


def check_marked(top: Path, acknowledged: int) -> None:
    root = top / "table"
    if acknowledged == 0 and not delta.commits_in(root):
        return
    found = sorted(read(DeltaTable(str(root)), "n").column("n").to_pylist())
    many = EACH // 5
    assert found in [
        [0] * EACH if number == 1 else [0] * (EACH - many) + [number - 1] * many
        for number in (acknowledged, acknowledged + 1)
        if number
    ]


Write, Check = Callable[[Path, PowerCuts], None], Callable[[Path, int], None]
STORES: dict[str, tuple[Write, Check]] = {
    "a lake": (write_lake, check_lake),
    "an archive": (write_archive, check_archive),
    "a table": (write_table, check_table),
    "a table that is merged on read": (write_marked, check_marked),
    "records": (write_records, check_records),
}


def harm(store: str, below: Path) -> list[str]:
    """Write the store, cut the power at each moment, and say what is wrong afterwards."""
    write, check = STORES[store]
    top = below / "top"
    top.mkdir(parents=True)
    cuts = PowerCuts(top)
    with cuts.recorded():
        write(top, cuts)
    assert cuts.acknowledged == COMMITS
    assert len(cuts.moments) > COMMITS * 3
    found = []
    for disk, moment, kind in cuts.played(below / "disks"):
        try:
            check(disk, moment.acknowledged)
        except Exception as error:  # noqa: BLE001  whatever it is, it is told with its moment
            found.append(f"{kind} after {moment.call.replace(str(top), '')}: {type(error).__name__} {error}"[:400])
    return found


@pytest.mark.parametrize("store", STORES)
def test_what_was_acknowledged_outlives_a_power_cut_at_any_moment(store: str, tmp_path: Path) -> None:
    assert harm(store, tmp_path) == []


def _nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("store", STORES)
def test_stores_that_do_not_sync_would_be_found(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PowerCuts, "_sync", _nothing)  # as if no call of fsync did anything
    assert harm(store, tmp_path) != []


@pytest.mark.parametrize("store", STORES)
def test_a_directory_that_is_not_synced_would_be_found(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "sync_directory", _nothing)
    assert harm(store, tmp_path) != []


def test_a_state_that_is_written_anew_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    directory = tmp_path / "top" / "state"
    state = TableState(directory)
    documents = [(bytes([60, number]), bson.encode({"_id": number, "pad": "x" * 3_000})) for number in range(40)]
    with state.writing() as writing:
        for key, document in documents:
            writing.put(1, key, time_of(1), document)
    state.close()
    cuts = PowerCuts(tmp_path / "top")
    with cuts.recorded():
        rewrite_file(directory)
        cuts.acknowledged += 1
    assert len(cuts.moments) > 5
    for disk, moment, _ in cuts.played(tmp_path / "disks"):
        finish_rewriting(disk / "state")
        assert sorted(path.name for path in disk.iterdir()) == ["state"], moment.call
        found = TableState(disk / "state")
        assert [(one.key, one.document) for one in found.documents(1)] == documents, moment.call
        found.close()
