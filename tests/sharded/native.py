"""The server's own streams of a cluster's shards, opened as a mongos opens them, and merged here by their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pymongo
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.embedded import ShardedCluster

_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)


def token(event: bytes) -> ResumeToken:
    element = raw_bson.find(event, b"_id")
    assert element is not None
    return ResumeToken.parse(raw_bson.value(event, element))


def without_sort_key(event: bytes) -> bytes:
    kept = [event[e.start : e.end] for e in raw_bson.elements(event) if e.name != b"$sortKey"]
    return raw_bson.encode_document(*kept)


#: The events that report a shard's first chunk of a collection, which are only for the merge: by 6.0's name and by
#: 7.0's.
_OF_NEW_SHARDS = (b"kNewShardDetected", b"migrateChunkToNewShard")


def shard_stream(
    uri: str,
    database: str,
    collection: str | int,
    start: Timestamp,
    end: Timestamp,
    *,
    for_merge: bool = True,
    **options: Any,
) -> list[bytes]:
    """One shard's part of a merged stream, from ``start`` until the server has passed ``end``: the events' bytes.

    ``for_merge``: as opened by a mongos, which adds the images itself, after its merge. Otherwise as opened by a client
    of the shard alone, with images.
    """
    merging = {"fromMongos": True, "needsMerge": True} if for_merge else {}
    stage: Mapping[str, Any] = {"$changeStream": {"startAtOperationTime": start, **options}}
    found: list[bytes] = []
    with pymongo.MongoClient(uri) as client:
        reply = client[database].command(
            "aggregate",
            collection,
            pipeline=[stage],
            cursor={"batchSize": 0},
            codec_options=_RAW,
            **merging,
        )
        cursor = reply["cursor"]
        name = cursor["ns"].partition(".")[2]
        while cursor["id"] and ResumeToken.parse(bytes(cursor["postBatchResumeToken"].raw)).cluster_time < _time(end):
            reply = client[database].command(
                {"getMore": Int64(cursor["id"]), "collection": name, "maxTimeMS": 100}, codec_options=_RAW
            )
            cursor = reply["cursor"]
            found += [bytes(event.raw) for event in cursor["nextBatch"]]
        if cursor["id"]:
            client[database].command({"killCursors": name, "cursors": [Int64(cursor["id"])]})
    return [without_sort_key(event) for event in found]


def union(
    cluster: ShardedCluster,
    database: str,
    collection: str | int,
    start: Timestamp,
    end: Timestamp,
    *,
    for_merge: bool = True,
    former: Mapping[str, Timestamp] = {},
    **options: Any,
) -> list[bytes]:
    """All shards' events up to ``end`` in the order of their tokens, without what is for the merge only. ``former``:
    the URIs of replica sets that were shards, and up to when."""
    parts = {**{shard.uri: end for shard in cluster.shards.values()}, **former}
    events = [
        event
        for uri, until in parts.items()
        for event in shard_stream(uri, database, collection, start, min(end, until), for_merge=for_merge, **options)
        if not any(name in event for name in _OF_NEW_SHARDS) and token(event).cluster_time <= _time(min(end, until))
    ]
    return sorted(events, key=lambda event: token(event).sort_key)


def removal(cluster: ShardedCluster, name: str) -> Timestamp:
    """When the shard was last removed, as the config server's oplog says."""
    query = {"$or": [{"ns": "config.shards", "op": "d"}, {"o.applyOps.ns": "config.shards"}]}  # 7.0: of admin
    found = Timestamp(0, 1)
    with pymongo.MongoClient(cluster.config.uri) as client:
        for entry in client.local["oplog.rs"].find(query):
            operations = entry["o"].get("applyOps", [entry])
            of_shards = [one for one in operations if one["ns"] == "config.shards" or one is entry]
            if any(one["op"] == "d" and one["o"]["_id"] == name for one in of_shards):
                found = entry["ts"]
    return found


def _time(timestamp: Timestamp) -> int:
    return (timestamp.time << 32) | timestamp.inc
