"""Does catching up get faster with more executors, and what does it cost them?

A standalone Spark cluster on the loopback: Spark's own Master, and Workers of one core each, as processes from
PySpark's jars. The source ``tailrace`` reads the oplog of a mongod, and then of a sharded cluster, with 1, 2 and 4
executors (``--executors``). Each run has a driver of its own, which first reads a small part so that everything is
loaded.

All processes share one machine, and its cores bound what N executors can give. So two figures are printed that do not
depend on the number of cores: the CPU seconds of the executors for a million entries (if they stay the same, the work
is divided without waste), and the serial part, in which no task runs, with what Amdahl's law makes of it: seconds with
N executors = serial seconds + seconds of tasks / N, both of the run with the fewest executors.

Every run must hold the same events (their number, and a sum over hashes of their bytes), or the exit status is 1. The
oplog is filled by bulk inserts and by updates of many documents. Ctrl-C stops everything that was started. With
``--keep DIR`` the filled servers' data stay there, and the next run with the same numbers reads them again.

    python bench/cluster.py [--entries 10000000] [--executors 1 2 4] [--sources replica-set shards] [--keep DIR]
"""

# ruff: noqa: PLC0415  Spark is loaded by the driver alone
from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pymongo
import pyspark
from bson.timestamp import Timestamp

from sides import clock
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.lake.spark.runtime.class_data import class_data_options
from tailrace.lake.spark.runtime.java import find_java, use_java
from tailrace.lake.spark.runtime.python import worker_python

HOME = Path(pyspark.__file__).parent
DATABASE, COLLECTION = "bench", "entries"
WARM_ENTRIES: Final = 30_000
#: How often long work reports its progress.
SAY_S: Final = 10.0
#: Documents in a bulk, and how many of them one command updates.
BULK: Final = 2000
#: Bytes of oplog that an entry takes at most, for the size of the oplog.
ENTRY_BYTES: Final = 900
TEXT = "".join(random.Random(7).choices("abcdefgh ", k=40_000))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000_000, help="entries in the oplogs (default: %(default)s)")
    parser.add_argument("--executors", type=int, nargs="+", default=[1, 2, 4], help="of one core each (default: 1 2 4)")
    parser.add_argument("--sources", choices=("replica-set", "shards"), nargs="+", default=["replica-set", "shards"])
    parser.add_argument("--shards", type=int, default=2, help="of the sharded source (default: %(default)s)")
    parser.add_argument("--partitions", type=int, help="slices of a micro-batch (default: the number of executors)")
    parser.add_argument("--max-bytes", default="1g", help="maxBytesPerTrigger (default: %(default)s, the source's own)")
    parser.add_argument("--documents", choices=("bson", "variant", "json"), default="bson")
    parser.add_argument("--sink", choices=("parquet", "noop"), default="parquet", help="Spark's own sinks")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind, of which the quickest counts")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the servers' data here, and use them again")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return drive(args.child)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        same = [measure(source, args) for source in args.sources]
    except KeyboardInterrupt:
        say("stopped; what was started has ended")
        return 130
    return 0 if all(same) else 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the oplogs ---------------------------------------------------------------------------------------------------


