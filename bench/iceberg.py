"""What it costs that a table is Iceberg's too: processor time and bytes of each commit, with Delta alone, with Iceberg
snapshots over the same files, and with pyiceberg writing the rows a second time.

    python bench/iceberg.py [--documents 100000] [--changes 1000] [--commits 30]

No server takes part. Each commit changes documents that are spread over the whole table, so both formats replace its
files. Processor time is that of the whole process; a machine that is busy does not matter much.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import In

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.iceberg.catalog import IcebergCatalog
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.delta_commit import Batch
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.iceberg_mirror import IcebergMirror
from tailrace.lake.tables.rows import make_rows
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.state import StoredDocument
from tailrace.read.window.sortable_key import sortable_key


def rows_of(schema: TableSchema, numbers: list[int], chosen: random.Random) -> tuple[TableSchema, pa.RecordBatch]:
    """Documents of about 300 bytes with these ids."""
    stored = []
    for number in numbers:
        text = f"{chosen.getrandbits(512):0128x}"
        document = bson.encode(
            {"_id": number, "n": chosen.random(), "status": "paid", "name": text, "more": {"a": [1]}}
        )
        stored.append(StoredDocument(sortable_key(0x10, document[9:13]), ClusterTime.of(1, 1), document))
    found = make_rows(schema, stored)
    return found.schema, found.batch


def measured(root: Path, given: argparse.Namespace, after: Callable[[CollectionTable, Any], None]) -> list[str]:
    """Run the commits; ``after`` is called after each. Gives the processor time of a commit and of what comes after it,
    in milliseconds, and the bytes of both."""
    chosen, schema = random.Random(1), TableSchema()
    table = CollectionTable(root / "shop.orders", "shop.orders", declared=schema.declaration)
    schema, batch = rows_of(schema, list(range(given.documents)), chosen)

    def of(number: int) -> Batch:
        return Batch(number, ClusterTime.of(number + 1, 0), ClusterTime.of(number + 2, 0), "00" * 16)

    table.write_whole(of(0), schema, [batch], "whole")
    after(table, batch)
    before, spent, spent_after = size(root), 0.0, 0.0
    for number in range(1, given.commits + 1):
        _, batch = rows_of(schema, chosen.sample(range(given.documents), given.changes), chosen)
        begun = sum(os.times()[:2])
        table.change(of(number), schema, batch.column("_key").to_pylist(), [batch])
        done = sum(os.times()[:2])
        after(table, batch)
        spent, spent_after = spent + done - begun, spent_after + sum(os.times()[:2]) - done
    found = (spent * 1000, spent_after * 1000, (size(root) - before) / 1000)
    return [f"{one / given.commits:,.0f}" for one in found]


def size(root: Path) -> int:
    """The bytes of all files."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--commits", type=int, default=30)
    given = parser.parse_args()
    print("| way | Delta's commit, CPU ms | what comes after it, CPU ms | kB |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        print("| Delta alone |", " | ".join(measured(Path(folder), given, lambda *_: None)), "|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        catalog = IcebergCatalog(IcebergSettings.of(f"sqlite:///{root}.db", "catalog"))
        mirror = IcebergMirror(root, catalog)
        print(
            "| and Iceberg over its files |",
            " | ".join(measured(root, given, lambda one, _: mirror.follow([one]))),
            "|",
        )
        mirror.close()
        Path(f"{root}.db").unlink()
    with tempfile.TemporaryDirectory() as folder:
        root, made = Path(folder), dict[str, Any]()
        twice = SqlCatalog("twice", uri="sqlite:///:memory:", warehouse=f"file://{root}")
        twice.create_namespace("shop")

        def again(_: CollectionTable, batch: pa.RecordBatch) -> None:
            rows = pa.Table.from_batches([batch])
            if not made:
                made["table"] = twice.create_table("shop.orders", rows.schema)
                made["table"].append(rows)
            else:
                made["table"].overwrite(rows, In("_key", batch.column("_key").to_pylist()))

        print("| and pyiceberg, the rows again |", " | ".join(measured(root, given, again)), "|")


if __name__ == "__main__":
    main()
