"""The server's cursors and ours side by side: every command goes to both, and both replies must be the same bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.cursor import (
    Action,
    CursorRegistry,
    NeedOldest,
    NeedStart,
    OldestEntry,
    OplogRead,
    ReadOplog,
    StreamStart,
)
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import NeedDocuments, NeedEntries, NeedPreImages, OplogBatch
from tailrace.core.raw_bson import elements, encode_document
from tailrace.core.stream.stream import Need
from tailrace.read.source.mongod import MongodSource
from tests.differential.wire import ANY_VALUE, Wire
from tests.golden.cursors import batch_of, carry_out
from tests.golden.recording import error_of, same_error

_POLL_S = 0.005
#: Ids whose bytes occur nowhere else in a reply.
_FIRST_ID = 0x5EED_5EED_0000_0000
_OF_THE_CONNECTION = (b"$clusterTime", b"operationTime")
_KINDS = {"view": "view", "timeseries": "timeseries"}


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class LiveSource:
    """Answers a cursor's actions from a running server. ``batch_bytes_max`` bounds what one read gives."""

    def __init__(self, source: MongodSource, *, batch_bytes_max: int = 1 << 24) -> None:
        self._source = source
        self.batch_bytes_max = batch_bytes_max

    def __call__(self, action: Action) -> Any:
        match action:
            case NeedStart(scope):
                return StreamStart(self._source.operation_time(), self._kind(scope.database, scope.collection))
            case NeedOldest():
                return OldestEntry(*self._source.oldest())
            case ReadOplog(_, deadline_ms):
                return self._read(action.after, deadline_ms)
            case Need(request=NeedEntries(times)):
                return self._source.entries(times)
            case Need(request=NeedPreImages(keys)):
                return self._source.pre_images(keys)
            case Need(request=NeedDocuments(lookups)):
                return self._source.documents(lookups)

    def _kind(self, database: str | None, collection: str | None) -> Any:
        if database is None or collection is None:
            return "collection"
        found = list(self._source.client[database].list_collections(filter={"name": collection}))
        return _KINDS.get(found[0]["type"], "collection") if found else "collection"

    def _read(self, after: ClusterTime, deadline_ms: int | None) -> OplogRead:
        newest = self._source.newest()
        while newest <= after and deadline_ms is not None and now_ms() < deadline_ms:
            time.sleep(_POLL_S)
            newest = self._source.newest()
        batch = next(self._source.read(after, newest, batch_bytes_max=self.batch_bytes_max), OplogBatch(b"", newest))
        return OplogRead(batch, batch.high_water >= newest, now_ms())


class DifferentError(AssertionError):
    """The two sides do not agree."""


class Pair:
    """One cursor on both sides. ``events`` are what it gave, as raw BSON."""

    def __init__(self, sides: Sides, database: str, reply: RawBSONDocument, ours: RawBSONDocument) -> None:
        self._sides = sides
        self._database = database
        self.ids = (reply["cursor"]["id"], ours["cursor"]["id"])
        self.collection = reply["cursor"]["ns"].partition(".")[2]
        self.events = batch_of(reply)
        self.reply = reply

    @property
    def closed(self) -> bool:
        return bool(self.reply["ok"] != 1 or self.reply["cursor"]["id"] == 0)

    def get_more(self, *, ours_first: bool = False, **fields: Any) -> RawBSONDocument:
        """The next reply, which is the same on both sides; it may be an error."""
        more = {"collection": self.collection, **fields}
        self.reply, _ = self._sides.both(
            self._database,
            *({"getMore": Int64(cursor_id), **more} for cursor_id in self.ids),
            ids=self.ids,
            ours_first=ours_first,
        )
        if self.reply["ok"] == 1:
            self.events += batch_of(self.reply)
        return self.reply

    def kill(self) -> RawBSONDocument:
        """Kill it on both sides."""
        commands = ({"killCursors": self.collection, "cursors": [Int64(cursor_id)]} for cursor_id in self.ids)
        return self._sides.both(self._database, *commands, ids=self.ids)[0]


class Sides:
    """A connection to the server, and a registry of ours that reads the same server's oplog."""

    def __init__(self, uri: str, wire: Wire, source: MongodSource) -> None:
        self.uri = uri
        self.wire = wire
        self.source = LiveSource(source)
        self.registry = CursorRegistry(itertools.count(_FIRST_ID), profile_for(source.server_version))
        self.replies = 0

    def open(self, database: str, command: Mapping[str, Any]) -> Pair | RawBSONDocument:
        """Open a cursor on both sides; the error where both refuse with the same one."""
        reply, ours = self.both(database, command, command)
        return Pair(self, database, reply, ours) if reply["ok"] == 1 else reply

    def both(
        self,
        database: str,
        command: Mapping[str, Any],
        our_command: Mapping[str, Any],
        *,
        ids: tuple[int, int] | None = None,
        ours_first: bool = False,
    ) -> tuple[RawBSONDocument, RawBSONDocument]:
        """Both replies to a command. Raises ``DifferentError`` unless they are the same bytes, apart from what the
        connection adds and the cursor's id."""
        raw = bson.encode({**our_command, "$db": database})
        if ours_first:
            mine = carry_out(self.registry.run(database, raw, now_ms()), self.source)
        theirs = self.wire.exchange(bson.encode({**command, "$db": database}))
        if not ours_first:
            mine = carry_out(self.registry.run(database, raw, now_ms()), self.source)
        self.replies += 1
        reply, ours = RawBSONDocument(_without_the_connections(theirs)), RawBSONDocument(mine)
        if _comparable(reply, ids and ids[0]) != _comparable(ours, ids and ids[1]) and not _same_errors(reply, ours):
            server, tailrace = (str(bson.decode(each.raw, ANY_VALUE))[:3000] for each in (reply, ours))
            raise DifferentError(f"{dict(command)}\nserver: {server}\nours:   {tailrace}")
        return reply, ours


def _same_errors(reply: RawBSONDocument, ours: RawBSONDocument) -> bool:
    if reply["ok"] == 1 or ours["ok"] == 1:
        return False
    details = [bson.decode(each.raw, ANY_VALUE) for each in (reply, ours)]
    if _has_no_token(*details):
        return True
    prefixes = [each["errmsg"].partition(" :: caused by :: ")[0] for each in details]
    return same_error(*map(error_of, details)) and ("assertion" in details[0]["errmsg"] or len(set(prefixes)) == 1)


def _has_no_token(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether the stream, looking for the event that it resumes from, has passed one whose ``_id`` the user's stages
    have made a string: the server takes it for a document and fails (docs/reference/differences.md)."""
    asserts = theirs["code"] == 8 and "assertion src/mongo/db/exec/document_value/value.cpp" in theirs["errmsg"]
    return asserts and ours["code"] == 280 and "the resume token was not found" in ours["errmsg"]


def _comparable(reply: RawBSONDocument, cursor_id: int | None) -> bytes:
    """The reply with a mark in place of the cursor's id, wherever it stands."""
    if "cursor" in reply:
        cursor_id = reply["cursor"]["id"]
    raw = bytes(reply.raw)
    if not cursor_id:
        return raw
    if "errmsg" in reply:
        return bson.encode({**bson.decode(raw), "errmsg": reply["errmsg"].replace(str(cursor_id), "<id>")})
    return raw.replace(bson.encode({"": Int64(cursor_id)})[6:-1], b"<the id>")


def _without_the_connections(reply: bytes) -> bytes:
    return encode_document(
        *(reply[each.start : each.end] for each in elements(reply) if each.name not in _OF_THE_CONNECTION)
    )