@contextmanager
def filled(source: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A deployment with a long oplog: its uri, the cluster times to start at and to warm up to, the servers' process
    ids and the bytes of its oplogs."""
    shards = args.shards if source == "shards" else 1
    oplog_mb = max(990, args.entries * ENTRY_BYTES // shards // 1_000_000)
    home = None if args.keep is None else (args.keep / f"{source}-{shards}-{args.entries}").absolute()
    note = None if home is None else home.with_suffix(".json")
    if home is not None and note is not None and not note.exists():
        shutil.rmtree(home, ignore_errors=True)  # left by a run that was interrupted
    with ExitStack() as stack:
        if source == "shards":
            cluster = stack.enter_context(ShardedCluster(shards, oplog_size_mb=oplog_mb, cache_gb=0.5, data_dir=home))
            servers, uri = [*cluster.shards.values(), cluster.config], cluster.uri
            uris = [one.uri for one in cluster.shards.values()]
            if note is None or not note.exists():
                cluster.router.create_database(DATABASE, "shard0")
        else:
            members = stack.enter_context(ReplicaSet(1, oplog_size_mb=oplog_mb, cache_gb=1.0, data_dir=home))
            servers, uri, uris = [members], members.uri, [members.uri]
        times = json.loads(note.read_text()) if note is not None and note.exists() else fill(uris, args.entries)
        if note is not None:
            note.write_text(json.dumps(times))
        sizes = [oplog_bytes(one) for one in uris]
        pids = [member.pid for server in servers for member in server.members]
        yield {**times, "uri": uri, "servers": pids, "bytes": sum(sizes)}


def fill(uris: Sequence[str], entries: int) -> dict[str, str]:
    """Write so many entries, half of them inserts and half updates, to all replica sets at once."""
    began = time.monotonic()
    with ExitStack() as stack:
        clients = [stack.enter_context(pymongo.MongoClient[dict[str, Any]](uri)) for uri in uris]
        for client in clients:
            client[DATABASE].create_collection(COLLECTION)
        newest = max((clock(client) for client in clients), key=lambda one: one["clusterTime"])
        for client in clients:
            clock(client, newest)
        written = Counter[int]()

        def write(number: int) -> None:
            each = entries // len(clients)
            mine = entries - each * (len(clients) - 1) if number == 0 else each
            for count in fill_one(clients[number], number * each, mine):
                written[number] = count

        pool = stack.enter_context(ThreadPoolExecutor(len(clients), "bench-fill"))
        pending = [pool.submit(write, number) for number in range(len(clients))]
        while wait(pending, SAY_S).not_done:
            say_progress("entries written", sum(written.values()), entries, began)
        for one in pending:
            one.result()
        start: Timestamp = newest["clusterTime"]
        found = clients[0].local["oplog.rs"].find({"ts": {"$gt": start}}, {"ts": 1})
        warm: Timestamp = next(found.skip(min(WARM_ENTRIES, entries // 10) // len(clients)))["ts"]
    seconds = time.monotonic() - began
    say(f"{entries:,} entries written in {seconds:.0f} s, {entries / seconds:,.0f}/s")
    return {"since": f"{start.time},{start.inc + 1}", "warm": f"{warm.time},{warm.inc}"}


def fill_one(client: pymongo.MongoClient[Any], first: int, entries: int) -> Iterator[int]:
    """Inserts, then updates of many documents by one command; gives how many entries there are so far."""
    collection = client[DATABASE][COLLECTION]
    inserts, done = (entries + 1) // 2, 0
    for start in range(first, first + inserts, BULK):
        batch = [document(number) for number in range(start, min(start + BULK, first + inserts))]
        collection.insert_many(batch, ordered=False)
        done += len(batch)
        yield done
    last = first + entries - inserts
    for start in range(first, last, BULK):
        query = {"_id": {"$gte": start, "$lt": min(start + BULK, last)}}
        place = start * 31 % (len(TEXT) - 300)
        change = {"points": start / 7, "seen": start + 1, "text": TEXT[place : place + 220], "lines.1.n": start + 5}
        found = collection.update_many(query, {"$set": change})
        assert found.modified_count == min(start + BULK, last) - start
        done += found.modified_count
        yield done


def document(number: int) -> dict[str, Any]:
    place = number * 37 % (len(TEXT) - 200)
    return {
        "_id": number,
        "name": f"customer {number}",
        "town": ("Lagos", "Osaka", "Porto", "Quito")[number % 4],
        "points": number / 3,
        "lines": [{"sku": f"sku-{(number + n) * 7919 % 10_000}", "n": n} for n in range(4)],
        "text": TEXT[place : place + 150],
    }


def oplog_bytes(uri: str) -> int:
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        return int(client.local.command("collStats", "oplog.rs")["size"])


def say_progress(what: str, done: int, whole: int, began: float) -> None:
    seconds = time.monotonic() - began
    left = f", about {seconds / done * (whole - done):.0f} s left" if done else ""
    say(f"  {done:,} of {whole:,} {what}, {seconds:.0f} s{left}")


# -- the standalone cluster ---------------------------------------------------------------------------------------


@contextmanager
def standalone(workers: int, directory: Path) -> Iterator[tuple[str, list[int]]]:
    """A master and so many workers of one core: its address, and the workers' process ids."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    url, log = f"spark://127.0.0.1:{port}", directory / "master.log"
    with ExitStack() as stack:
        options = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        stack.enter_context(daemon(log, "org.apache.spark.deploy.master.Master", *options))
        wait_for(lambda: "Starting Spark master at" in log.read_text(), log)
        pids = []
        for number in range(workers):
            options = ("--host", "127.0.0.1", "--webui-port", "0", "-c", "1", "-m", "2g")
            place = ("-d", str(directory / f"work{number}"), url)
            said = directory / f"worker{number}.log"
            pids.append(stack.enter_context(daemon(said, "org.apache.spark.deploy.worker.Worker", *options, *place)))
        wait_for(lambda: log.read_text().count("Registering worker") == workers, log)
        yield url, pids


@contextmanager
def daemon(log: Path, *arguments: str) -> Iterator[int]:
    """A Java program of Spark's, which ends with the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [HOME / "bin" / "spark-class", *arguments],
            env=environment(),
            stdout=out,
            stderr=out,
            cwd=log.parent,
            start_new_session=True,  # Ctrl-C comes to us, and we end it
        )
        try:
            yield process.pid
        finally:
            ended(process)


def ended(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    ours = {"SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": worker_python()}
    return {**kept, **ours, "SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC"}


def wait_for(said: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not said():
        if time.monotonic() > deadline:
            raise SystemExit(f"Spark's cluster has not started:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


# -- the runs -----------------------------------------------------------------------------------------------------


def measure(source: str, args: argparse.Namespace) -> bool:
    """All runs over one source; gives whether all had the same events."""
    with tempfile.TemporaryDirectory(prefix="tailrace-cluster-") as name, ExitStack() as stack:
        use_java()
        say(f"{source}: filling an oplog of {args.entries:,} entries")
        deployment = stack.enter_context(filled(source, args))
        url, workers = stack.enter_context(standalone(max(args.executors), Path(name)))
        results = []
        for executors in args.executors:
            runs = []
            for number in range(args.rounds):
                directory = Path(name) / f"run-{executors}-{number}"
                directory.mkdir()
                say(f"{source}: catching up with {executors} executor(s)")
                runs.append(run(directory, executors, {"url": url, "workers": workers, **deployment}, args))
                shutil.rmtree(directory, ignore_errors=True)
            results.append(min(runs, key=lambda one: one["wall"]))
    report(source, deployment["bytes"], results, args)
    return len({one["digest"] for one in results}) == 1


def run(directory: Path, executors: int, place: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One driver in a process of its own; gives what it has measured."""
    job = {
        **place,
        "directory": str(directory),
        "executors": executors,
        "entries": args.entries,
        "sink": args.sink,
        "options": {
            "uri": place["uri"],
            "database": DATABASE,
            "collection": COLLECTION,
            "startAtOperationTime": place["since"],
            "documents": args.documents,
            "partitions": str(args.partitions or executors),
            "maxBytesPerTrigger": args.max_bytes,
        },
    }
    with (directory / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(job)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            began, rows = 0.0, directory / "rows"
            while True:
                with suppress(subprocess.TimeoutExpired):
                    out, _ = process.communicate(timeout=SAY_S)
                    break
                if rows.exists():
                    began = began or time.monotonic() - SAY_S / 2
                    say_progress("events", int(rows.read_text() or 0), args.entries, began)
                else:
                    say("  Spark starts")
        finally:
            ended(process)
    if process.returncode:
        raise SystemExit((directory / "driver.log").read_text()[-4000:])
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def drive(job: Mapping[str, Any]) -> int:
    """The driver: warms up, catches up, and prints what that took."""
    from pyspark.sql import SparkSession

    import tailrace.spark

    directory = Path(job["directory"])
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.cores.max": str(job["executors"]),
        "spark.executor.cores": "1",
        "spark.executor.memory": "1g",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
        "spark.python.authenticate.socketTimeout": "300s",
        "spark.sql.shuffle.partitions": str(job["executors"]),
        "spark.driver.extraJavaOptions": class_data_options(find_java()),
        "spark.executor.extraJavaOptions": class_data_options(find_java()),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": directory.as_uri(),
    }
    builder = SparkSession.builder.appName("bench").master(job["url"])
    for name, text in settings.items():
        builder = builder.config(name, text)
    spark = tailrace.spark.register(builder.getOrCreate())
    warm = spark.read.format("tailrace").options(**job["options"], endAtOperationTime=job["warm"]).load()
    warm.write.format(job["sink"]).mode("overwrite").save(str(directory / "warm"))
    stream = spark.readStream.format("tailrace").options(**job["options"]).load()
    writer = stream.writeStream.format(job["sink"]).option("checkpointLocation", str(directory / "checkpoint"))
    if job["sink"] == "parquet":
        writer = writer.option("path", str(directory / "out"))
    before, began, clock_before = used(job), time.perf_counter(), time.time()
    query = writer.trigger(availableNow=True).start()
    rows, batches = 0, dict[int, Any]()
    while not query.awaitTermination(2):
        batches |= {one["batchId"]: json.loads(one.json) for one in query.recentProgress}
        rows = sum(one["numInputRows"] for one in batches.values())
        (directory / "rows").write_text(str(rows))
    wall, clock_after = time.perf_counter() - began, time.time()
    after = used(job)
    batches |= {one["batchId"]: json.loads(one.json) for one in query.recentProgress}
    found = digest(spark, job, directory)
    spark.stop()
    if found[0] not in (job["entries"], -1):
        raise SystemExit(f"{found[0]:,} events instead of {job['entries']:,}")
    result = {
        "executors": job["executors"],
        "wall": wall,
        "cpu": {name: after[name] - before[name] for name in after},
        "digest": str(found),
        **tasks(directory, clock_before, clock_after),
        **phases([one for one in batches.values() if one["numInputRows"]]),
        **checkpoint(directory / "checkpoint"),
    }
    print(json.dumps(result), flush=True)
    return 0


def digest(spark: Any, job: Mapping[str, Any], directory: Path) -> tuple[int, str]:
    """Number of rows, and a sum over hashes of the events, which no order changes; -1 without a sink to read."""
    if job["sink"] != "parquet":
        return -1, ""
    rows = spark.read.parquet(str(directory / "out"))
    row = rows.selectExpr("count(*)", "cast(sum(cast(xxhash64(event) as decimal(38,0))) as string)").first()
    return int(row[0]), str(row[1])


def used(job: Mapping[str, Any]) -> dict[str, float]:
    """CPU seconds so far: of the executors' JVMs and Pythons, of the driver with its Pythons, and of the servers."""
    processes: dict[int, tuple[int, str, float]] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            head, _, tail = stat.read_text().rpartition(")")
            fields = tail.split()
            # What ended children have used counts with the process that has waited for them.
            seconds = sum(int(field) for field in fields[11:15]) / ticks
            processes[int(stat.parent.name)] = int(fields[1]), head.partition("(")[2], seconds

    def below(roots: Sequence[int], kinds: tuple[str, ...] = ("",)) -> float:
        found, new = set(roots), set(roots)
        while new:
            new = {pid for pid, (parent, _, _) in processes.items() if parent in new} - found
            found |= new
        return sum(processes[pid][2] for pid in found if pid in processes and processes[pid][1].startswith(kinds))

    executors = below(job["workers"])
    python = below(job["workers"], ("python", "tailrace"))
    return {
        "executors": executors,
        "python": python,
        "driver": below([os.getpid()]),
        "mongod": below(job["servers"]),
    }


def tasks(directory: Path, since: float, until: float) -> dict[str, Any]:
    """From the event log: how many tasks ran, their seconds, and the seconds in which none did."""
    runs: list[tuple[float, float]] = []
    for log in directory.glob("app-*"):
        for line in log.read_text().splitlines():
            if '"SparkListenerTaskEnd"' in line:
                info = json.loads(line)["Task Info"]
                runs.append((info["Launch Time"] / 1000, info["Finish Time"] / 1000))
    runs = sorted(one for one in runs if since <= one[0] and one[1] <= until + 1)
    busy, reached = 0.0, since
    for start, end in runs:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {"tasks": len(runs), "task_seconds": sum(end - start for start, end in runs), "busy": busy}


def phases(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From the query's progress: how many micro-batches had rows, and where Spark's driver says its seconds went."""
    seconds: Counter[str] = Counter()
    for one in batches:
        seconds.update(one["durationMs"])
    return {"batches": len(batches), "phases": {name: value / 1000 for name, value in sorted(seconds.items())}}


def checkpoint(directory: Path) -> dict[str, Any]:
    """Files and bytes of the checkpoint, and the bytes of its last offset."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")]
    offsets = [path for path in directory.glob("offsets/*") if path.name.isdigit()]
    newest = max(offsets, key=lambda path: int(path.name))
    sizes = sum(path.stat().st_size for path in files)
    return {"files": len(files), "file_bytes": sizes, "offsets": len(offsets), "offset_bytes": newest.stat().st_size}


