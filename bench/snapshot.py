"""How fast are existing documents copied into a lake?

    python bench/snapshot.py [--documents 400000]

One mongod, documents of about 600 bytes. In one run: a collection read in raw batches and written to a file, which is
what mongodump does, and the copy of a stream with startingFrom=snapshot into a lake, with all columns, by two of
Spark's processors. Spark's start is not counted; the query's is.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pymongo
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.commit_log import CommitLog
from tailrace.spark import local_session


def write(client: pymongo.MongoClient[Any], count: int) -> None:
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(3000)]
    for first in range(0, count, 1000):
        texts = [" ".join(rng.choices(words, k=80)) for _ in range(1000)]
        client.bench.c.insert_many([{"n": first + n, "text": text} for n, text in enumerate(texts)])


def dump(client: pymongo.MongoClient[Any], path: Path) -> tuple[int, float]:
    """Bytes written, and seconds."""
    begun = time.perf_counter()
    size = 0
    with path.open("wb") as file:
        for batch in client.bench.c.find_raw_batches():
            size += file.write(batch)
    return size, time.perf_counter() - begun


def copy(spark: SparkSession, uri: str, lake: Path) -> tuple[int, float]:
    """Rows in the lake, and seconds."""
    source = {"uri": uri, "database": "bench", "startingFrom": "snapshot", "partitions": "2"}
    begun = time.perf_counter()
    write_stream(spark, source, lake, available_now=True).awaitTermination()
    seconds = time.perf_counter() - begun
    return sum(commit.rows for commit in CommitLog(lake).commits(0) if commit.batch is not None), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=400_000)
    documents: int = parser.parse_args().documents
    with (
        tempfile.TemporaryDirectory() as folder,
        ReplicaSet(1, cache_gb=2) as deployment,
        pymongo.MongoClient[Any](deployment.uri) as client,
    ):
        write(client, documents)
        spark = local_session("bench", cores=2, fast_start=True)
        spark.sparkContext.setLogLevel("OFF")
        copy(spark, deployment.uri, Path(folder) / "warm")
        for round_ in range(2):
            size, dumped = dump(client, Path(folder) / "dump.bson")
            rows, copied = copy(spark, deployment.uri, Path(folder) / f"lake{round_}")
            assert rows == documents, rows
            print(
                f"{documents:,} documents, {size / 1e6:.0f} MB: raw batches to a file {documents / dumped:,.0f}/s, "
                f"into the lake {documents / copied:,.0f}/s, ratio {dumped / copied:.2f}"
            )
        spark.stop()


if __name__ == "__main__":
    main()
