"""What does the driver do for a micro-batch, and does it grow with the shards, the executors or the history?

Spark's driver plans a micro-batch by asking the servers how much there is and where to cut it. This program calls the
reader of the data source as Spark does (``latestOffset``, ``partitions``, ``reportLatestOffset``), counts the commands
that each call sends, and how many of them wait for one another: with a network of L ms between driver and servers, a
call takes about that many times L. It is done over a replica set and over clusters of ``--shards``, for several
micro-batches of ``--max-bytes``, so that growth with the history would show.

Then the sizes: an offset in the checkpoint, and what a task is given, with ``--sizes`` shards (the offset of the
largest cluster above, with as many names). And the merge: µs of CPU for an event where a task reads ``--merge`` shards
at once, from memory (one oplog, dealt out entry by entry).

    python bench/planning.py [--entries 60000] [--shards 1 2 4] [--sizes 1 10 100] [--merge 1 2 10 100]
"""

from __future__ import annotations

import argparse
import bisect
import json
import pickle
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pymongo
from pymongo import monitoring
from pyspark.sql.streaming.datasource import ReadMaxBytes

from sides import clock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.merge import MergedStream
from tailrace.core.stream.stream import ONE_OPLOG, Stream, open_stream
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import ReadOptions, Start, parse
from tailrace.lake.spark.source.stream_reader import TailraceStreamReader
from tailrace.read.source.batch import entry_time
from tailrace.read.source.drive import drive
from tailrace.read.source.mongod import MongodSource

DATABASE, COLLECTION = "bench", "entries"
#: Bytes of a shard's oplog that a task gives the stages at a time.
BATCH_BYTES: Final = 4 << 20
#: Connections are made and watched by these, and not by a micro-batch.
_OF_THE_DRIVER: Final = frozenset({"hello", "isMaster", "ismaster", "endSessions"})


