"""How fast is catching up on a long oplog, beside the native stream?

200,000 oplog entries (half inserts, half updates, about 500 bytes each) to Parquet, by two programs in one run:

* ``spark``: the Tailrace source and lake on Spark, ``local[2]``, ``availableNow``;
* ``native``: a PyMongo loop on the server's own change stream (raw documents, large batches), which makes the same
  columns with pyarrow and writes them with the same Parquet settings.

Each runs in a process of its own, in turns, ``--rounds`` times, and does the work twice: the first time in a fresh
session or client, then again in the running one. Medians are printed, with all CPU time of the second (client, JVM,
workers and mongod), which is what tells on a busy machine. All must hold the same events, byte for byte, and the ratio
in a running session must reach the bar, or the exit status is 1.

    python bench/catch_up.py [--entries 200000] [--rounds 3] [--documents bson]
"""

# ruff: noqa: PLC0415  each side imports only what it needs: its start is measured too
from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pymongo
from bson import encode
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

URI = "TAILRACE_BENCH_URI"
DATABASE, COLLECTION = "bench", "entries"
BAR = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", choices=("bson", "json"), default="bson")
    parser.add_argument("--child", choices=("spark", "native"), help=argparse.SUPPRESS)
    parser.add_argument("--since", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "spark":
        return run_spark(args)
    if args.child == "native":
        return run_native(args)
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    from tailrace.embedded import ReplicaSet

    with ReplicaSet(1, oplog_size_mb=2048, cache_gb=1.0) as members, tempfile.TemporaryDirectory() as directory:
        since = fill(members.uri, args.entries)
        results: dict[str, list[dict[str, float]]] = {"native": [], "spark": []}
        for number in range(args.rounds):
            for side, runs in results.items():
                runs.append(child(side, members.uri, since, Path(directory) / f"{side}-{number}", args))
        digests = {
            digest(path) for run in Path(directory).iterdir() for path in run.iterdir() if path.suffix != ".checkpoint"
        }
    print(
        f"{args.entries:,} oplog entries, {os.cpu_count()} cores, documents: {args.documents}, medians of {args.rounds}"
    )
    medians = {
        side: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for side, runs in results.items()
    }
    rows = (("again", "in a running session"), ("first", "first of a session"), ("all", "with the start of everything"))
    print(f"{'events/s':30}{'native':>10}{'spark':>10}{'ratio':>8}")
    for name, words in rows:
        native, spark = (args.entries / medians[side][name] for side in ("native", "spark"))
        print(f"{words:30}{native:10,.0f}{spark:10,.0f}{spark / native:8.2f}")
    native, spark = (medians[side]["cpu"] / args.entries * 1e6 for side in ("native", "spark"))
    print(f"{'CPU us an event, with mongod':30}{native:10.1f}{spark:10.1f}{native / spark:8.2f}")
    ratio = medians["native"]["again"] / medians["spark"]["again"]
    print(f"bar: {BAR} in a running session: {'met' if ratio >= BAR else 'NOT met'}")
    print(f"the same bytes in every run: {'yes' if len(digests) == 1 else 'NO'}")
    return 0 if len(digests) == 1 and ratio >= BAR else 1


def fill(uri: str, entries: int) -> str:
    """Write ``entries`` oplog entries; gives the cluster time to start at, ``seconds,increment``."""
    chance = random.Random(7)
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        collection = client[DATABASE][COLLECTION]
        client[DATABASE].create_collection(COLLECTION)
        with client.start_session() as session:
            client.admin.command("ping", session=session)
            assert session.operation_time is not None
            start = Timestamp(session.operation_time.time, session.operation_time.inc + 1)
        inserts = entries // 2
        for first in range(0, inserts, 1000):
            collection.insert_many([document(n, chance) for n in range(first, min(first + 1000, inserts))])
        changes = entries - inserts
        for first in range(0, changes, 1000):
            collection.bulk_write(
                [
                    pymongo.UpdateOne({"_id": chance.randrange(inserts)}, {"$set": change(n, chance)})
                    for n in range(first, min(first + 1000, changes))
                ]
            )
        last = next(
            iter(client.local["oplog.rs"].find({"ns": f"{DATABASE}.{COLLECTION}"}).sort("$natural", -1).limit(1))
        )
        size = len(encode(last))
        count = client.local["oplog.rs"].count_documents({"ns": f"{DATABASE}.{COLLECTION}", "op": {"$in": ["i", "u"]}})
    print(f"{count:,} entries written, the last of {size} bytes", file=sys.stderr)
    assert count == entries, "a change that changed nothing would make no entry"
    return f"{start.time},{start.inc}"


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


def child(side: str, uri: str, since: str, out: Path, args: argparse.Namespace) -> dict[str, float]:
    out.mkdir()
    began = time.perf_counter()
    command = [sys.executable, __file__, "--child", side, "--since", since, "--out", str(out)]
    command += ["--entries", str(args.entries), "--documents", args.documents]
    done = subprocess.run(
        command,
        env={**os.environ, URI: uri},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Spark's greetings; an error shows in the exit status
        check=True,
        start_new_session=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    result["all"] = result.pop("first_done") - began
    print(side, {name: round(value, 2) for name, value in result.items()}, file=sys.stderr)
    return result


def twice(work: Callable[[Path], int], client: pymongo.MongoClient[Any], args: argparse.Namespace) -> None:
    """Do the work two times and print the seconds of each, and the CPU seconds of the second, mongod's among them."""
    started = time.perf_counter()
    assert work(args.out / "first") == args.entries
    first_done = time.perf_counter()
    cpu = cpu_seconds(client)
    assert work(args.out / "again") == args.entries
    again = time.perf_counter() - first_done
    result = {"first": first_done - started, "first_done": first_done, "again": again, "cpu": cpu_seconds(client) - cpu}
    print(json.dumps(result))
    sys.stdout.flush()


def cpu_seconds(client: pymongo.MongoClient[Any]) -> float:
    """Used so far by mongod and by every process of our session: driver, JVM, workers."""
    info = client.admin.command("serverStatus")["extra_info"]
    total = (info["user_time_us"] + info["system_time_us"]) / 1e6
    session, ticks = os.getsid(0), os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += sum(int(field) for field in fields[11:15]) / ticks
    return total


def run_spark(args: argparse.Namespace) -> int:
    from tailrace.lake.commit_log import CommitLog
    from tailrace.spark.lake.stream import write_stream
    from tailrace.spark.runtime.session import local_session

    spark = local_session(cores=2)
    source = {
        "uri": os.environ[URI],
        "database": DATABASE,
        "collection": COLLECTION,
        "startAtOperationTime": args.since,
        "documents": args.documents,
    }

    def work(out: Path) -> int:
        write_stream(spark, source, out, available_now=True).awaitTermination()
        return sum(file.rows for file in CommitLog(out).live_files())

    with pymongo.MongoClient[dict[str, Any]](os.environ[URI]) as client:
        twice(work, client, args)
    os._exit(0)  # a JVM's unhurried end is not part of the question


def run_native(args: argparse.Namespace) -> int:
    from tailrace.lake.part_writer import PartWriter

    seconds, increment = (int(part) for part in args.since.split(","))
    with pymongo.MongoClient[dict[str, Any]](os.environ[URI]) as client:

        def work(out: Path) -> int:
            (out / "_staging").mkdir(parents=True)
            files = PartWriter(out, "native").write_all(native_batches(client, Timestamp(seconds, increment), args))
            return sum(file.rows for file in files)

        twice(work, client, args)
    return 0


def native_batches(client: pymongo.MongoClient[Any], since: Timestamp, args: argparse.Namespace) -> Iterator[Any]:
    """The server's stream as record batches with the lake's columns."""
    import pyarrow as pa
    from bson.codec_options import CodecOptions

    document = pa.string() if args.documents == "json" else pa.binary()
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
    raw = CodecOptions(document_class=RawBSONDocument)
    collection = client[DATABASE].get_collection(COLLECTION, codec_options=raw)
    row = json_row if args.documents == "json" else bson_row
    rows: list[tuple[Any, ...]] = []
    left = args.entries
    with collection.watch(start_at_operation_time=since, batch_size=10_000) as stream:
        for event in stream:
            rows.append(row(event))
            left -= 1
            if len(rows) == 4096 or not left:
                yield record_batch(rows, schema)
                rows = []
            if not left:
                return


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
        None,
    )


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
    """Of every event in the order of the file names."""
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
