"""The server's own change stream, read raw until it has passed a cluster time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.differential.wire import CommandError, Wire
from tests.golden.recording import StreamError, error_of, token_time

#: How long a getMore at the end of the oplog may wait, in milliseconds.
_AWAIT_MS = 20
_CURSOR_NOT_FOUND = 43
_SMALL_BATCH = 50


@dataclass
class NativeStream:
    """What one stream gave: raw events, after each reply the number of events so far with the reply's post-batch
    resume token, and how it ended."""

    events: list[bytes] = field(default_factory=list)
    replies: list[tuple[int, bytes]] = field(default_factory=list)
    error: StreamError | None = None
    invalidated: bool = False
    raw_replies: list[RawBSONDocument] = field(default_factory=list, repr=False)
    error_details: dict[str, Any] | None = None

    @property
    def resume_token(self) -> bytes:
        """The last token; empty if no reply had one."""
        return self.replies[-1][1] if self.replies else b""

    @property
    def ends_with_invalidate(self) -> bool:
        """Whether it was closed, and the token is the invalidate's (before 6.0 not where its pipeline hides that)."""
        return self.invalidated and bool(self.replies) and ResumeToken.parse(self.resume_token).from_invalidate

    def take(self, reply: RawBSONDocument) -> None:
        self.raw_replies.append(reply)
        cursor = reply["cursor"]
        batch = cursor["firstBatch"] if "firstBatch" in cursor else cursor["nextBatch"]
        self.events.extend(bytes(event.raw) for event in batch)
        # Before 6.0 the reply that closes an invalidated stream may have none, where no event is in it.
        token = cursor.get("postBatchResumeToken")
        if token is not None:
            self.replies.append((len(self.events), bytes(token.raw)))
        self.invalidated = cursor["id"] == 0

    def fail(self, error: CommandError) -> None:
        self.error = error_of(error.details)
        self.error_details = error.details


def aggregate(
    scope: tuple[str, str | None],
    stage: Mapping[str, Any],
    *,
    server: str = "6.0",
    v2: bool = False,
    pipeline: tuple[Any, ...] = (),
) -> tuple[str, dict[str, Any]]:
    """Database and command for a stream; the scope is (database, collection), (database, None) or ("admin", None).

    ``v2`` asks ``server`` for tokens of version 2; 7.0 writes no others, and refuses to be asked (6528200)."""
    database, collection = scope
    if database == "admin" and collection is None:
        stage = {"allChangesForCluster": True, **stage}
    command: dict[str, Any] = {
        "aggregate": 1 if collection is None else collection,
        "pipeline": [{"$changeStream": stage}, *pipeline],
        "cursor": {},
    }
    if v2 and int(server.partition(".")[0]) < 7:
        command["$_generateV2ResumeTokens"] = True
    return database, command


def read(
    wire: Wire, database: str, command: Mapping[str, Any], until: ClusterTime, *, batch_size: int | None = None
) -> NativeStream:
    """Read a stream until its post-batch resume token has passed ``until``, it is closed, or it fails.

    A failing reply carries no events although the stream had some to give. So a stream that fails is read again in
    small batches, and then a third time: what the small batches gave in one go, and one event a batch from there. What
    came before the failure is then complete.
    """
    stream = _read(wire, database, command, until, batch_size)
    if stream.error is None or batch_size == 1:
        return stream
    known = len(_read(wire, database, command, until, _SMALL_BATCH).events)
    return _read(wire, database, command, until, 1, first=max(known, 1))


def open_only(wire: Wire, database: str, command: Mapping[str, Any]) -> NativeStream:
    """Open a stream without reading (batch size 0): parameters are checked, the oplog is not looked at."""
    return _read(wire, database, command, ClusterTime(-1), 0)


def _read(
    wire: Wire,
    database: str,
    command: Mapping[str, Any],
    until: ClusterTime,
    batch_size: int | None,
    *,
    first: int | None = None,
) -> NativeStream:
    stream = NativeStream()
    sized = {} if batch_size is None else {"batchSize": first or batch_size}
    try:
        reply = wire.run(database, {**command, "cursor": sized})
    except CommandError as error:
        stream.fail(error)
        return stream
    stream.take(reply)
    cursor = reply["cursor"]
    cursor_id = cursor["id"]
    collection = cursor["ns"].partition(".")[2]
    more = {"collection": collection, "maxTimeMS": _AWAIT_MS, **({"batchSize": batch_size} if batch_size else {})}
    try:
        while not stream.invalidated and token_time(stream.resume_token) < until:
            stream.take(wire.run(database, {"getMore": Int64(cursor_id), **more}))
    except CommandError as error:
        stream.fail(error)
    else:
        if not stream.invalidated:
            _kill(wire, database, collection, cursor_id)
    return stream


def _kill(wire: Wire, database: str, collection: str, cursor_id: int) -> None:
    try:
        wire.run(database, {"killCursors": collection, "cursors": [Int64(cursor_id)]})
    except CommandError as error:
        if error.code != _CURSOR_NOT_FOUND:
            raise