class Commands(monitoring.CommandListener):
    """Which commands were sent, and when each began and ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.names: Counter[str] = Counter()
        self.spans: list[tuple[float, float]] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        pass

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        self._note(event.command_name, event.duration_micros / 1e6)

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        self._note(event.command_name, event.duration_micros / 1e6)

    def _note(self, name: str, seconds: float) -> None:
        if name not in _OF_THE_DRIVER:
            now = time.perf_counter()
            with self._lock:
                self.names[name] += 1
                self.spans.append((now, now - seconds))

    @property
    def depth(self) -> int:
        """How many of them waited for one another: the largest number of which no two overlap."""
        count, free = 0, 0.0
        for end, start in sorted(self.spans):
            if start >= free:
                count, free = count + 1, end
        return count


COMMANDS = Commands()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=60_000, help="entries in the oplogs (default: %(default)s)")
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 2, 4], help="clusters to plan for")
    parser.add_argument("--max-bytes", default="8m", help="maxBytesPerTrigger (default: %(default)s)")
    parser.add_argument("--partitions", type=int, default=4, help="slices of a micro-batch (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 10, 100], help="shards of an offset")
    parser.add_argument("--merge", type=int, nargs="*", default=[1, 2, 10, 100], help="shards that a task reads")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the merge, of which the median counts")
    args = parser.parse_args()
    monitoring.register(COMMANDS)
    print(f"{args.entries:,} entries, maxBytesPerTrigger {args.max_bytes}, {args.partitions} slices\n")
    print(f"{'':14}{'micro-batch':>12}{'latestOffset':>25}{'partitions':>25}{'reportLatestOffset':>25}")
    print(f"{'':14}{'':>12}" + f"{'commands':>11}{'in a row':>9}{'ms':>5}" * 3)
    offset: Offset | None = None
    for shards in (0, *args.shards):
        with deployment(shards, args.entries) as (uri, since):
            offset = plan(shards, uri, since, args)
            if not shards and args.merge:
                entries, options = oplog(uri, since), options_of(uri, since, args)
    if offset is not None:
        sizes(offset, args.sizes)
    for shards in args.merge:
        merge(shards, entries, options, args.rounds)
    return 0


@contextmanager
def deployment(shards: int, entries: int) -> Iterator[tuple[str, str]]:
    """A replica set (0 shards) or a cluster with so many entries, and the cluster time to start at."""
    with ExitStack() as stack:
        if shards:
            cluster = stack.enter_context(ShardedCluster(shards))
            cluster.router.create_database(DATABASE, "shard0")
            uri, uris = cluster.uri, [one.uri for one in cluster.shards.values()]
        else:
            members = stack.enter_context(ReplicaSet(1))
            uri, uris = members.uri, [members.uri]
        clients = [stack.enter_context(pymongo.MongoClient[dict[str, Any]](one)) for one in uris]
        for client in clients:
            client[DATABASE].create_collection(COLLECTION)
        newest = max((clock(client) for client in clients), key=lambda one: one["clusterTime"])
        for client in clients:
            clock(client, newest)
        for start in range(0, entries, 1000):  # in turns, so that the shards' times overlap
            many = range(start, min(start + 1000, entries))
            clients[start // 1000 % len(clients)][DATABASE][COLLECTION].insert_many(
                [{"_id": number, "name": f"customer {number}", "text": f"{number:08d}" * 50} for number in many]
            )
        time_ = newest["clusterTime"]
        yield uri, f"{time_.time},{time_.inc + 1}"


def options_of(uri: str, since: str, args: argparse.Namespace) -> ReadOptions:
    given = {"uri": uri, "database": DATABASE, "collection": COLLECTION, "startAtOperationTime": since}
    return parse({**given, "maxBytesPerTrigger": args.max_bytes, "partitions": str(args.partitions)})


# -- what is asked for a micro-batch ------------------------------------------------------------------------------


def plan(shards: int, uri: str, since: str, args: argparse.Namespace) -> Offset:
    """Plan all micro-batches as Spark asks for them; print the first, the middle and the last one. Gives the last
    offset."""
    options = options_of(uri, since, args)
    reader = TailraceStreamReader(options)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    limit, rows, tasks, first_kb = ReadMaxBytes(options.max_bytes), [], [], 0
    cpu: list[float] = []
    while True:
        asked: list[str] = []
        used = time.process_time()
        end = counted(asked, lambda start=start: reader.latestOffset(start, limit))
        if end == start:
            break
        slices = counted(asked, lambda start=start, end=end: reader.partitions(start, end))
        counted(asked, reader.reportLatestOffset)
        rows.append("".join(asked))
        cpu.append(time.process_time() - used)
        tasks.append(len(slices))
        start = end
        first_kb = first_kb or resident_kb()
    last_kb = resident_kb()
    name = f"{shards} shards" if shards else "replica set"
    for place in sorted({0, len(rows) // 2, len(rows) - 1}):
        print(f"{name:14}{place + 1:>12}{rows[place]}")
    print(
        f"{'':14}{len(rows)} micro-batches of {statistics.mean(tasks):.1f} slices, each "
        f"{1000 * statistics.median(cpu):.0f} ms of CPU"
    )
    print(
        f"{'':14}memory after the first {first_kb / 1024:.0f} MB, after the last {last_kb / 1024:.0f} MB; "
        f"offset {len(json.dumps(start)):,} bytes",
        flush=True,
    )
    reader.stop()
    return Offset.from_json(start)


def counted(asked: list[str], call: Any) -> Any:
    """Returns what ``call`` returns, and records what it sent: commands, those that waited for one another,
    milliseconds."""
    COMMANDS.clear()
    began = time.perf_counter()
    result = call()
    took = (time.perf_counter() - began) * 1000
    asked.append(f"{sum(COMMANDS.names.values()):>11}{COMMANDS.depth:>9}{took:>5.0f}")
    return result


def resident_kb() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


# -- how large things are -----------------------------------------------------------------------------------------


def sizes(offset: Offset, counts: Sequence[int]) -> None:
    """The same offset with other numbers of shards, named as they are in large clusters."""
    print(f"\n{'shards':>8}{'offset, bytes':>16}{'a task, bytes':>16}")
    mark = next((mark for _, mark in offset.entries), EntryMark(offset.cluster_time, "0" * 32))
    for count in counts:
        names = [f"shard-{number:04d}" for number in range(count)]
        large = replace(
            offset,
            shards=tuple((name, offset.cluster_time) for name in names),
            entries=tuple((name, mark) for name in names),
        )
        print(f"{count:>8}{len(json.dumps(large.to_json())):>16,}{len(pickle.dumps(task(large, names))):>16,}")


def task(offset: Offset, names: Sequence[str]) -> OplogSlice:
    from tailrace.lake.spark.planning.input_partition import ShardRange  # noqa: PLC0415

    host = "{0}/{0}-0.db.example:27017,{0}-1.db.example:27017,{0}-2.db.example:27017"
    after = ClusterTime(offset.cluster_time - 1)
    ranges = tuple(ShardRange(name, host.format(name), after) for name in names)
    return OplogSlice(after, offset.cluster_time, "6.0.27", 1, shards=ranges)


# -- what the merge costs -----------------------------------------------------------------------------------------


def oplog(uri: str, since: str) -> list[bytes]:
    """The entries one by one."""
    seconds, increment = (int(part) for part in since.split(","))
    source = MongodSource(uri)
    raw = b"".join(batch.raw for batch in source.read(ClusterTime.of(seconds, increment - 1), source.newest()))
    source.close()
    entries, place = [], 0
    while place < len(raw):
        size = int.from_bytes(raw[place : place + 4], "little")
        entries.append(bytes(raw[place : place + size]))
        place += size
    return entries


def merge(shards: int, entries: Sequence[bytes], options: ReadOptions, rounds: int) -> None:
    """Transform the entries as one oplog, and dealt out to shards whose events are merged."""
    if shards == 1:
        print(f"\n{'shards':>8}{'CPU us an event':>18}{'for the merge':>16}   ({len(entries):,} entries from memory)")
    names = [f"shard-{number:04d}" for number in range(shards)]
    until = entry_time(entries[-1])
    dealt = {name: batches(entries[number::shards], until) for number, name in enumerate(names)}
    whole = {ONE_OPLOG: batches(entries, until)}
    alone, merged = [], []
    for _ in range(rounds + 1):
        alone.append(timed(open_stream(plan_of(options, entries), mid_stream=True), whole))
        merged.append(timed(MergedStream(plan_of(options, entries), names, mid_stream=True), dealt))
    assert alone[0][1] == merged[0][1], "the merge has lost events"
    one, many = (statistics.median(seconds for seconds, _ in runs[1:]) / len(entries) * 1e6 for runs in (alone, merged))
    print(f"{shards:>8}{many:>18.2f}{many - one:>16.2f}", flush=True)


def plan_of(options: ReadOptions, entries: Sequence[bytes]) -> Any:
    start = Start("startAtOperationTime", time=entry_time(entries[0]))
    return options.plan(options.stream_options(start), profile_for("6.0.27"))


def batches(entries: Sequence[bytes], until: ClusterTime) -> list[OplogBatch]:
    """As a task reads them, in pieces of 4 MB; the last one promises the end of the slice."""
    ends, size = [], 0
    for entry in entries:
        size += len(entry)
        ends.append(size)
    result, low = [], 0
    while low < len(entries):
        high = max(low + 1, bisect.bisect_right(ends, (ends[low - 1] if low else 0) + BATCH_BYTES))
        result.append(OplogBatch(b"".join(entries[low:high]), entry_time(entries[high - 1])))
        low = high
    return [*result[:-1], result[-1]._replace(high_water=until)]


def timed(stream: Stream, dealt: Mapping[str, Sequence[OplogBatch]]) -> tuple[float, int]:
    """CPU seconds, and how many events there are."""
    left = {name: iter(found) for name, found in dealt.items()}
    began, events = time.process_time(), 0
    while left:
        for name in [name for name in stream.waiting_for if name in left] or [next(iter(left))]:
            batch = next(left[name], None)
            if batch is None:
                del left[name]
            else:
                stream.feed(name, batch)
        events += sum(len(block) for block in drive(stream, lambda need: None))
    return time.process_time() - began, events


if __name__ == "__main__":
    raise SystemExit(main())
