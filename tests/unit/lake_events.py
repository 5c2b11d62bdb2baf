"""Made-up change events for the lake's own tests: tokens in ascending order, some text to fill the files."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from tailrace.spark.lake.identity import Opening, open_lake
from tailrace.spark.lake.layout import LakeLayout
from tailrace.spark.lake.manifest import StagedFile
from tailrace.spark.lake.part_writer import PartWriter

#: 2026-11-21T00:00:00Z. Event number n happens n seconds later.
MIDNIGHT = 1_795_219_200
STREAM = {"settings": {"scope": "shop.orders"}}


def token(number: int) -> str:
    """A token of event ``number``: timestamp as the server writes it, then what could follow."""
    return f"82{MIDNIGHT + number:08X}000000012B04"


def batch(numbers: Iterable[int], payload: int = 20) -> pa.RecordBatch:
    numbers = list(numbers)
    return pa.record_batch(
        {
            "token": pa.array([token(n) for n in numbers], pa.string()),
            "number": pa.array(numbers, pa.int64()),
            "event": pa.array([random.Random(n).randbytes(payload) for n in numbers], pa.binary()),
        }
    )


def stage(root: Path, numbers: Iterable[int], *, stem: str = "0-0", payload: int = 20) -> tuple[StagedFile, ...]:
    return PartWriter(LakeLayout(root).staging, stem).write_all([batch(numbers, payload)])


def make(root: Path, checkpoint: Path) -> Opening:
    return open_lake(root, checkpoint, STREAM)


def begin(checkpoint: Path) -> None:
    """Leave what Spark leaves when it has planned its first micro-batch."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets" / "0").touch()


def numbers_in(root: Path) -> list[int]:
    """What a reader without Tailrace finds: the files in the order of their names, each from top to bottom."""
    import pyarrow.parquet as pq

    found: list[int] = []
    for file in sorted(root.glob("day=*/*.parquet")):
        with pq.ParquetFile(file) as parquet:
            found += parquet.read(columns=["number"]).column(0).to_pylist()
    return found
