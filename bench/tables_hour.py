"""What does a table that is merged on read write, and take on the disk, in an hour at 2,000 changes a second?

The changes of ``bench/tables.py``, a second's worth at a time, and one micro-batch for each, as a writer takes them
live with the default ``every`` of a second. Two things make it shorter than an hour:

* No second is waited for: the clock that the writer's budget, its commits and its removal of old files look at is moved
  on by a second after each micro-batch.
* No server carries out the writes. A mongod has the documents that are copied; then the entries of its oplog are made
  here, as it would have written them.

So the micro-batches, merges, checkpoints and files of the ``grace`` are those of an hour. What is missing is reading
the oplog.

At some points it prints, in a line each: all bytes that were written so far to the table's folder (data, log,
checkpoints) as a multiple of the changed rows' bytes, and of those since the last point; the newest version's bytes,
all that lies there and in how many files, and the most of both so far; how many seconds lay between two commits of
changes since the last point: mean, median and largest; CPU for a change, and seconds of CPU of the longest micro-batch
since the last point. Then what readers find in versions of the last minute: data files at most, rows for each one that
is there at most, and the CPU time of reading all rows, as a multiple of that for the same table compacted: mean and
largest of these versions, each of them the median of some turns; and the milliseconds that these are multiples of.

    python -m bench.tables_hour [--minutes 60] [--rate 2000] [--every 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import bson
import pyarrow.parquet as pq
from bench.tables import READERS, document, fill, seconds_of
from pymongo import MongoClient

from tailrace.core.kernel.change_rows import change_rows
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables import delta_commit, publishing, upkeep
from tailrace.lake.tables import writer as writing
from tailrace.lake.tables.delta_commit import TableFile
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.live_files import files_at
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.window.oplogs import EntryRun, Oplogs, OplogWindow

_NAME = "bench.orders"
#: How many versions of the last minute before a point are read.
_VERSIONS = 4
_HEADER = (
    f"{'min':>4}{'changes':>11}{'MB written':>12}{'x changed':>10}{'since':>7}{'live MB':>9}{'disk MB':>9}{'files':>7}"
    f"{'most MB':>9}{'files':>7}{'every s':>8}{'median':>7}{'most':>6}{'us CPU':>8}{'most s':>7}"
    f"{'data':>5}{'rows x':>7}{'SQL x':>12}{'Polars x':>12}{'ms':>10}"
)


class SteppingClock:
    """A clock that stands still while a writer works, and is moved on where the writer would wait. It takes the place
    of the module ``time``. It begins ``ahead`` seconds ago: whatever goes by the machine's clock, as the library does
    that writes checkpoints, must not take what this clock has dated for something of the future."""

    def __init__(self, ahead: float) -> None:
        self._seconds, self._begun_ns = time.monotonic(), time.time_ns() - round(ahead * 1e9)
        self._passed = 0.0

    def monotonic(self) -> float:
        return self._seconds + self._passed

    def time_ns(self) -> int:
        return self._begun_ns + round(self._passed * 1e9)

    def move_on(self, seconds: float) -> None:
        """Let so many seconds have passed."""
        self._passed += seconds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let a writer of tables go by this clock."""
        with ExitStack() as stack:
            for module in (writing, publishing, upkeep, delta_commit):
                stack.enter_context(mock.patch.object(module, "time", self))
            yield


class MadeOplog:
    """Entries for the changes of ``bench/tables.py``: a tenth inserts, a tenth deletes, the others updates. They take
    the place of what is read from an oplog; a window holds those of one micro-batch."""

    def __init__(self, collection: Any, documents: int) -> None:
        [found] = collection.database.list_collections(filter={"name": collection.name})
        self._common = {"ns": _NAME, "ui": found["info"]["uuid"], "t": 1, "v": 2}
        self._chosen = random.Random(2)
        self._alive, self._following = list(range(documents)), documents
        self._second = collection.database.command("hello")["lastWrite"]["opTime"]["ts"].time
        self._waiting: deque[tuple[bytes, ClusterTime]] = deque()

    @property
    def alive(self) -> int:
        """How many documents there are."""
        return len(self._alive)

    def write(self, count: int) -> None:
        """The entries of one micro-batch."""
        self._second += 1
        wall = datetime.now(UTC)
        made = bytearray()
        for number in range(1, count + 1):
            entry = self._change() | self._common | {"ts": bson.Timestamp(self._second, number), "wall": wall}
            made += bson.encode(entry)
        self._waiting.append((bytes(made), ClusterTime.of(self._second, count)))

    def _change(self) -> dict[str, Any]:
        what = self._chosen.random()
        if what < 0.1:
            made = document(self._following, self._chosen)
            self._alive.append(self._following)
            self._following += 1
            return {"op": "i", "o": made, "o2": {"_id": made["_id"]}}
        place = self._chosen.randrange(len(self._alive))
        if what < 0.2:
            self._alive[place], self._alive[-1] = self._alive[-1], self._alive[place]
            return {"op": "d", "o": {"_id": self._alive.pop()}}
        diff = {"u": {"status": "paid", "total": self._chosen.random(), "n": self._chosen.randrange(1000)}}
        return {"op": "u", "o": {"$v": 2, "diff": diff}, "o2": {"_id": self._alive[place]}}

    def window(self, oplogs: Oplogs, after: ClusterTime, **_: Any) -> OplogWindow | None:
        """The next window that was written and not yet asked for."""
        if not self._waiting:
            return None
        raw, until = self._waiting.popleft()
        rows = change_rows(raw)
        assert rows is not None
        return OplogWindow(after, until, (EntryRun(oplogs.live[0], raw, rows),), until)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with mock.patch.object(Oplogs, "window", autospec=True, side_effect=self.window):
            yield


