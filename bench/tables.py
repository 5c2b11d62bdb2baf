"""How fast do changes of the oplog come into a Delta table that equals its collection?

One million changes (a tenth inserts, eight tenths updates, a tenth deletes) over 200,000 documents of about 500 bytes,
from the oplog of a mongod on this machine. On one side the tables; on the other the program that one writes without
Tailrace: PyMongo's change stream with ``updateLookup``, folded by ``_id``, merged by ``deltalake``. That loop runs over
a part of the changes (``--loop``), since it would take very long.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import bson
import bson.json_util
import pyarrow as pa
from bson.raw_bson import RawBSONDocument
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pymongo import DeleteOne, InsertOne, MongoClient, UpdateOne
from pymongo.write_concern import WriteConcern

from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.versions import disk_use
from tailrace.lake.tables.writer import TablesWriter

_BATCH = 20_000
#: Unordered writes are sent by kind, inserts first and deletes last: few commands, instead of a wait for the journal
#: after each write.
_QUICKLY = WriteConcern(1, j=False)


def document(number: int, chosen: random.Random) -> dict[str, Any]:
    return {
        "_id": number,
        "customer": f"customer-{chosen.randrange(10_000):05d}",
        "status": "new",
        "total": chosen.random() * 1000,
        "lines": [{"sku": f"sku-{chosen.randrange(1000)}", "quantity": 1 + line} for line in range(4)],
        "address": {"town": "Porto", "street": "x" * 40, "zip": f"{chosen.randrange(99999):05d}"},
        "note": "n" * 120,
        "n": 0,
    }


def fill(collection: Any, documents: int) -> None:
    chosen = random.Random(1)
    for first in range(0, documents, 10_000):
        collection.insert_many([document(number, chosen) for number in range(first, min(documents, first + 10_000))])


def changes(
    collection: Any, count: int, documents: int, seed: int, *, at_once: int = 10_000, pace: Callable[[], None] = int
) -> None:
    chosen = random.Random(seed)
    alive = list(range(documents))
    following = documents
    done = 0
    while done < count:
        writes: list[Any] = []
        for _ in range(min(at_once, count - done)):
            what = chosen.random()
            if what < 0.1:
                writes.append(InsertOne(document(following, chosen)))
                alive.append(following)
                following += 1
            elif what < 0.2:
                place = chosen.randrange(len(alive))
                alive[place], alive[-1] = alive[-1], alive[place]
                writes.append(DeleteOne({"_id": alive.pop()}))
            else:
                change = {"$set": {"status": "paid", "total": chosen.random()}, "$inc": {"n": 1}}
                writes.append(UpdateOne({"_id": chosen.choice(alive)}, change))
        collection.with_options(write_concern=_QUICKLY).bulk_write(writes, ordered=False)
        done += len(writes)
        pace()


def ours(uri: str, root: Any, write: Any, **options: Any) -> tuple[float, float]:
    """Seconds for the changes, and for the copy before them."""
    settings = TableSettings(root, (TableRule("bench.orders"),), every_s=0.0, **options)
    begun = time.monotonic()
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()
        copied = time.monotonic() - begun
        write()
        begun = time.monotonic()
        writer.run_to_present()
        return time.monotonic() - begun, copied


def nested(uri: str, root: Path, write: Any) -> dict[str, float]:
    """Seconds of this process's processors for the same changes, with objects and arrays as text and as structs and
    lists."""
    rules = {name: TableRule("bench.orders", TableSchema(nested=name == "nested")) for name in ("text", "nested")}
    settings = {name: TableSettings(root / name, (rule,), every_s=0.0) for name, rule in rules.items()}
    for one in settings.values():
        with TablesWriter(uri, one) as writer:
            writer.run_to_present()
    write()
    found = {}
    for name, one in settings.items():
        begun = time.process_time()
        with TablesWriter(uri, one) as writer:
            writer.run_to_present()
        found[name] = time.process_time() - begun
    return found


def amplified(uri: str, root: Path, collection: Any, args: argparse.Namespace, *, merge_on_read: bool) -> None:
    """Follow ``--rate`` changes a second for ``--seconds``, and print what was written and how long readers read."""
    collection.drop()
    fill(collection, args.documents)
    rule = TableRule("bench.orders")
    # Nothing is removed meanwhile, so what lies there at the end is what was written.
    settings = TableSettings(root, (rule,), grace_h=24.0, merge_on_read=merge_on_read)
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()
        folder = place_of(root, "bench.orders")
        before, copied = disk_use(folder), DeltaTable(str(folder)).version()
        cpu = time.process_time()
        load = threading.Thread(target=_paced, args=(collection, args, writer.stop))
        load.start()
        writer.run()
        load.join()
        cpu = time.process_time() - cpu
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()
    written = disk_use(folder).bytes - before.bytes
    table = CollectionTable(folder, "bench.orders")
    rows, live, newest = table.rows(), table.live_bytes, table.version
    taken = [copied + (newest - copied) * part // args.reads for part in range(1, args.reads + 1)]
    table.compact(target_bytes=1 << 30)
    *read, compacted = reading(folder, taken)
    changed = args.rate * args.seconds
    row = table.live_bytes / rows
    print(f"{'merged on read' if merge_on_read else 'files rewritten'}")
    print(f"  written       {written / 1e6:12,.1f} MB for {changed:,} changes of rows of {row:.0f} bytes on the disk")
    print(f"  amplification {written / (changed * row):12.1f} times the changed bytes")
    print(f"                {written / live:12.1f} times the table's own bytes")
    print(f"  processor     {1e6 * cpu / changed:12.1f} us for a change, the load's own part with it")
    for name in compacted:
        ratios = [one[name] / compacted[name] for one in read]
        print(
            f"  {name:<13} {statistics.mean(ratios):12.2f} times the time of the compacted table, at most "
            f"{max(ratios):.2f} ({compacted[name]:.2f} s; {len(ratios)} versions)"
        )


def _paced(collection: Any, args: argparse.Namespace, stop: Callable[[], None]) -> None:
    """Write ``--rate`` changes a second, and call ``stop`` at the end."""
    begun, done = time.monotonic(), 0

    def pace() -> None:
        nonlocal done
        done += 1
        time.sleep(max(0.0, begun + done / 4 - time.monotonic()))

    try:
        changes(collection, args.rate * args.seconds, args.documents, 2, at_once=args.rate // 4, pace=pace)
    finally:
        stop()


def by_deltalake(folder: Path, version: int | None) -> None:
    """Read all rows of a table by deltalake's SQL."""
    table = DeltaTable(str(folder), version=version)
    QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all()


