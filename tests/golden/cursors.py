"""Drives our cursors over an oplog held in memory, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.cursor import (
    Acting,
    Action,
    CursorRegistry,
    NeedOldest,
    NeedStart,
    OldestEntry,
    OplogRead,
    ReadOplog,
)
from tailrace.core.cursor.action import StreamStart
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.stream import Need
from tailrace.errors import TailraceError
from tests.golden.replay import EVERYTHING, MemoryOplog


def carry_out(acting: Acting, answer: Callable[[Action], Any]) -> bytes:
    """Run a command to its end, and return the reply. What ``answer`` raises is thrown into the command."""
    try:
        action = next(acting)
        while True:
            try:
                given = answer(action)
            except TailraceError as error:
                action = acting.throw(error)
            else:
                action = acting.send(given)
    except StopIteration as end:
        reply: bytes = end.value
        return reply


def counting_ids() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


class MemorySource:
    """An oplog of which only what lies up to ``written`` is there yet.

    ``operation_time``  what a stream without a start is opened at
    ``waits``           the deadlines of the waits asked for; a wait moves the clock to its deadline, and before that
                        calls ``while_waiting`` once, which may write
    """

    def __init__(self, oplog: MemoryOplog, *, entries_max: int = EVERYTHING) -> None:
        self.oplog = oplog
        self.entries_max = entries_max
        self.written = oplog.times[-1] if oplog.times else ClusterTime(0)
        self.operation_time = ClusterTime(0)
        self.oldest = OldestEntry(ClusterTime(0), history_complete=True)
        self.now_ms = 0
        self.reads = 0
        self.waits: list[int] = []
        self.while_waiting: Callable[[], None] | None = None

    def __call__(self, action: Action) -> Any:
        match action:
            case NeedStart():
                return StreamStart(self.operation_time)
            case NeedOldest():
                return self.oldest
            case ReadOplog(_, deadline_ms):
                return self._read(action.after, deadline_ms)
            case Need(request=request):
                return self.oplog.answer(request)

    def _read(self, after: ClusterTime, deadline_ms: int | None) -> OplogRead:
        self.reads += 1
        if deadline_ms is not None and self.written <= after and self.now_ms < deadline_ms:
            self.waits.append(deadline_ms)
            event, self.while_waiting = self.while_waiting, None
            if event is None:
                self.now_ms = deadline_ms
            else:
                event()
        if self.written <= after:
            return OplogRead(OplogBatch(b"", self.written), True, self.now_ms)
        batch = next(iter(self.oplog.batches(after, self.written, self.entries_max)))
        return OplogRead(batch, batch.high_water >= self.written, self.now_ms)


class Cursors:
    """A registry over a memory source, spoken to in commands."""

    def __init__(self, source: MemorySource, server: str = "6.0") -> None:
        self.source = source
        self.registry = CursorRegistry(counting_ids(), profile_for(server))

    def run(self, database: str, command: Any) -> bytes:
        return carry_out(self.registry.run(database, bson.encode(command), self.source.now_ms), self.source)

    def aggregate(self, database: str, command: Any) -> RawBSONDocument:
        return RawBSONDocument(self.run(database, command))

    def get_more(self, reply: RawBSONDocument, **fields: Any) -> RawBSONDocument:
        """The next reply of the cursor that ``reply`` came from."""
        database, _, collection = reply["cursor"]["ns"].partition(".")
        command = {"getMore": Int64(reply["cursor"]["id"]), "collection": collection, **fields}
        return RawBSONDocument(self.run(database, command))


def batch_of(reply: RawBSONDocument) -> list[bytes]:
    """The events of a reply, each as raw BSON."""
    cursor = reply["cursor"]
    batch = cursor["firstBatch"] if "firstBatch" in cursor else cursor["nextBatch"]
    return [bytes(event.raw) for event in batch]
