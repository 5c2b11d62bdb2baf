"""The processes that ``tests.kills`` kills, apart from Tailrace's own commands.

python -m tests.kills.children images|snapshot URI DATABASE FOLDER     a stream, written down event by event
python -m tests.kills.children tables URI DATABASE FOLDER                    a writer of tables
python -m tests.kills.children lake|sink OPTIONS_JSON FOLDER                 a driver of Spark
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.core import raw_bson
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter

EVENTS = "events"
NO_EVENT = bson.encode({})


def whole(raw: bytes) -> bytes:
    """The complete pairs of event and token, without what a kill has cut off."""
    end = place = 0
    count = 0
    while place + 4 <= len(raw):
        size = int.from_bytes(raw[place : place + 4], "little")
        if place + size > len(raw):
            break
        place += size
        count += 1
        if count % 2 == 0:
            end = place
    return raw[:end]


def pairs(path: Path) -> list[tuple[bytes, bytes]]:
    """What a stream has written down: first an empty document and the token that it began with, then each event and the
    token after it."""
    found = list(raw_bson.split(whole(path.read_bytes()) if path.exists() else b""))
    return list(zip(found[::2], found[1::2], strict=True))


def follow(kind: str, uri: str, database: str, folder: str) -> None:
    """Write each event and the token after it in one piece, and go on after the last one that is there."""
    path = Path(folder, EVENTS)
    known = pairs(path)
    said: dict[str, Any] = {"full_document": "updateLookup"}
    if kind == "images":
        said = {"full_document": "exact", "full_document_before_change": "exact"}
    if known:
        said["resume_after"] = bson.decode(known[-1][1])
    elif kind == "snapshot":
        said["start"] = "snapshot"
    with path.open("ab") as out, tailrace.connect(uri, images=Path(folder, "images")) as client:
        out.truncate(sum(len(event) + len(token) for event, token in known))
        with client[database].watch(document_class=RawBSONDocument, max_await_time_ms=100, **said) as stream:
            written = bool(known)
            while True:
                event = stream.try_next() if written else RawBSONDocument(NO_EVENT)
                written = True
                if event is not None:
                    out.write(bytes(event.raw) + bson.encode(stream.resume_token))
                    out.flush()


def write_tables(uri: str, database: str, folder: str) -> None:
    # About every second life merges on read, and the next one finds what it has left.
    merges = sum(1 for _ in Path(folder).glob("*/_delta_log/*.json")) % 2 == 1
    rules = (TableRule(f"{database}.*"),)
    settings = TableSettings(Path(folder), rules, every_s=0.0, compact_every=3, merge_on_read=merges)
    with TablesWriter(uri, settings) as writer:
        writer.run()


def write_lake(options: str, folder: str) -> None:
    from tailrace.lake import CompactionPolicy
    from tailrace.lake.spark.store.stream import write_stream
    from tailrace.spark import local_session

    spark = local_session("killed-lake", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("ERROR")
    policy = CompactionPolicy(every=4, fan_in=2)
    write_stream(spark, json.loads(options), Path(folder, "lake"), compaction=policy).awaitTermination()


def write_sink(options: str, folder: str) -> None:
    from tailrace.spark import foreach_batch, local_session
    from tests.spark.sinks import example

    spark = local_session("killed-sink", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("ERROR")
    to_duckdb, file = example("to_duckdb"), str(Path(folder, "file.duckdb"))
    stream = spark.readStream.format("tailrace").options(**json.loads(options)).load().writeStream
    stream = stream.foreachBatch(foreach_batch(lambda batch: to_duckdb.write(batch, file)))
    stream.option("checkpointLocation", str(Path(folder, "checkpoint"))).start().awaitTermination()


def main(kind: str, *arguments: str) -> None:
    match kind:
        case "images" | "snapshot":
            follow(kind, *arguments)
        case "tables":
            write_tables(*arguments)
        case "lake":
            write_lake(*arguments)
        case "sink":
            write_sink(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