def by_polars(folder: Path, version: int | None) -> None:
    """Read all rows of a table by Polars."""
    import polars  # noqa: PLC0415

    polars.scan_delta(str(folder), version=version).collect()


READERS: Final = {"deltalake": by_deltalake, "polars": by_polars}


def reading(folder: Path, taken: Sequence[int], best_of: int = 5) -> list[dict[str, float]]:
    """Processor seconds for reading all rows of each version, and finally of the newest one, which is compacted. All of
    them are read in every turn, so that other programs disturb all alike; the best turn counts."""
    found: list[dict[str, float]] = [{} for _ in (*taken, None)]
    for _ in range(best_of):
        for version, best in zip((*taken, None), found, strict=True):
            for name in READERS:
                spent = seconds_of(name, folder, version)
                best[name] = min(spent, best.get(name, spent))
    return found


def seconds_of(reader: str, folder: Path, version: int | None = None) -> float:
    """Processor seconds for reading all rows of a version, by default of the newest one."""
    begun = time.process_time()
    READERS[reader](folder, version)
    return time.process_time() - begun


def loop(uri: str, root: Path, collection: Any, count: int, documents: int) -> float:
    """Changes a second of the loop that one writes by hand."""
    found = [bytes(one.raw) for one in collection.with_options(codec_options=_RAW).find()]
    write_deltalake(str(root), _table(found))
    with MongoClient[Any](uri) as client:
        watched = client.bench.orders.with_options(codec_options=_RAW)
        with watched.watch(full_document="updateLookup", batch_size=10_000) as stream:
            changes(collection, count, documents, 3)
            begun = time.monotonic()
            latest: dict[Any, bytes | None] = {}
            for number in range(1, count + 1):
                event = stream.next()
                after = event.get("fullDocument")
                latest[event["documentKey"]["_id"]] = None if after is None else bytes(after.raw)
                if number % _BATCH == 0 or number == count:
                    _merge(root, latest)
                    latest = {}
            return count / (time.monotonic() - begun)


