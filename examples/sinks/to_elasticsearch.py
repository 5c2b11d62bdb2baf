"""Keep an index of Elasticsearch or OpenSearch equal to a collection, by its bulk interface.

    python to_elasticsearch.py URI DATABASE.COLLECTION http://localhost:9200 INDEX CHECKPOINT

The version of a document in the index is the cluster time of its change, and the server refuses older and equal
ones (``external``). So a batch may be given again, in part or whole: what is there already answers 409.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.request import Request, urlopen

from tailrace.spark import MicroBatch, foreach_batch, local_session

BULK_BYTES = 5_000_000
TRIES = 8
#: What an index says of a change that it already has, and of a delete of a document that it does not have.
DONE = (200, 201, 404, 409)


def actions(batch: MicroBatch) -> Iterator[bytes]:
    """The lines of the bulk format for the last change of each document in the batch."""
    last: dict[str, Any] = {}
    for row in batch.rows():
        if row.operation_type in ("drop", "rename", "dropDatabase"):
            raise ValueError(f"the collection had a {row.operation_type}: remove the index, and start again")
        if row.document_key is not None:
            last[row.document_key] = row
    for key, row in last.items():
        about = {"_id": index_id(key), "version": version(row.cluster_time), "version_type": "external"}
        if row.operation_type == "delete" or row.full_document == "null":
            yield (json.dumps({"delete": about}) + "\n").encode()
        else:
            document = json.dumps({"document": json.loads(row.full_document)})  # _id is a reserved name at the top
            yield (json.dumps({"index": about}) + "\n" + document + "\n").encode()


def version(cluster_time: Any) -> int:
    """A cluster time as a positive 63-bit number. The transaction's changes have one; the last of them counts."""
    return (cluster_time.t << 31) | cluster_time.i


def index_id(key: str) -> str:
    """An id may have 512 bytes."""
    return key if len(key.encode()) <= 512 else hashlib.sha256(key.encode()).hexdigest()


def write(batch: MicroBatch, url: str, index: str) -> None:
    body, size = [], 0
    for lines in actions(batch):
        body.append(lines)
        size += len(lines)
        if size >= BULK_BYTES:
            send(body, url, index)
            body, size = [], 0
    if body:
        send(body, url, index)


def send(body: list[bytes], url: str, index: str) -> None:
    """Send the actions; those that the server has no room for (429) are sent again a little later."""
    for attempt in range(TRIES):
        request = Request(f"{url}/{index}/_bulk", b"".join(body), {"Content-Type": "application/x-ndjson"})
        with urlopen(request, timeout=60) as reply:
            results = list(outcomes(json.load(reply)["items"]))
        refused = [result for result in results if result["status"] not in (*DONE, 429)]
        if refused:
            raise ValueError(f"{index} refused {len(refused)} documents; the first: {refused[0]}")
        body = [lines for lines, result in zip(body, results, strict=True) if result["status"] == 429]
        if not body:
            return
        time.sleep(0.1 * 2**attempt)
    raise TimeoutError(f"{index} had no room for {len(body)} documents")


def outcomes(items: Iterable[dict[str, Any]]) -> Iterator[Any]:
    for item in items:
        yield from item.values()  # {"index": {...}} or {"delete": {...}}


def main(uri: str, namespace: str, url: str, index: str, checkpoint: str) -> None:
    database, _, collection = namespace.partition(".")
    events = (
        local_session()
        .readStream.format("tailrace")
        .options(uri=uri, database=database, collection=collection, fullDocument="updateLookup", documents="json")
        .option("columns", "token,operation_type,cluster_time,document_key,full_document")
        .option("startingFrom", "snapshot")
        .load()
    )
    query = events.writeStream.foreachBatch(foreach_batch(lambda batch: write(batch, url, index)))
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
