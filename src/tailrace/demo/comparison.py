"""Compare a lake with the server's own change stream: every event's bytes, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import bson
import pyarrow.parquet as pq
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo.database import Database

from tailrace.core import raw_bson
from tailrace.errors import SourceError
from tailrace.lake.spark.store.snapshot import files

_KEPT: Final = 5
_SILENT_MAX: Final = 60
_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)


@dataclass(slots=True)
class Comparison:
    """``by_type`` counts the server's events by (operation type, collection). ``examples`` are the first differences,
    as (position, the server's event, the lake's)."""

    events: int = 0
    differences: int = 0
    by_type: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[tuple[int, bytes | None, bytes | None]] = field(default_factory=list)


def native_events(uri: str, database: str, *, since: Timestamp, until: Timestamp) -> Iterator[bytes]:
    """The server's own events of ``database`` from ``since`` on, as their exact bytes; the event at ``until``, which
    must be that of a single write, is the last. Raises SourceError when it does not come."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        raw: Database[RawBSONDocument] = Database(client, database, codec_options=_RAW)  # type: ignore[arg-type]
        with raw.watch(start_at_operation_time=since, batch_size=5_000, max_await_time_ms=1_000) as stream:
            silent = 0
            while silent < _SILENT_MAX:
                event = stream.try_next()
                silent = 0 if event is not None else silent + 1
                if event is not None:
                    yield raw_bson.bytes_of(event)
                    if event["clusterTime"] >= until:
                        return
    raise SourceError(f"the server's change stream did not reach {until} within {_SILENT_MAX} seconds")


def lake_events(path: Path) -> Iterator[bytes]:
    """The lake's events: the files that its log names, in the order of the stream, rows from top to bottom."""
    for file in files(path):
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=4096, columns=["event"]):
                yield from (value.as_py() for value in batch.column(0))


def compare(native: Iterator[bytes], lake: Iterator[bytes]) -> Comparison:
    """Compare event by event. A missing or additional event counts, and so does each event after it that is not where
    the server has it."""
    result = Comparison()
    for position, (expected, found) in enumerate(zip_longest(native, lake)):
        if expected is not None:
            result.events += 1
            event = RawBSONDocument(expected)
            result.by_type[event["operationType"], event.get("ns", {}).get("coll", "")] += 1
        if expected != found:
            result.differences += 1
            if len(result.examples) < _KEPT:
                result.examples.append((position, expected, found))
    return result


def shown(event: bytes | None) -> str:
    """An event of a difference, readable and short."""
    return "no event" if event is None else str(bson.decode(event))[:300]
