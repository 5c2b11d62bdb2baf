"""What the oplog has to a difference: the entry at its time, on each shard that has one, with a transaction's earlier
entries, and stored pre-images of that time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace import raw_bson
from tailrace.client.client import Client, deployment_of
from tailrace.compare.comparison import FoundDifference
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.failure import source_error
from tailrace.source.mongod import MongodSource
from tailrace.source.topology import Cluster

#: Of a transaction with more entries the report has no whole case.
_ENTRIES_MAX: Final = 50
_BYTES_MAX: Final = 8 << 20


class Evidence:
    """Looks evidence up by the connections of a client that reads the oplog.

    ``images``  whether stored pre-images are wanted too
    """

    def __init__(self, client: Client[Any], *, images: bool) -> None:
        self._client = client
        self._images = images

    def __call__(self, found: FoundDifference) -> None:
        """Add the evidence to a difference. Raises SourceError where it cannot be read."""
        time = found.difference.time
        if time is None:
            return
        for name, client in self._oplogs():
            source = MongodSource(client)
            size = 0
            at: ClusterTime | None = time
            entries: list[tuple[str, bytes]] = []
            while at is not None and len(entries) < _ENTRIES_MAX and size < _BYTES_MAX:
                entry = source.entries([at])[0]
                if entry is None:
                    break
                size += len(entry)
                entries.append((name, entry))
                at = _before(entry)
            found.entries += reversed(entries)
            if entries and self._images:
                found.pre_images += _pre_images(client, time)

    def _oplogs(self) -> Iterator[tuple[str, MongoClient[Any]]]:
        deployment = deployment_of(self._client)
        if isinstance(deployment, Cluster):
            for shard in deployment.shards():
                yield shard.name, deployment.client(shard.name)
        elif deployment is not None:
            yield "", deployment


def _before(entry: bytes) -> ClusterTime | None:
    """When the transaction's entry before this one was written; ``None`` where there is none."""
    document = raw_bson.find(entry, b"o")
    if document is None or document.type != raw_bson.OBJECT:
        return None
    names = {element.name for element in raw_bson.elements(entry, document.value_start)}
    previous = raw_bson.find(entry, b"prevOpTime")
    if not names & {b"applyOps", b"commitTransaction"} or previous is None or previous.type != raw_bson.OBJECT:
        return None
    time = raw_bson.find(entry, b"ts", previous.value_start)
    if time is None or time.type != raw_bson.TIMESTAMP:
        return None
    found = ClusterTime.from_bytes_le(entry[time.value_start : time.end])
    return found if found > 0 else None


def _pre_images(client: MongoClient[Any], time: ClusterTime) -> list[bytes]:
    collection = client.config.get_collection(
        "system.preimages", codec_options=client.codec_options.with_options(document_class=RawBSONDocument)
    )
    try:
        return [raw_bson.bytes_of(one) for one in collection.find({"_id.ts": time.to_timestamp()}).limit(_ENTRIES_MAX)]
    except PyMongoError as error:
        raise source_error(error, client) from None