# -- what it says -------------------------------------------------------------------------------------------------


def report(source: str, size: int, results: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> None:
    cores, millions = os.cpu_count() or 1, args.entries / 1e6
    kind = source if source == "replica-set" else f"{args.shards} shards"
    load = " ".join(f"{one:.0f}" for one in os.getloadavg())
    print(
        f"\n{kind}: {args.entries:,} entries, {size / 1e6:,.0f} MB of oplog, documents {args.documents}, sink "
        f"{args.sink}, maxBytesPerTrigger {args.max_bytes}\n"
        f"one machine of {cores} cores for executors, driver and mongod (load {load}): more executors than cores "
        "cannot be faster\n"
    )
    first = results[0]
    serial = first["wall"] - first["busy"]
    print(f"{'':31}{'of perfect scaling':>22} |{'CPU seconds for a million entries':>45} |{'cores':>6}")
    names = ("executors", "entries/s", "seconds", "measured", "by Amdahl", "executors", "(Python)", "driver", "mongod")
    print("{:>9}{:>12}{:>10}{:>11}{:>11} |{:>10}{:>10}{:>8}{:>8}".format(*names) + f"{'all':>9} |{'busy':>6}")
    for one in results:
        cpu = {name: value / millions for name, value in one["cpu"].items()}
        whole = cpu["executors"] + cpu["driver"] + cpu["mongod"]
        share = first["wall"] * first["executors"] / one["wall"] / one["executors"]
        law = serial + first["task_seconds"] / one["executors"]
        perfect = first["wall"] * first["executors"] / law / one["executors"]
        print(
            f"{one['executors']:>9}{args.entries / one['wall']:>12,.0f}{one['wall']:>10.1f}{share:>11.2f}"
            f"{perfect:>11.2f} |{cpu['executors']:>10.2f}{cpu['python']:>10.2f}{cpu['driver']:>8.2f}"
            f"{cpu['mongod']:>8.2f}{whole:>9.2f} |{whole * millions / one['wall']:>6.2f}"
        )
    print("\nwhere the seconds went, and what the driver does alone:")
    for one in results:
        report_driver(one, millions, cores)
    in_batches = max(1e-6, first["phases"].get("triggerExecution", 0.0) - first["busy"])
    law = (in_batches + first["task_seconds"]) / in_batches
    print(f"\nAmdahl's bound for a long oplog, any number of executors: {law:.1f} times the rate of one")
    last = results[-1]
    if last["executors"] > first["executors"]:
        more = last["cpu"]["executors"] - first["cpu"]["executors"]
        each = more / (last["executors"] - first["executors"])
        print(f"CPU seconds for one more executor, however long the oplog (its JVM compiles) or not: {each:.1f}")
    same = len({one["digest"] for one in results}) == 1
    print(
        f"the same events in every run: {'yes' if same else 'NO'}" if args.sink == "parquet" else "events not compared"
    )
    sys.stdout.flush()


def report_driver(one: Mapping[str, Any], millions: float, cores: int) -> None:
    """What one run was bounded by."""
    batches, spent = max(1, one["batches"]), one["phases"]
    running = spent.get("triggerExecution", 0.0)
    serial = max(0.0, running - one["busy"])
    all_cpu = sum(value for name, value in one["cpu"].items() if name != "python")
    if all_cpu / one["wall"] > 0.85 * cores:
        bound = "the machine's cores"
    elif one["wall"] - one["busy"] > one["wall"] / 2:
        bound = "what the driver does alone"
    else:
        bound = "the tasks"
    print(
        f"  {one['executors']} executor(s): {one['wall']:.1f} s, bounded by {bound}. {batches} micro-batches, "
        f"{one['tasks']} tasks, {one['task_seconds']:.1f} s of tasks in {one['busy']:.1f} s\n"
        f"    no task runs: {one['wall'] - running:.2f} s once, at the query's start and end, and {serial:.2f} s in "
        f"micro-batches, {serial / batches:.2f} in each, {serial / millions:.2f} for a million entries\n"
        f"    of these latestOffset {spent.get('latestOffset', 0):.2f}, queryPlanning "
        f"{spent.get('queryPlanning', 0):.2f}, walCommit {spent.get('walCommit', 0):.2f}, commit "
        f"{spent.get('commitOffsets', 0) + spent.get('commitBatch', 0):.2f}\n"
        f"    checkpoint: {one['files']} files, {one['file_bytes']:,} bytes after {one['offsets']} micro-batches, the "
        f"last offset {one['offset_bytes']:,} bytes"
    )


if __name__ == "__main__":
    raise SystemExit(main())
