"""What does a table that is merged on read write, and what does it take on the disk, in an hour at 2,000 changes a second?

The changes of ``bench/tables.py``, a second's worth at a time: they are written, and then the writer takes one
micro-batch, as it would live with the default ``every`` of a second. What is left of the second is not waited for:
the clock that the writer's budget, its commits and its removal of old files look at is moved on. So it is the work of
an hour in less time, with the same micro-batches, merges, checkpoints, and files of the ``grace``.

At some points it prints, in a line each: all bytes that were written so far to the table's folder (data, log,
checkpoints) as a multiple of the changed rows' bytes, and since the last point alone; the newest version's bytes, all
that lies there, the number of files, and the most of both so far; CPU for a change; and the CPU time of readers over
versions of the last minute, as a multiple of that for the compacted table: mean and largest.

    python -m bench.tables_hour [--minutes 60] [--rate 2000] [--every 1]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from bench.tables import changes, fill, reading
from pymongo import MongoClient
from pymongo.write_concern import WriteConcern

from tailrace.embedded import ReplicaSet
from tailrace.lake.tables import delta_commit, pace, publishing, upkeep
from tailrace.lake.tables import writer as writing
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter

_NAME = "bench.orders"
#: Of the last minute before a point, so many versions are read.
_VERSIONS = 4
_HEADER = (
    f"{'min':>4}{'changes':>11}{'MB written':>12}{'x changed':>10}{'since':>7}{'live MB':>9}{'disk MB':>9}{'files':>7}"
    f"{'most MB':>9}{'files':>7}{'us CPU':>8}{'SQL x':>12}{'Polars x':>12}"
)


class SkippingClock:
    """Goes as the machine's does, and is moved on where a writer would wait. In the place of the module ``time``."""

    def __init__(self) -> None:
        self._ahead_ns = 0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_ns / 1e9

    def time_ns(self) -> int:
        return time.time_ns() + self._ahead_ns

    def skip(self, seconds: float) -> None:
        """Do not wait for ``seconds``; they have passed."""
        self._ahead_ns += max(0, round(seconds * 1e9))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """What a writer of tables does by the clock goes by this one."""
        with ExitStack() as stack:
            for module in (writing, publishing, upkeep, delta_commit):
                stack.enter_context(mock.patch.object(module, "time", self))
            # Their defaults are the machine's clock.
            stack.enter_context(mock.patch.object(publishing, "Pace", partial(pace.Pace, self.monotonic)))
            keeping = partial(upkeep.Upkeep, clock=self.monotonic)
            stack.enter_context(mock.patch.object(publishing, "Upkeep", keeping))
            yield


