"""Recordings: an oplog beside what the server's own change streams gave over it.

One file holds one workload on one server version: an LZMA-compressed BSON document

    {server, workload, note, oplog: [entry], preImages: [entry of config.system.preimages],
     documents: [{ns, documentKey, document}],    what an updateLookup found (null: nothing)
     streams: [{name, database, command, events: [event], replies: [reply], error}]}

    reply  {events: <how many>, closed: <cursor id is 0>, invalidated: bool, postBatchResumeToken, operationTime}
    error  {code, codeName, errmsg, errorLabels} or null

Entries and events are embedded documents, so their bytes are the server's own; the loader cuts them out undecoded.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument

from tailrace.core.oplog.cluster_time import ClusterTime

DATA = Path(__file__).parent / "data"
SUFFIX = ".bson.xz"
#: The names of all streams, by recording.
STREAMS = DATA / "streams.json"
_IMPOSSIBLE_DECIMAL = frozenset({50813, 50814, 50830, 50831})
#: Fields of a recorded command that belong to the connection, not to the stream.
_CONNECTION_FIELDS = ("lsid", "$clusterTime", "$readPreference", "$db", "readConcern")


@dataclass(frozen=True)
class Reply:
    """What one reply of the server says apart from its events."""

    events: int
    closed: bool
    invalidated: bool
    post_batch_resume_token: bytes


@dataclass(frozen=True)
class StreamError:
    """The error that ended a stream; ``message`` without the prefix that names the command."""

    code: int
    message: str
    labels: frozenset[str]


@dataclass(frozen=True)
class RecordedStream:
    """One change stream of a recording, with the events' raw bytes."""

    name: str
    database: str
    command: dict[str, Any]
    events: tuple[bytes, ...]
    replies: tuple[Reply, ...]
    error: StreamError | None


@dataclass(frozen=True, eq=False)
class Recording:
    """One workload on one server version. Equal to itself alone, so that what is made of it can be kept for it."""

    name: str
    server: str
    note: str
    oplog: tuple[bytes, ...]
    pre_images: tuple[bytes, ...]
    documents: tuple[bytes, ...]
    streams: tuple[RecordedStream, ...]


def names() -> list[str]:
    """The recordings in the repository, ``<workload>_<server version>``."""
    return sorted(path.name.removesuffix(SUFFIX) for path in DATA.glob(f"*{SUFFIX}"))


@cache
def streams() -> dict[str, tuple[str, int]]:
    """All streams: ``<recording>/<stream>`` to the recording's name and the stream's place in it. From the list beside
    the recordings: unpacking all of these takes a second, in each process that collects the tests."""
    listed = json.loads(STREAMS.read_text())
    return {f"{name}/{stream}": (name, index) for name in names() for index, stream in enumerate(listed[name])}


def streams_of(name: str) -> list[str]:
    """The names of a recording's streams, by the recording itself."""
    return [stream.name for stream in load(name).streams]


@lru_cache(maxsize=2)
def load(name: str) -> Recording:
    """Read one recording. The last ones are kept, since one test after the other asks for the same; not all of them,
    since events of 16 MB are among them."""
    packed = RawBSONDocument(lzma.decompress((DATA / f"{name}{SUFFIX}").read_bytes()))
    return Recording(
        name=name,
        server=packed["server"],
        note=packed["note"],
        oplog=_raw_list(packed["oplog"]),
        pre_images=_raw_list(packed["preImages"]),
        documents=_raw_list(packed["documents"]),
        streams=tuple(_stream(stream) for stream in packed["streams"]),
    )


def save(name: str, packed: dict[str, Any], *, into: Path = DATA) -> int:
    """Write one recording in the shape above (documents may be RawBSONDocument); the file's size in bytes."""
    data = lzma.compress(bson.encode(packed), preset=9 | lzma.PRESET_EXTREME)
    (into / f"{name}{SUFFIX}").write_bytes(data)
    if into == DATA:
        listed = json.loads(STREAMS.read_text()) | {name: [stream["name"] for stream in packed["streams"]]}
        write_streams(listed)
    return len(data)


def write_streams(listed: dict[str, list[str]]) -> None:
    """Write the list of all recordings' streams, by recording."""
    STREAMS.write_text(json.dumps(dict(sorted(listed.items())), indent=1) + "\n")


def pack_stream(
    name: str, database: str, command: dict[str, Any], replies: list[RawBSONDocument], error: dict[str, Any] | None
) -> dict[str, Any]:
    """The stored form of one stream from its command and the server's raw replies."""
    events: list[RawBSONDocument] = []
    packed_replies = []
    for reply in replies:
        cursor = reply["cursor"]
        batch = cursor["firstBatch"] if "firstBatch" in cursor else cursor["nextBatch"]
        events.extend(batch)
        packed_replies.append(
            {
                "events": len(batch),
                "closed": cursor["id"] == 0,
                "invalidated": cursor.get("invalidated", False),
                "postBatchResumeToken": cursor["postBatchResumeToken"],
                "operationTime": reply["operationTime"],
            }
        )
    return {
        "name": name,
        "database": database,
        "command": {key: value for key, value in command.items() if key not in _CONNECTION_FIELDS},
        "events": events,
        "replies": packed_replies,
        "error": error,
    }


def error_of(details: dict[str, Any]) -> StreamError:
    """From the fields of the server's error reply."""
    message = details["errmsg"]
    for command in ("PlanExecutor error during aggregation", "Executor error during getMore"):
        message = message.removeprefix(f"{command} :: caused by :: ")
    return StreamError(details["code"], message, frozenset(details.get("errorLabels", ())))


def entry_time(entry: bytes) -> ClusterTime:
    return ClusterTime.from_timestamp(RawBSONDocument(entry)["ts"])


def token_time(token: bytes) -> ClusterTime:
    """The cluster time in a token document, read from the hex digits and nothing else."""
    return ClusterTime(int(bson.decode(token)["_data"][2:18], 16))


def token_is_high_water_mark(token: bytes) -> bool:
    """Whether it is a high-water mark: in tokens of version 1 and 2 the token type, 0, stands right after the
    version."""
    return bson.decode(token)["_data"][22:24] == "29"


def same_error(expected: StreamError | None, got: StreamError | None) -> bool:
    """Whether a client could not tell the two errors apart. Two things need not be the same: the file and line in the
    server's source of a check that failed inside it, and which of four codes an impossible decimal gets (type bits that
    no server writes; there is a code for each step that may find out)."""
    if expected is None or got is None or expected == got:
        return expected == got
    if expected.message.startswith("assertion src/"):
        same_code: bool = expected.code == got.code
        return same_code
    return {expected.code, got.code} <= _IMPOSSIBLE_DECIMAL


def _stream(stream: RawBSONDocument) -> RecordedStream:
    return RecordedStream(
        name=stream["name"],
        database=stream["database"],
        command=bson.decode(stream["command"].raw),
        events=_raw_list(stream["events"]),
        replies=tuple(
            Reply(reply["events"], reply["closed"], reply["invalidated"], bytes(reply["postBatchResumeToken"].raw))
            for reply in stream["replies"]
        ),
        error=None if stream["error"] is None else error_of(bson.decode(stream["error"].raw)),
    )


def _raw_list(documents: list[RawBSONDocument]) -> tuple[bytes, ...]:
    # PyMongo gives long documents as views on the buffer they came in.
    return tuple(bytes(document.raw) for document in documents)
