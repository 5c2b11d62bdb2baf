"""How fast is catching up on a long oplog, beside the native stream?

An oplog of about 600 bytes an entry to Parquet, by two programs in one run:

* ``spark``: the Tailrace source and lake on Spark, ``local[2]``, ``availableNow``;
* ``native``: a PyMongo loop on the server's own change stream (raw documents, large batches), which makes the same
  columns with pyarrow and writes them with the same Parquet settings.

``--workload``: ``plain`` (half inserts, half updates), ``transactions`` (the same in transactions of ten operations),
or ``shards`` (plain, over three shards; native is a merge of the shards' own streams by token).

Each side runs in a process of its own, in turns, ``--rounds`` times, and does the work several times: the first time in
a fresh session or client, then again (``--again``) in the running one, where the quickest time counts. Medians of the
rounds are printed, with all CPU time of the last work (client, JVM, workers and mongod), which is the figure to go by
on a busy machine. All must hold the same events, byte for byte, and the ratios must reach the bars, or the exit status
is 1.

    python bench/catch_up.py [--entries 200000] [--rounds 3] [--documents bson variant json] [--workload plain]
"""

# ruff: noqa: PLC0415  each side imports only what it needs: its start is measured too
from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pymongo
from bson import encode
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from sides import clock

#: Of the deployment, and of each shard's replica set, which the native side reads and whose CPU counts.
URI, SHARDS = "TAILRACE_BENCH_URI", "TAILRACE_BENCH_SHARDS"
DATABASE, COLLECTION = "bench", "entries"
#: Operations in a transaction.
OPERATIONS = 10
#: A ``maxBytesPerTrigger`` that is larger than any oplog here.
WHOLE = "1g"
#: A row of the result, and the ratio that it must reach, with the number of entries from which that is asked.
ROWS = (("again", "in a running session"), ("first", "first of a session"), ("all", "with the start of everything"))
BARS = {
    "plain": {"again": ((1_000_000, 5.0), (200_000, 3.0)), "first": ((200_000, 0.8),)},
    "transactions": {"again": ((1_000_000, 3.0),)},
    "shards": {"again": ((1_000_000, 3.0),)},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", type=int, default=2)
    parser.add_argument("--documents", choices=("bson", "variant", "json"), nargs="+", default=["bson"])
    parser.add_argument("--workload", choices=tuple(BARS), default="plain")
    parser.add_argument(
        "--place",
        choices=("disk", "s3", "azure", "google"),
        nargs="+",
        help="compare lakes in these places instead; stores are SeaweedFS, Azurite (needs npm) and fake-gcs-server on "
        "this machine",
    )
    parser.add_argument("--max-bytes", default=WHOLE, help="maxBytesPerTrigger; with --place, of the counted run")
    parser.add_argument("--lake", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=("spark", "native"), help=argparse.SUPPRESS)
    parser.add_argument("--since", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "spark":
        return run_spark(args)
    if args.child == "native":
        return run_native(args)
    if args.place:
        sys.path.append(str(Path(__file__).resolve().parents[1]))  # the tests start the stores
        from catch_up_places import compare as compare_places

        return compare_places(args)
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    from tailrace.embedded import ReplicaSet, ShardedCluster

    with ExitStack() as stack:
        if args.workload == "shards":
            cluster = stack.enter_context(ShardedCluster(3, oplog_size_mb=1024, cache_gb=0.5))
            cluster.router.create_database(DATABASE, "shard0")
            uri, shards = cluster.uri, [shard.uri for shard in cluster.shards.values()]
        else:
            members = stack.enter_context(ReplicaSet(1, oplog_size_mb=4096, cache_gb=1.0))
            uri, shards = members.uri, [members.uri]
        since = fill(shards, args)
        held = [compare_documents(documents, uri, shards, since, args) for documents in args.documents]
    return 0 if all(held) else 1


def compare_documents(documents: str, uri: str, shards: Sequence[str], since: str, args: argparse.Namespace) -> bool:
    """Print one table of the result. Returns whether all of its bars were met."""
    results: dict[str, list[dict[str, float]]] = {"native": [], "spark": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(args.rounds):
            for side, runs in results.items():
                out = Path(directory) / f"{side}-{number}"
                runs.append(child(side, out, documents, (uri, since, *shards), args))
        digests = {
            digest(path) for run in Path(directory).iterdir() for path in run.iterdir() if path.suffix != ".checkpoint"
        }
    print(
        f"{args.entries:,} oplog entries ({args.workload}), {os.cpu_count()} cores, documents: {documents}, "
        f"medians of {args.rounds}"
    )
    medians = {
        side: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for side, runs in results.items()
    }
    print(f"{'events/s':30}{'native':>10}{'spark':>10}{'ratio':>8}{'bar':>8}")
    held = len(digests) == 1
    for name, words in ROWS:
        native, spark = (args.entries / medians[side][name] for side in ("native", "spark"))
        bars = BARS[args.workload].get(name, ())
        bar = next((bar for entries, bar in bars if args.entries >= entries), 0.0)
        held &= spark / native >= bar
        print(f"{words:30}{native:10,.0f}{spark:10,.0f}{spark / native:8.2f}{f'{bar:8.1f}' if bar else ''}")
    native, spark = (medians[side]["cpu"] / args.entries * 1e6 for side in ("native", "spark"))
    print(f"{'CPU us an event, with mongod':30}{native:10.1f}{spark:10.1f}{native / spark:8.2f}")
    print(f"the same bytes in every run: {'yes' if len(digests) == 1 else 'NO'}; bars {'met' if held else 'NOT met'}")
    sys.stdout.flush()
    return held


def fill(shards: Sequence[str], args: argparse.Namespace) -> str:
    """Write ``args.entries`` events' worth of oplog; gives the cluster time to start at, ``seconds,increment``."""
    chance = random.Random(7)
    write = fill_in_transactions if args.workload == "transactions" else fill_plainly
    with ExitStack() as stack:
        clients = [stack.enter_context(pymongo.MongoClient[dict[str, Any]](uri)) for uri in shards]
        for client in clients:
            client[DATABASE].create_collection(COLLECTION)
        clocks = [clock(client) for client in clients]
        newest = max(clocks, key=lambda one: one["clusterTime"])
        for client in clients:
            clock(client, newest)
        each = args.entries // len(clients)
        for number, client in enumerate(clients):
            write(client, number * each, each if number else args.entries - each * (len(clients) - 1), chance)
        last = next(clients[0].local["oplog.rs"].find({"op": {"$ne": "n"}}).sort("$natural", -1).limit(1))
        print(f"{args.entries:,} events written, the last entry of {len(encode(last))} bytes", file=sys.stderr)
    start: Timestamp = newest["clusterTime"]
    return f"{start.time},{start.inc + 1}"


def fill_plainly(client: pymongo.MongoClient[Any], first: int, entries: int, chance: random.Random) -> None:
    """Half inserts, half updates."""
    collection = client[DATABASE][COLLECTION]
    inserts = entries // 2
    for start in range(0, inserts, 1000):
        collection.insert_many([document(first + n, chance) for n in range(start, min(start + 1000, inserts))])
    changes = entries - inserts
    for start in range(0, changes, 1000):
        changed = [
            pymongo.UpdateOne({"_id": first + chance.randrange(inserts)}, {"$set": change(n, chance)})
            for n in range(start, min(start + 1000, changes))
        ]
        found = collection.bulk_write(changed)
        assert found.modified_count == len(changed), "a change that changed nothing would make no entry"


def fill_in_transactions(client: pymongo.MongoClient[Any], first: int, entries: int, chance: random.Random) -> None:
    """The same, in transactions of five inserts and five updates."""
    collection = client[DATABASE][COLLECTION]
    half = OPERATIONS // 2
    with client.start_session() as session:
        for number in range(first, first + entries // 2, half):
            with session.start_transaction():
                collection.insert_many([document(number + n, chance) for n in range(half)], session=session)
                changed = [
                    pymongo.UpdateOne({"_id": number + n}, {"$set": change(number + n, chance)}) for n in range(half)
                ]
                collection.bulk_write(changed, session=session)


def document(number: int, chance: random.Random) -> dict[str, Any]:
    return {
        "_id": number,
        "name": f"customer {number}",
        "town": chance.choice(["Lagos", "Osaka", "Porto", "Quito"]),
        "points": chance.random(),
        "lines": [{"sku": f"sku-{chance.randrange(10_000)}", "n": n} for n in range(4)],
        "text": "".join(chance.choices("abcdefgh ", k=150)),
    }


def change(number: int, chance: random.Random) -> dict[str, Any]:
    return {
        "points": chance.random(),
        "seen": number,
        "text": "".join(chance.choices("abcdefgh ", k=220)),
        "lines.1.n": number,
    }


def child(
    side: str,
    out: Path,
    documents: str,
    place: Sequence[str],
    args: argparse.Namespace,
    *,
    lake: str | None = None,
    label: str = "",
) -> dict[str, float]:
    """Run one side. ``place``: the uri, where to start, and the shards' uris. ``lake``: the URI of one in a store."""
    uri, since, *shards = place
    out.mkdir()
    began = time.perf_counter()
    command = [sys.executable, __file__, "--child", side, "--since", since, "--out", str(out)]
    command += ["--entries", str(args.entries), "--documents", documents, "--again", str(args.again)]
    command += ["--max-bytes", args.max_bytes] + (["--lake", lake] if lake else [])
    done = subprocess.run(
        command,
        env={**os.environ, URI: uri, SHARDS: " ".join(shards)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Spark's greetings; an error shows in the exit status
        check=True,
        start_new_session=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    result["all"] = result.pop("first_done") - began
    print(label or side, documents, {name: round(value, 2) for name, value in result.items()}, file=sys.stderr)
    return result


def repeatedly(work: Callable[[Path], int], args: argparse.Namespace, more: Mapping[str, float]) -> None:
    """Do the work several times. Print the seconds of the first and of the quickest other, and the CPU seconds of the
    last, mongod's among them; and ``more``."""
    started = time.perf_counter()
    assert work(args.out / "first") == args.entries
    first_done = time.perf_counter()
    times, cpu = [], 0.0
    for number in range(args.again):
        cpu, begun = cpu_seconds(), time.perf_counter()
        assert work(args.out / f"again-{number}") == args.entries
        times.append(time.perf_counter() - begun)
    used = cpu_seconds() - cpu
    result = {"first": first_done - started, "first_done": first_done, "again": min(times, default=0.0), "cpu": used}
    print(json.dumps(result | more))
    sys.stdout.flush()


def cpu_seconds() -> float:
    """Used so far by the servers and by every process of our session: driver, JVM, workers."""
    total = 0.0
    for uri in os.environ[SHARDS].split():
        with pymongo.MongoClient[dict[str, Any]](uri) as client:
            info = client.admin.command("serverStatus")["extra_info"]
        total += (info["user_time_us"] + info["system_time_us"]) / 1e6
    session, ticks = os.getsid(0), os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                # What a process's ended children have used counts with it, where it has waited for them.
                total += sum(int(field) for field in fields[11:15]) / ticks
    return total


def run_spark(args: argparse.Namespace) -> int:
    from tailrace.lake.spark.runtime.session import local_session
    from tailrace.lake.spark.store.stream import write_stream
    from tailrace.lake.store.commit_log import CommitLog
    from tailrace.lake.store.lake_root import writable_root

    spark = local_session(cores=2, fast_start=True)  # as the pages say for a lake
    source = {
        "uri": os.environ[URI],
        "database": DATABASE,
        "collection": COLLECTION,
        "startAtOperationTime": args.since,
        "documents": args.documents[0],
        "maxBytesPerTrigger": args.max_bytes,
    }
    found: dict[str, float] = {}

    def work(out: Path) -> int:
        lake, state = (out, None) if args.lake is None else (f"{args.lake}/{out.name}", out)
        write_stream(spark, source, lake, state=state, available_now=True).awaitTermination()
        log = CommitLog(writable_root(lake, state))
        found["commits"] = sum(commit.batch is not None for commit in log.commits())
        return sum(file.rows for file in log.live_files())

    repeatedly(work, args, found)
    sys.exit(0)


def run_native(args: argparse.Namespace) -> int:
    from tailrace.lake.store.part_writer import PartWriter

    seconds, increment = (int(part) for part in args.since.split(","))
    with ExitStack() as stack:
        shards = os.environ[SHARDS].split()
        clients = [stack.enter_context(pymongo.MongoClient[dict[str, Any]](uri)) for uri in shards]

        def work(out: Path) -> int:
            (out / "_staging").mkdir(parents=True)
            batches = native_batches(clients, Timestamp(seconds, increment), args)
            return sum(file.rows for file in PartWriter(out, "native").write_all(batches))

        repeatedly(work, args, {})
    return 0


def native_events(
    clients: Sequence[pymongo.MongoClient[Any]], since: Timestamp, args: argparse.Namespace
) -> Iterator[RawBSONDocument]:
    """The server's own stream; of several shards their own streams, merged by token."""
    raw = CodecOptions(document_class=RawBSONDocument)

    def stream(client: pymongo.MongoClient[Any], entries: int) -> Iterator[RawBSONDocument]:
        collection = client[DATABASE].get_collection(COLLECTION, codec_options=raw)
        with collection.watch(start_at_operation_time=since, batch_size=10_000) as events:
            for _, event in zip(range(entries), events, strict=False):
                yield event

    if len(clients) == 1:
        return stream(clients[0], args.entries)
    each = args.entries // len(clients)
    streams = [stream(client, each) for client in clients[1:]]
    streams.insert(0, stream(clients[0], args.entries - each * len(streams)))
    return heapq.merge(*streams, key=lambda event: event["_id"]["_data"])


def native_batches(
    clients: Sequence[pymongo.MongoClient[Any]], since: Timestamp, args: argparse.Namespace
) -> Iterator[Any]:
    """The server's stream as record batches with the lake's columns. Nothing makes a VARIANT of BSON there: the
    documents are BSON then."""
    import pyarrow as pa

    is_json = args.documents[0] == "json"
    document = pa.string() if is_json else pa.binary()
    schema = pa.schema(
        [
            pa.field("event", pa.binary(), nullable=False),
            ("token", pa.string()),
            ("operation_type", pa.string()),
            ("cluster_time", pa.struct([("t", pa.int64()), ("i", pa.int64())])),
            ("wall_time", pa.timestamp("us", tz="UTC")),
            ("database", pa.string()),
            ("collection", pa.string()),
            ("document_key", document),
            ("full_document", document),
            ("full_document_before_change", document),
            ("update_description", document),
            ("transaction_id", pa.struct([("lsid", pa.string()), ("txn_number", pa.int64())])),
        ]
    )
    row = json_row if is_json else bson_row
    rows: list[tuple[Any, ...]] = []
    for event in native_events(clients, since, args):
        rows.append(row(event))
        if len(rows) == 4096:
            yield record_batch(rows, schema)
            rows = []
    if rows:
        yield record_batch(rows, schema)


def bson_row(event: RawBSONDocument) -> tuple[Any, ...]:
    """One row in the order of COLUMNS, the four documents as BSON."""
    time_, ns, full, update = (
        event["clusterTime"],
        event["ns"],
        event.get("fullDocument"),
        event.get("updateDescription"),
    )
    return (
        event.raw,
        event["_id"]["_data"],
        event["operationType"],
        {"t": time_.time, "i": time_.inc},
        event["wallTime"],
        ns["db"],
        ns["coll"],
        event["documentKey"].raw,
        None if full is None else full.raw,
        None,
        None if update is None else update.raw,
        transaction(event),
    )


def transaction(event: RawBSONDocument) -> dict[str, Any] | None:
    """The session's id and the number of the transaction that the event was made in."""
    number = event.get("txnNumber")
    return None if number is None else {"lsid": str(event["lsid"]["id"].as_uuid()), "txn_number": int(number)}


def json_row(event: RawBSONDocument) -> tuple[Any, ...]:
    """The same with the documents as relaxed extended JSON."""
    from bson.json_util import RELAXED_JSON_OPTIONS, dumps

    row = list(bson_row(event))
    for position, name in ((7, "documentKey"), (8, "fullDocument"), (10, "updateDescription")):
        value = event.get(name)
        row[position] = None if value is None else dumps(value, json_options=RELAXED_JSON_OPTIONS)
    return tuple(row)


def record_batch(rows: list[tuple[Any, ...]], schema: Any) -> Any:
    import pyarrow as pa

    columns = zip(*rows, strict=True)
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema
    )


def digest(path: Path) -> str:
    """A hash over every event, in the order of the file names."""
    import pyarrow.parquet as pq

    result = hashlib.sha256()
    for file in sorted(path.glob("day=*/*.parquet")):
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=4096, columns=["event"]):
                for value in batch.column(0):
                    result.update(value.as_buffer())
    return result.hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