_RAW: Any = bson.codec_options.CodecOptions(document_class=RawBSONDocument)


def _table(documents: list[bytes]) -> pa.Table:
    rows = [bson.decode(one) for one in documents]
    columns = {name: [row[name] for row in rows] for name in ("_id", "customer", "status", "total", "n")}
    return pa.table({**columns, "json": [bson.json_util.dumps(row) for row in rows], "bson": documents})


def _merge(root: Path, latest: dict[Any, bytes | None]) -> None:
    there = _table([one for one in latest.values() if one is not None])
    gone = [key for key, one in latest.items() if one is None]
    there = there.append_column("gone", pa.array([False] * there.num_rows))
    dead = pa.Table.from_pylist([{"_id": key, "gone": True} for key in gone], there.schema)
    names = [name for name in there.column_names if name != "gone"]
    (
        DeltaTable(str(root))
        .merge(pa.concat_tables([there, dead]), "t._id = s._id", source_alias="s", target_alias="t")
        .when_matched_delete("s.gone")
        .when_matched_update({name: f"s.{name}" for name in names})
        .when_not_matched_insert({name: f"s.{name}" for name in names}, predicate="NOT s.gone")
        .execute()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--loop", type=int, default=40_000, help="changes for the loop by hand (0: leave it out)")
    parser.add_argument("--nested", action="store_true", help="compare columns of structs and lists with text instead")
    parser.add_argument(
        "--merge-on-read", action="store_true", help="compare tables whose rows are marked as gone with others"
    )
    parser.add_argument("--rate", type=int, default=2000, help="with --merge-on-read: changes a second")
    parser.add_argument("--seconds", type=int, default=200, help="with --merge-on-read: for so long")
    parser.add_argument("--reads", type=int, default=8, help="with --merge-on-read: of so many versions")
    parser.add_argument(
        "--place",
        choices=("disk", "s3", "azure", "google"),
        nargs="+",
        help="compare tables in these places instead, in one run; stores are SeaweedFS, Azurite (needs npm) and "
        "fake-gcs-server here",
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[10_000], help="with --place: changes of a micro-batch")
    parser.add_argument("--batches", type=int, default=20, help="with --place: so many of them")
    args = parser.parse_args()
    if args.place:
        from bench.places import tables  # noqa: PLC0415  it imports this module

        tables(args)
        return
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory,
        ReplicaSet(1, oplog_size_mb=4000) as members,
    ):
        client = MongoClient[Any](members.uri)
        collection = client.bench.orders
        if args.merge_on_read:
            for merged in (True, False):
                amplified(members.uri, Path(directory) / str(merged), collection, args, merge_on_read=merged)
            return
        fill(collection, args.documents)
        if args.nested:
            spent = nested(members.uri, Path(directory), lambda: changes(collection, args.changes, args.documents, 2))
            for name, cpu in spent.items():
                print(f"{name:<13} {1e6 * cpu / args.changes:12.1f} us of CPU for a change ({args.changes:,} changes)")
            return
        seconds, copied = ours(
            members.uri, Path(directory) / "ours", lambda: changes(collection, args.changes, args.documents, 2)
        )
        rate = args.changes / seconds
        print(f"copy          {args.documents / copied:12,.0f} documents/s")
        print(f"tables        {rate:12,.0f} changes/s ({args.changes:,} in {seconds:.1f} s)")
        if args.loop:
            collection.drop()
            fill(collection, args.documents)
            by_hand = loop(members.uri, Path(directory) / "theirs", collection, args.loop, args.documents)
            print(f"loop by hand  {by_hand:12,.0f} changes/s ({args.loop:,} changes)")
            print(f"ratio         {rate / by_hand:12.1f}")


if __name__ == "__main__":
    main()
