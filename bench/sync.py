"""How fast does one MongoDB become equal to another, and stay so?

Source and target are replica sets on this machine. Documents of about 500 bytes are copied; then the source takes
changes (a tenth inserts, eight tenths updates, a tenth deletes) that the target has to take over. On one side
``tailrace.sync``; on the other the loop that one writes without it: PyMongo's change stream with ``updateLookup``, in
bulks of 1,000, and one by one. What the target's mongod needs for the same writes is measured alone: the commands that
``tailrace sync`` sends, made beforehand, one after the other. Then both ends are verified, the lag is measured at 1,000
writes a second, a target that is some minutes behind catches up while they go on, and a sync of 100 collections is cut
over. At the end each bar is printed, with whether it was met.

    python bench/sync.py --documents 500000 --changes 300000 --members 1 --behind 3600
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import DeleteOne, MongoClient, ReplaceOne, WriteConcern
from pymongo.read_concern import ReadConcern

from tables import changes, document, fill
from tailrace.embedded import ReplicaSet
from tailrace.sync import Sync

_BULK = 1_000
#: Changes that a sync writes in one transaction when it is behind.
_SEGMENT = 8_000
#: Writes a second while the lag is measured, and while a target catches up.
_PACE = 1_000


class Bars:
    """A bar, and the figure that was reached."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, str, float, bool]] = []

    def least(self, what: str, measured: float, bar: float) -> None:
        self._rows.append((what, measured, "at least", bar, measured >= bar))

    def most(self, what: str, measured: float, bar: float) -> None:
        self._rows.append((what, measured, "at most", bar, measured <= bar))

    def print(self) -> None:
        for what, measured, way, bar, met in self._rows:
            shown = f"{measured:,.0f}" if measured >= 100 else f"{measured:.2f}"
            print(f"{what:60} {shown:>10}   {way} {bar:,.0f}: {'met' if met else 'MISSED'}")