class Folder:
    """All that a table's folder has held, looked at after each micro-batch. New files get ``clock``'s time, by which a
    writer removes them: so what lies there is what would lie there if each second had passed."""

    def __init__(self, root: Path, clock: SteppingClock) -> None:
        self._root, self._clock = root, clock
        self._sizes: dict[str, int] = {}
        self.written = self.bytes = self.most_bytes = self.most_files = self.commits = 0
        #: Bytes of the log, now and when there was the most of everything.
        self.log = self.log_of_most = 0

    def look(self) -> bool:
        """Look at the folder. Returns whether there are new commits."""
        commits = self.commits
        found: dict[str, os.DirEntry[str]] = {}
        folders = [str(self._root)]
        for folder in folders:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        found[entry.path] = entry
        for gone in self._sizes.keys() - found.keys():
            self._add(gone, -self._sizes.pop(gone))
        now = self._clock.time_ns()
        for new in found.keys() - self._sizes.keys():
            self._sizes[new] = size = found[new].stat().st_size
            os.utime(new, ns=(now, now))
            self._add(new, size)
            self.written += size
            self.commits += new.endswith(".json")
        if self.bytes > self.most_bytes:
            self.most_bytes, self.log_of_most = self.bytes, self.log
        self.most_files = max(self.most_files, self.files)
        return self.commits > commits

    def _add(self, name: str, size: int) -> None:
        self.bytes += size
        self.log += size * ("/_delta_log/" in name)

    @property
    def files(self) -> int:
        return len(self._sizes)


