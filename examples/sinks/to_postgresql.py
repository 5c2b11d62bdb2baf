"""Copy a collection into PostgreSQL, and count its changes by day: each change exactly once.

    python to_postgresql.py URI DATABASE COLLECTION DSN CHECKPOINT

Rows, counts and the note that the batch was applied are one transaction. A count shows a change that is applied twice,
which an upsert would hide. Needs psycopg2.
"""

from __future__ import annotations

import sys
from contextlib import closing

import psycopg2
from psycopg2.extras import execute_values

from tailrace.spark import AppliedBatches, MicroBatch, foreach_batch, local_session

# json, not jsonb: it also takes strings that hold U+0000.
SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (key text PRIMARY KEY, document json);
CREATE TABLE IF NOT EXISTS changes (day date, operation text, n bigint, PRIMARY KEY (day, operation));
"""
UPSERT = """
INSERT INTO documents VALUES %s ON CONFLICT (key) DO UPDATE SET document = excluded.document
"""
COUNT = """
INSERT INTO changes SELECT to_timestamp(%s)::date, %s, 1
ON CONFLICT (day, operation) DO UPDATE SET n = changes.n + 1
"""


def write(batch: MicroBatch, dsn: str) -> None:
    with closing(psycopg2.connect(dsn)) as connection:
        applied = AppliedBatches(connection, "documents")
        with applied.transaction(batch) as new, connection.cursor() as cursor:
            cursor.execute(SCHEMA)
            for row in new.rows():
                if row.operation_type in ("drop", "rename"):
                    cursor.execute("DELETE FROM documents")
                elif row.operation_type == "delete":
                    cursor.execute("DELETE FROM documents WHERE key = %s", [row.document_key])
                elif row.full_document != "null":  # of an update: the document is gone, and its delete follows
                    execute_values(cursor, UPSERT, [(row.document_key, row.full_document)])
                cursor.execute(COUNT, [row.cluster_time.t, row.operation_type])


def main(uri: str, database: str, collection: str, dsn: str, checkpoint: str) -> None:
    events = (
        local_session()
        .readStream.format("tailrace")
        .options(uri=uri, database=database, collection=collection, fullDocument="updateLookup", documents="json")
        .option("columns", "token,operation_type,cluster_time,document_key,full_document")
        .option("startingFrom", "snapshot")
        .load()
    )
    query = events.writeStream.foreachBatch(foreach_batch(lambda batch: write(batch, dsn)))
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