class Folder:
    """All that a table's folder has held, looked at after each micro-batch."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sizes: dict[str, int] = {}
        self.written = self.bytes = self.most_bytes = self.most_files = 0

    def look(self) -> None:
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
            self.bytes -= self._sizes.pop(gone)
        for new in found.keys() - self._sizes.keys():
            self._sizes[new] = size = found[new].stat().st_size
            self.bytes += size
            self.written += size
        self.most_bytes, self.most_files = max(self.most_bytes, self.bytes), max(self.most_files, self.files)

    @property
    def files(self) -> int:
        return len(self._sizes)


class Hour:
    """One run. ``tick`` is called after each second's changes were written."""

    def __init__(self, writer: TablesWriter, collection: Any, root: Path, args: argparse.Namespace) -> None:
        self._writer, self._collection, self._args = writer, collection, args
        self._table = place_of(root, _NAME)
        assert isinstance(self._table, Path)
        self._folder = Folder(self._table)
        self._folder.look()
        self._folder.written = 0  # the copy is no change
        self._spare = root.with_name("compacted")
        self._points = [minutes for minutes in args.points if minutes < args.minutes] + [args.minutes]
        self._written = self._changed = self._last_done = 0.0
        self.clock, self.done, self.cpu, self.batches = SkippingClock(), 0, 0.0, 0

    def tick(self) -> None:
        """Let the writer take what was written, in one micro-batch."""
        begun = self.clock.monotonic()
        self.done += round(self._args.rate * self._args.every)
        self._until_committed()
        cpu = time.process_time()
        while self._writer.progress.changes < self.done:
            self.batches += self._writer.step()
        self.cpu += time.process_time() - cpu
        self._folder.look()
        self.clock.skip(self._args.every - (self.clock.monotonic() - begun))
        if self._points and self.done >= self._points[0] * 60 * self._args.rate:
            self._report(self._points.pop(0))

    def _until_committed(self) -> None:
        """All of it is to be in one window, so a majority must have it."""
        nothing = {"_id": "nothing"}
        self._collection.with_options(write_concern=WriteConcern(1, j=True)).update_one(nothing, {"$set": {"n": 1}})
        while True:
            written = self._collection.database.command("hello")["lastWrite"]
            if written["majorityOpTime"]["ts"] >= written["opTime"]["ts"]:
                return

    def _report(self, minutes: float) -> None:
        table = CollectionTable(self._table, _NAME)
        live, newest = table.live_bytes, table.version
        minute = max(1, min(newest, round(60 / self._args.every)))
        taken = [newest - minute + minute * part // _VERSIONS for part in range(1, _VERSIONS + 1)]
        shutil.copytree(self._table, self._spare)
        spare = CollectionTable(self._spare, _NAME)
        spare.compact(target_bytes=1 << 30)
        row = spare.live_bytes / spare.rows()
        *read, compacted = reading(self._spare, taken, best_of=self._args.best_of)
        shutil.rmtree(self._spare)
        ratios = {name: [one[name] / compacted[name] for one in read] for name in compacted}
        since = self.done - self._last_done
        self._changed += since * row
        of_these = (self._folder.written - self._written) / (since * row)
        times = "".join(f"{statistics.mean(one):>6.2f}, {max(one):.2f}" for one in ratios.values())
        print(
            f"{minutes:>4g}{self.done:>11,}{self._folder.written / 1e6:>12,.1f}"
            f"{self._folder.written / self._changed:>10.2f}{of_these:>7.2f}{live / 1e6:>9.1f}"
            f"{self._folder.bytes / 1e6:>9.1f}{self._folder.files:>7,}{self._folder.most_bytes / 1e6:>9.1f}"
            f"{self._folder.most_files:>7,}{1e6 * self.cpu / self.done:>8.1f}{times}",
            flush=True,
        )
        self._written, self._last_done = self._folder.written, self.done


def follow(uri: str, root: Path, collection: Any, args: argparse.Namespace) -> None:
    fill(collection, args.documents)
    settings = TableSettings(root, (TableRule(_NAME),), every_s=args.every, merge_on_read=not args.rewritten)
    at_once = round(args.rate * args.every)
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()
        copied = writer.progress
    clock = SkippingClock()
    begun = time.monotonic()
    with clock.installed(), TablesWriter(uri, settings) as writer:
        writer.begin()
        hour = Hour(writer, collection, root, args)
        hour.clock = clock
        count = round(args.minutes * 60 / args.every) * at_once
        changes(collection, count, args.documents, 2, at_once=at_once, pace=hour.tick)
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()
    rows = CollectionTable(place_of(root, _NAME), _NAME).rows()
    assert rows == collection.count_documents({}), "the table is not what its collection is"
    state = sum(file.stat().st_size for file in (root / "_tailrace").rglob("*") if file.is_file())
    print(
        f"{hour.batches:,} micro-batches, {rows:,} rows (of {copied.copied:,} that were copied), the state "
        f"{state / 1e6:.0f} MB, in {(time.monotonic() - begun) / 60:.1f} minutes (load {os.getloadavg()[0]:.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="so much of the writer's time")
    parser.add_argument("--rate", type=int, default=2000, help="changes a second")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between micro-batches")
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--points", type=float, nargs="+", default=[1, 5, 10, 20, 30, 45], help="minutes to report at")
    parser.add_argument("--best-of", type=int, default=3, help="turns of readers at each point")
    parser.add_argument("--rewritten", action="store_true", help="tables whose files are rewritten, not merged on read")
    args = parser.parse_args()
    print(f"{args.rate:,} changes/s over {args.documents:,} documents (load {os.getloadavg()[0]:.1f})\n{_HEADER}")
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name, ReplicaSet(1, oplog_size_mb=2000) as members:
        with MongoClient[Any](members.uri) as client:
            follow(members.uri, Path(name, "tables"), client.bench.orders, args)


if __name__ == "__main__":
    main()
