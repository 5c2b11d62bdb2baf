"""Append every change of a database to a table of DuckDB, exactly once.

    python to_duckdb.py URI DATABASE FILE CHECKPOINT

A batch goes over as one Arrow table, which is fast; ``maxEventsPerTrigger`` bounds it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import duckdb

from tailrace.spark import AppliedBatches, MicroBatch, foreach_batch, local_session

SCHEMA = """
CREATE TABLE IF NOT EXISTS changes (token TEXT, operation TEXT, collection TEXT, key JSON, document JSON, event BLOB)
"""
INSERT = """
INSERT INTO changes SELECT token, operation_type, collection, document_key, full_document, event FROM rows
"""


def opened(file: str) -> duckdb.DuckDBPyConnection:
    """A file that DuckDB could not begin because the disk was full is removed: it would be refused from then on."""
    new = not Path(file).exists()
    try:
        return duckdb.connect(file)
    except duckdb.IOException:
        if new:
            Path(file).unlink(missing_ok=True)
        raise


def write(batch: MicroBatch, file: str) -> None:
    with opened(file) as connection, AppliedBatches(connection, "changes").transaction(batch) as new:
        connection.execute(SCHEMA)
        rows = new.arrow()
        connection.register("rows", rows)
        connection.execute(INSERT)


def main(uri: str, database: str, file: str, checkpoint: str) -> None:
    events = (
        local_session()
        .readStream.format("tailrace")
        .options(uri=uri, database=database, documents="json", maxEventsPerTrigger="50000")
        .option("columns", "token,operation_type,collection,document_key,full_document,event")
        .load()
    )
    query = events.writeStream.foreachBatch(foreach_batch(lambda batch: write(batch, file)))
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
