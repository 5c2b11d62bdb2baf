"""What the oplog holds about a difference: the entry at its time, on each shard that has one, with a transaction's
earlier entries, and stored pre-images of that time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source.failure import source_error
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tailrace.watch.client.client import Client, deployment_of
from tailrace.watch.compare.comparison import FoundDifference

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

    def __call__(self, found: FoundDifference, room: int) -> None:
        """Add the evidence to a difference, in ``room`` bytes. Raises SourceError where it cannot be read."""
        time = found.difference.time
        if time is None:
            return
        room = min(room, _BYTES_MAX)
        is_whole = True
        for name, client in self._oplogs():
            entries, of_shard = self._entries(MongodSource(client), time, room)
            room -= sum(map(len, entries))
            is_whole = is_whole and of_shard
            found.entries += [(name, entry) for entry in entries]
            if entries and self._images:
                images, all_of_them = _pre_images(client, time, room)
                room -= sum(map(len, images))
                is_whole = is_whole and all_of_them
                found.pre_images += images
        found.is_whole = is_whole and bool(found.entries)

    def _entries(self, source: MongodSource, time: ClusterTime, room: int) -> tuple[list[bytes], bool]:
        """The entry of that time, after the transaction's earlier ones, and whether all that it needs is there."""
        entries: list[bytes] = []
        at: ClusterTime | None = time
        while at is not None:
            entry = source.entries([at])[0]
            if entry is None:
                return entries[::-1], not entries  # it is another shard's, or the oplog has removed an earlier part
            room -= len(entry)
            if room < 0 or len(entries) >= _ENTRIES_MAX:
                return entries[::-1], False
            entries.append(entry)
            at = _before(entry)
        logged = self._images and any(raw_bson.find(entry, b"preImageOpTime") is not None for entry in entries)
        return entries[::-1], not logged  # an image that is an entry of its own is not among them

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


def _pre_images(client: MongoClient[Any], time: ClusterTime, room: int) -> tuple[list[bytes], bool]:
    """The stored images of that time for which there is room, and whether these are all."""
    collection = client.config.get_collection(
        "system.preimages", codec_options=client.codec_options.with_options(document_class=RawBSONDocument)
    )
    images: list[bytes] = []
    try:
        with collection.find({"_id.ts": time.to_timestamp()}) as found:
            for one in found:
                image = raw_bson.bytes_of(one)
                room -= len(image)
                if room < 0 or len(images) >= _ENTRIES_MAX:
                    return images, False
                images.append(image)
    except PyMongoError as error:
        raise source_error(error, client) from None
    return images, True
