"""Recordings of a sharded cluster: every member's oplog beside what each shard's and the router's own streams gave.

One file holds one run on one server version: an LZMA-compressed BSON document

    {server, note, start, end: timestamps, shards: [name], added: [name of a shard added during the run],
     shardKeys: [{uuid, key}],                  of the collections while they existed (servers before 5.3)
     oplogs: [{member, entries: [entry]}],      the shards' and "cfg", the config server's
     streams: [stream], merged: [stream], resumes: [stream], images: [stream],
     live: {postBatchResumeToken, events} or null}

    stream  {member, beforeDrop, database, command, events: [event], replies: [{events, postBatchResumeToken}], closed}

``streams`` are shards' native streams, opened when all was over or (``beforeDrop``) while the collections existed;
``merged`` and ``resumes`` are the router's; ``images`` too, read while the collections existed; ``live`` was open while
a shard was added. The events of a stream are final up to ``end``. Entries and events are embedded documents: their
bytes are the server's own.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument

from tailrace.core.oplog.cluster_time import ClusterTime

DATA = Path(__file__).parent / "sharded"
SUFFIX = ".bson.xz"
CONFIG_SERVER = "cfg"


@dataclass(frozen=True)
class ShardedStream:
    """One stream: of a shard (``member``) or of the router (``member`` is empty)."""

    name: str
    member: str
    before_drop: bool
    database: str
    command: dict[str, Any]
    events: tuple[bytes, ...]
    reply_events: tuple[int, ...]
    reply_tokens: tuple[bytes, ...]
    closed: bool


@dataclass(frozen=True, eq=False)
class ShardedRecording:
    """One run on one server version. Equal to itself alone, so that what is made of it can be kept for it."""

    name: str
    server: str
    start: ClusterTime
    end: ClusterTime
    shards: tuple[str, ...]
    added: tuple[str, ...]
    shard_keys: dict[bytes, bytes]
    oplogs: dict[str, tuple[bytes, ...]]
    streams: tuple[ShardedStream, ...]
    merged: tuple[ShardedStream, ...]
    resumes: tuple[ShardedStream, ...]
    images: tuple[ShardedStream, ...]
    live_token: bytes | None
    live_events: tuple[bytes, ...]


def names() -> list[str]:
    """The recordings in the repository."""
    return sorted(path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}"))


@lru_cache(maxsize=2)
def load(name: str) -> ShardedRecording:
    packed = RawBSONDocument(lzma.decompress((DATA / f"{name}{SUFFIX}").read_bytes()))
    live = packed["live"]
    return ShardedRecording(
        name=name,
        server=packed["server"],
        start=ClusterTime.from_timestamp(packed["start"]),
        end=ClusterTime.from_timestamp(packed["end"]),
        shards=tuple(packed["shards"]),
        added=tuple(packed["added"]),
        shard_keys={bytes(known["uuid"]): bytes(known["key"].raw) for known in packed["shardKeys"]},
        oplogs={oplog["member"]: _raw_list(oplog["entries"]) for oplog in packed["oplogs"]},
        streams=_streams(packed["streams"], "shard"),
        merged=_streams(packed["merged"], "merged"),
        resumes=_streams(packed["resumes"], "resume"),
        images=_streams(packed["images"], "images"),
        live_token=None if live is None else bytes(live["postBatchResumeToken"].raw),
        live_events=() if live is None else _raw_list(live["events"]),
    )


def save(name: str, packed: dict[str, Any]) -> int:
    """Write one recording in the shape above; the file's size in bytes."""
    data = lzma.compress(bson.encode(packed), preset=9 | lzma.PRESET_EXTREME)
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}{SUFFIX}").write_bytes(data)
    return len(data)


def _streams(packed: list[RawBSONDocument], kind: str) -> tuple[ShardedStream, ...]:
    return tuple(_stream(stream, f"{kind} {index}") for index, stream in enumerate(packed))


def _stream(stream: RawBSONDocument, name: str) -> ShardedStream:
    command = bson.decode(stream["command"].raw)
    target = f"{stream['database']}.{command.get('aggregate', command.get('clusterAggregate'))}"
    where = f" {stream['member']}{' before drop' if stream['beforeDrop'] else ''}" if stream["member"] else ""
    return ShardedStream(
        name=f"{name}{where} {target}",
        member=stream["member"],
        before_drop=stream["beforeDrop"],
        database=stream["database"],
        command=command,
        events=_raw_list(stream["events"]),
        reply_events=tuple(reply["events"] for reply in stream["replies"]),
        reply_tokens=tuple(bytes(reply["postBatchResumeToken"].raw) for reply in stream["replies"]),
        closed=stream["closed"],
    )


def _raw_list(documents: list[RawBSONDocument]) -> tuple[bytes, ...]:
    return tuple(bytes(document.raw) for document in documents)