class Hour:
    """One run."""

    def __init__(self, writer: TablesWriter, clock: SteppingClock, root: Path, args: argparse.Namespace) -> None:
        self._writer, self._clock, self._args = writer, clock, args
        self._table = place_of(root, _NAME)
        self._folder = Folder(self._table, clock)
        self._folder.look()
        self._folder.written = 0  # the copy is no change
        self._spare = root.with_name("compacted")
        self._points = [minutes for minutes in args.points if minutes < args.minutes] + [args.minutes]
        self._written = self._reported = self._late = 0
        #: How many commits there were after each micro-batch of the last minute.
        self._commits = deque([self._folder.commits], round(60 / args.every) + 1)
        #: Since the last point: seconds between commits, and of the processors in each micro-batch.
        self._apart: list[float] = []
        self._spent: list[float] = []
        self._changed = 0.0
        self.done, self.cpu = 0, 0.0

    @property
    def folder(self) -> Folder:
        """What lay in the table's folder."""
        return self._folder

    def run(self, oplog: MadeOplog) -> None:
        """One second after the other."""
        args = self._args
        at_once = round(args.rate * args.every)
        for _ in range(round(args.minutes * 60 / args.every)):
            oplog.write(at_once)
            cpu = time.process_time()
            self._clock.move_on(args.every)
            self._writer.step()
            self._spent.append(time.process_time() - cpu)
            self.cpu += self._spent[-1]
            self.done += at_once
            self._look()
            if self._points and self.done >= self._points[0] * 60 * args.rate:
                self._report(self._points.pop(0))

    def _look(self) -> None:
        """How old the table becomes: some micro-batches may wait."""
        self._late += 1
        if self._folder.look():
            self._apart.append(self._late * self._args.every)
            self._late = 0
        self._commits.append(self._folder.commits)

    def _report(self, minutes: float) -> None:
        table = CollectionTable(self._table, _NAME)
        live, newest = table.live_bytes, table.version
        minute = max(1, self._commits[-1] - self._commits[0])
        taken = [newest - minute + minute * part // _VERSIONS for part in range(1, _VERSIONS + 1)]
        shutil.copytree(self._table, self._spare)
        spare = CollectionTable(self._spare, _NAME)
        spare.compact(target_bytes=1 << 30)
        row = spare.live_bytes / spare.rows()
        found = [files_at(self._spare, version) for version in taken]
        shares = [sum(one.rows or 0 for one in files) / _there(files) for files in found]
        newest_of = [as_newest(self._table, self._spare.with_name(f"version-{one}"), one) for one in taken]
        ratios, each = [], []
        for reader in READERS:
            # In a process of its own: the allocators of two readers in one process disturb each other, so that Polars
            # had ten times as many page faults after deltalake, and other ones for each table.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                of_each, base = pool.submit(compared, reader, newest_of, self._spare, self._args.turns).result()
            ratios.append(of_each)
            each.append(f"{1000 * base:.0f}")
        for folder in (self._spare, *newest_of):
            shutil.rmtree(folder)
        since = self.done - self._reported
        self._changed += since * row
        of_these = (self._folder.written - self._written) / (since * row)
        times = "".join(f"{statistics.mean(one):>6.2f}, {max(one):.2f}" for one in ratios)
        print(
            f"{minutes:>4g}{self.done:>11,}{self._folder.written / 1e6:>12,.1f}"
            f"{self._folder.written / self._changed:>10.2f}{of_these:>7.2f}{live / 1e6:>9.1f}"
            f"{self._folder.bytes / 1e6:>9.1f}{self._folder.files:>7,}{self._folder.most_bytes / 1e6:>9.1f}"
            f"{self._folder.most_files:>7,}{statistics.mean(self._apart):>8.1f}{statistics.median(self._apart):>7.1f}"
            f"{max(self._apart):>6.1f}{1e6 * self.cpu / self.done:>8.1f}{max(self._spent):>7.2f}"
            f"{max(map(len, found)):>5}{max(shares):>7.2f}{times}{'/'.join(each):>10}",
            flush=True,
        )
        self._written, self._reported = self._folder.written, self.done
        self._apart.clear()
        self._spent.clear()


def as_newest(table: Path, folder: Path, version: int) -> Path:
    """The table as it was when ``version`` was its newest one, in a folder of links. Asked for an older version by its
    number, readers cannot use ``_last_checkpoint``: they list the whole log, and that would be counted too."""
    shutil.copytree(table, folder, copy_function=os.link)
    log = folder / "_delta_log"
    checkpoints = []
    for path in list(log.iterdir()):
        number = int(path.name[:20]) if path.name[:20].isdigit() else -1
        if number > version:
            path.unlink()
        elif path.name.endswith(".checkpoint.parquet"):
            checkpoints.append(path)
    (log / "_last_checkpoint").unlink(missing_ok=True)
    if checkpoints:
        newest = max(checkpoints)
        rows = pq.read_metadata(newest).num_rows
        (log / "_last_checkpoint").write_text(json.dumps({"version": int(newest.name[:20]), "size": rows}))
    return folder


def compared(reader: str, versions: Sequence[Path], compacted: Path, turns: int) -> tuple[list[float], float]:
    """Processor seconds for reading all rows of each version, as multiples of those for the compacted table, which is
    read right after each of them: what else the machine does disturbs both alike. Of the turns the median counts. Also
    the median of the seconds that these are multiples of."""
    seconds_of(reader, compacted)  # what is loaded at the first read
    found: list[list[float]] = [[] for _ in versions]
    whole = []
    for _ in range(turns):
        for place, folder in enumerate(versions):
            read, base = seconds_of(reader, folder), seconds_of(reader, compacted)
            found[place].append(read / base)
            whole.append(base)
    return [statistics.median(one) for one in found], statistics.median(whole)


def _there(files: Iterable[TableFile]) -> int:
    """How many of their rows are not gone."""
    return sum((one.rows or 0) - one.gone for one in files)


def follow(uri: str, root: Path, collection: Any, args: argparse.Namespace) -> None:
    fill(collection, args.documents)
    settings = TableSettings(
        root, (TableRule(_NAME),), every_s=args.every, grace_h=args.grace / 60, merge_on_read=not args.rewritten
    )
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()
    oplog, clock, begun = MadeOplog(collection, args.documents), SteppingClock(args.minutes * 60), time.monotonic()
    with clock.installed(), TablesWriter(uri, settings) as writer:
        writer.begin()
        hour = Hour(writer, clock, root, args)
        with oplog.installed():
            hour.run(oplog)
            clock.move_on(3600)  # what still waits for the writer's budget
            writer.step()
    most = hour.folder
    rows = CollectionTable(place_of(root, _NAME), _NAME).rows()
    assert rows == oplog.alive, f"{rows} rows, and not {oplog.alive}"
    state = sum(file.stat().st_size for file in (root / "_tailrace").rglob("*") if file.is_file())
    print(
        f"{rows:,} rows, the state {state / 1e6:.0f} MB, of the {most.most_bytes / 1e6:.0f} MB at most the log's "
        f"{most.log_of_most / 1e6:.0f}, "
        f"in {(time.monotonic() - begun) / 60:.1f} minutes (load {os.getloadavg()[0]:.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="so much of the writer's time")
    parser.add_argument("--rate", type=int, default=2000, help="changes a second")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between micro-batches")
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--points", type=float, nargs="+", default=[1, 5, 10, 20, 30, 45], help="minutes to report at")
    parser.add_argument("--turns", type=int, default=7, help="of readers at each point")
    parser.add_argument("--grace", type=float, default=10, help="minutes for which replaced files stay")
    parser.add_argument("--rewritten", action="store_true", help="tables whose files are rewritten, not merged on read")
    args = parser.parse_args()
    print(f"{args.rate:,} changes/s over {args.documents:,} documents (load {os.getloadavg()[0]:.1f})\n{_HEADER}")
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
        ReplicaSet(1) as members,
        MongoClient[Any](members.uri) as client,
    ):
        follow(members.uri, Path(name, "tables"), client.bench.orders, args)


if __name__ == "__main__":
    main()