def main() -> None:
    options = _arguments()
    bars = Bars()
    with ExitStack() as stack:
        # With a small cache WiredTiger's own threads write pages all the time: 110 microseconds of CPU a change.
        given = {"version": options.version, "oplog_size_mb": 4000, "cache_gb": options.cache_gb}
        source = stack.enter_context(ReplicaSet(options.members, **given))
        target = stack.enter_context(ReplicaSet(options.members, **given))
        client = stack.enter_context(MongoClient[Any](source.uri))
        collection = client.bench.orders
        fill(collection, options.documents)
        size = client.bench.command("collStats", "orders")["avgObjSize"]
        with _cpu_told(target.uri, options.documents):
            seconds = _timed_run(source, target)
        rate = told("copy", options.documents, seconds, f"documents of {size} bytes")
        bars.least("copy, documents a second", rate, 60_000)
        with MongoClient[Any](target.uri) as there:
            there.bench.orders.aggregate([{"$out": {"db": "floor", "coll": "orders"}}])
        before = client.admin.command("ping")["operationTime"]
        changes(collection, options.changes, options.documents, 7)
        with _cpu_told(target.uri, options.changes):
            seconds = _timed_run(source, target)
        ours = told("steady, tailrace sync", options.changes, seconds, "changes")
        bars.least("steady, changes a second", ours, 15_000)
        segments = _segments(client, before)
        with _cpu_told(target.uri, options.changes):
            seconds = floor(target.uri, segments)
        told("  mongod alone", options.changes, seconds, "changes")
        for bulk, share, bar in ((_BULK, options.loop, 3), (1, options.loop // 20, 40)):
            with _cpu_told(target.uri, share):
                seconds = loop(client, target.uri, before, share, bulk)
            rate = told(f"steady, the loop in bulks of {bulk:,}", share, seconds, "changes")
            bars.least(f"steady, times the loop in bulks of {bulk:,}", ours / rate, bar)
        with MongoClient[Any](target.uri) as there:
            there.drop_database("loop")
            there.drop_database("floor")
        with Sync(source.uri, target.uri) as sync:
            begun = time.monotonic()
            found = sync.verify()
            rate = told("verification", found.documents, time.monotonic() - begun, "documents")
            print(f"  differences: {len(found.differences)}")
            bars.least("verification, documents a second", rate, 100_000)
        bars.most("lag at 1,000 writes a second, 99th percentile, seconds", lag(source, target, options.seconds), 2)
        share = 3_600 / options.behind
        seconds = behind(source, target, options.behind)
        what = f"an hour behind made good, seconds ({share:.0f} x {seconds:.1f})"
        bars.most(what, share * seconds, 600)
        bars.most("memory with documents of 16 MB, MB", peak(source, options.version), 600)
        bars.most("cut-over of 100 collections, seconds", cut_over(options.version), 5)
    bars.print()


def told(what: str, count: int, seconds: float, of: str) -> float:
    """Print a rate, and return it."""
    rate = count / seconds
    print(f"{what}: {rate:,.0f} {of} a second ({count:,} in {seconds:.1f} s)", flush=True)
    return rate


def _timed_run(source: ReplicaSet, target: ReplicaSet, **options: Any) -> float:
    with Sync(source.uri, target.uri, **options) as sync:
        begun = time.monotonic()
        sync.run(to_present=True)
        return time.monotonic() - begun


def loop(client: MongoClient[Any], uri: str, start: Any, count: int, bulk: int) -> float:
    """Seconds for so many changes by the loop that one writes by hand, into a collection of its own."""
    with MongoClient[Any](uri) as there:
        into = there.loop[f"orders{bulk}"]
        waiting: list[Any] = []
        begun = time.monotonic()
        done = 0
        watched = client.bench.orders.watch(
            full_document="updateLookup", start_at_operation_time=start, batch_size=bulk
        )
        with watched as stream:
            while done < count:
                event = stream.try_next()
                if event is None:
                    break
                key, whole = event["documentKey"], event.get("fullDocument")
                waiting.append(DeleteOne(key) if whole is None else ReplaceOne(key, whole, upsert=True))
                done += 1
                if len(waiting) == bulk:
                    into.bulk_write(waiting, ordered=True)
                    waiting = []
        if waiting:
            into.bulk_write(waiting, ordered=True)
        return time.monotonic() - begun


@contextmanager
def _cpu_told(uri: str, count: int) -> Iterator[None]:
    """Print the processor time that the target's primary and this process need."""
    with MongoClient[Any](uri) as client:
        pid = client.admin.command("serverStatus")["pid"]
    before = _cpu(pid), time.process_time()
    yield
    server, ours = _cpu(pid) - before[0], time.process_time() - before[1]
    print(f"microseconds of CPU each: {server / count * 1e6:.0f} of the target, {ours / count * 1e6:.0f} here")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _segments(client: MongoClient[Any], start: Any) -> list[list[dict[str, Any]]]:
    """The commands of the changes since ``start``, as a sync sends them."""
    query = {"ts": {"$gt": start}, "ns": "bench.orders", "op": {"$in": ["i", "u", "d"]}}
    entries = list(client.local["oplog.rs"].find(query, sort=[("$natural", 1)]))
    return [_commands(entries[at : at + _SEGMENT]) for at in range(0, len(entries), _SEGMENT)]


def floor(uri: str, segments: list[list[dict[str, Any]]]) -> float:
    """Seconds that the target needs for the same writes: made beforehand, in transactions with a position each."""
    with MongoClient[Any](uri) as there, there.start_session() as session:
        begun = time.monotonic()
        for number, commands in enumerate(segments):
            with session.start_transaction(ReadConcern("snapshot"), WriteConcern("majority")):
                there.floor.at.update_one({"_id": 1}, {"$set": {"n": number}}, upsert=not number, session=session)
                for command in commands:
                    there.floor.command(command, session=session)
        return time.monotonic() - begun


def _commands(entries: list[Any]) -> list[dict[str, Any]]:
    """The same commands as a segment of a sync: each document once."""
    deletes: dict[Any, Any] = {}
    updates: dict[Any, Any] = {}
    inserts: dict[Any, Any] = {}
    for one in entries:
        key, o = one.get("o2", one["o"])["_id"], one["o"]
        if one["op"] == "i":
            inserts[key] = o
        elif one["op"] == "d":
            updates.pop(key, None)
            if inserts.pop(key, None) is None:
                deletes[key] = {"q": {"_id": key}, "limit": 1}
        elif key in inserts:
            inserts[key].update(o["diff"]["u"])
        else:
            updates.setdefault(key, {"q": {"_id": key}, "u": {"$set": {}}})["u"]["$set"].update(o["diff"]["u"])
    kinds = (("delete", "deletes", deletes), ("update", "updates", updates), ("insert", "documents", inserts))
    return [
        {kind: "orders", field: [RawBSONDocument(bson.encode(some[key])) for key in sorted(some)]}
        for kind, field, some in kinds
        if some
    ]


def peak(source: ReplicaSet, version: str) -> float:
    """The most memory that a process has while it copies and follows, with documents of 16 MB among them."""
    with MongoClient[Any](source.uri) as client, ReplicaSet(version=version, oplog_size_mb=4000) as target:
        large = client.bench.large
        large.insert_many([{"_id": n, "pad": b"x" * (16_000_000)} for n in range(8)])
        command = [sys.executable, "-m", "tailrace", "sync", source.uri, target.uri]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _until_equal(target.uri)
                for number in range(8):
                    large.update_one({"_id": number}, {"$set": {"pad": b"y" * 16_000_000}})
                    large.update_one({"_id": number}, {"$set": {"n": number}})
                last = client.admin.command("ping")["operationTime"]
                _until_equal(target.uri, last)
                return _high_water(process.pid)
            finally:
                process.terminate()


def _high_water(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _until_equal(uri: str, at: Any = None) -> None:
    with MongoClient[Any](uri) as client:
        while True:
            found = client.tailrace_sync.syncs.find_one({"_id": "sync"}) or {}
            if found.get("phase") == "follow" and (at is None or found["time"] >= at):
                return
            time.sleep(0.1)


def behind(source: ReplicaSet, target: ReplicaSet, seconds: float) -> float:
    """Seconds until a target has caught up. Nobody followed while 1,000 changes a second were written for so many
    seconds, and as many writes go on meanwhile."""
    count = round(seconds * _PACE)
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        collection = client.bench.behind
        fill(collection, _BEHIND)
        _timed_run(source, target)
        changes(collection, count, _BEHIND, 9)
        stop = threading.Event()
        writing = threading.Thread(target=_write_on, args=(source.uri, stop), daemon=True)
        writing.start()
        with Sync(source.uri, target.uri) as sync, _cpu_told(target.uri, count):
            begun = time.monotonic()
            running = threading.Thread(target=sync.run, daemon=True)
            running.start()
            while there.tailrace_sync.syncs.find_one({"_id": "sync"}, {"time": 1})["time"].time < time.time() - 2:
                time.sleep(0.1)
            taken = time.monotonic() - begun
            stop.set()
            writing.join()
            sync.stop()
            running.join()
        written = client.bench.meanwhile.estimated_document_count()
        told(f"{seconds:,.0f} seconds behind, made good while {written / taken:,.0f} writes a second went on", count,
             taken, "changes")  # fmt: skip
    return taken


#: Documents of the collection of a target that is behind.
_BEHIND = 100_000


def _write_on(uri: str, stop: threading.Event) -> None:
    rest = document(0, random.Random(1))
    with MongoClient[Any](uri) as client:
        begun, number = time.monotonic(), 0
        while not stop.is_set():
            client.bench.meanwhile.insert_many([{**rest, "_id": number + place} for place in range(20)])
            number += 20
            time.sleep(max(0.0, begun + number / _PACE - time.monotonic()))


def lag(source: ReplicaSet, target: ReplicaSet, seconds: float) -> float:
    """The 99th percentile of how long a write takes to the target, at 1,000 writes a second."""
    _timed_run(source, target)  # first what was written since
    written: dict[int, float] = {}
    seen: dict[int, float] = {}
    stop = threading.Event()
    with (
        Sync(source.uri, target.uri) as sync,
        MongoClient[Any](source.uri) as writer,
        MongoClient[Any](target.uri) as reader,
    ):
        running = threading.Thread(target=sync.run, daemon=True)
        running.start()
        rest = document(0, random.Random(1))

        def look() -> None:
            while not stop.is_set():
                found = reader.bench.lag.find_one(sort=[("_id", -1)], projection=["_id"])
                if found is not None:
                    seen.setdefault(found["_id"], time.monotonic())
                time.sleep(0.01)

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        begun = time.monotonic()
        number = 0
        while time.monotonic() - begun < seconds:
            batch = [{**rest, "_id": number + place} for place in range(20)]
            writer.bench.lag.insert_many(batch)
            number += 20
            written[number - 1] = time.monotonic()
            time.sleep(max(0.0, begun + number / _PACE - time.monotonic()))
        time.sleep(3)
        stop.set()
        looking.join()
        sync.stop()
        running.join()
    known = sorted(seen.items())
    lags = sorted(next((at for one, at in known if one >= last), float("inf")) - when for last, when in written.items())
    print(f"lag at 1,000 writes a second: median {lags[len(lags) // 2]:.2f} s, ", end="")
    found = lags[int(len(lags) * 0.99)]
    print(f"99th percentile {found:.2f} s ({number / seconds:,.0f} a second)", flush=True)
    return found


def cut_over(version: str) -> float:
    """A sync of 100 collections is cut over."""
    with ReplicaSet(version=version) as source, ReplicaSet(version=version) as target:
        with MongoClient[Any](source.uri) as client:
            for number in range(100):
                client.bench[f"c{number}"].insert_many([{"n": n} for n in range(100)])
                client.bench[f"c{number}"].create_index("n", expireAfterSeconds=10**6)
        with Sync(source.uri, target.uri) as sync:
            running = threading.Thread(target=sync.run, daemon=True)
            running.start()
            with Sync(source.uri, target.uri) as other:
                _until_equal(target.uri)
                done = other.cutover(block=False)
            sync.stop()
            running.join()
        print(f"cut-over of 100 collections: {done.seconds:.1f} s, {done.verified:,} documents compared", flush=True)
        return done.seconds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--documents", type=int, default=300_000)
    parser.add_argument("--changes", type=int, default=200_000)
    parser.add_argument("--loop", type=int, default=40_000, help="changes that the loop takes over (40,000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measurement of the lag (20)")
    parser.add_argument("--members", type=int, default=1, help="of each end (1)")
    parser.add_argument("--behind", type=float, default=360.0, help="seconds that a target is behind (360)")
    own = max(0.25, (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30) - 1) / 2)
    parser.add_argument("--cache-gb", type=float, default=own, help="of each server (what mongod takes by itself)")
    parser.add_argument("--version", default="6.0.27")
    return parser.parse_args()


if __name__ == "__main__":
    main()
