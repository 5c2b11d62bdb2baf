"""All oplogs of a sharded cluster: a reader for each, the cluster's clock, and promises on demand."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import bson
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core.oplog.cluster_clock import ClusterClock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.read.source.live import LiveSource
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.promise import AskedLately, PromiseRequester
from tailrace.read.source.shard_reader import ShardReader
from tailrace.read.source.worker import Worker

#: A shard is asked for a promise this often at most.
PROMISE_INTERVAL_S: Final = 0.02
#: A shard that gave an entry so lately is likely to give the next on its own.
_BUSY_S: Final = 0.01
#: How long one wait of the server for new entries lasts, and so how long closing takes.
_AWAIT_MS: Final = 250
#: How long closing waits for threads; one that hangs on a dead server ends on its own later.
_CLOSE_S: Final = 3.0

_log = logging.getLogger("tailrace.source")


@dataclass(frozen=True)
class ShardStatistics:
    """How one shard of a stream is doing.

    ``read_up_to``    cluster time of the last entry read
    ``trouble``       why it cannot be read at the moment, in words; ``None`` while it can
    ``forced_noops``  no-ops that it wrote because this stream asked for a promise
    """

    read_up_to: ClusterTime
    trouble: str | None
    forced_noops: int


class _ReadShard:
    """A reader, and what asks its shard for promises."""

    def __init__(self, reader: ShardReader, requester: PromiseRequester, asker: Worker) -> None:
        self.reader = reader
        self.requester = requester
        self.asker = asker
        self.asked_s = 0.0


class SharedReads(Protocol):
    """What the streams of a client share on each shard (``tailrace.read.tail.shard_tails``)."""

    def source(self, name: str, client: MongoClient[Any]) -> LiveSource:
        """A source for one stream on the shard, which tries for ever."""
        ...

    def asked(self, client: MongoClient[Any]) -> AskedLately: ...


class ShardedSource:
    """Reads the shards that it is given, ahead of the caller that asks for batches.

    ``shared``   what other streams of the client read of the shards too; ``None``: this stream reads on its own
    ``changed``  notified when a batch, a failure or an answer of a ``Worker`` has come
    """

    def __init__(
        self, *, batch_size: int | None = None, comment: Any = None, shared: SharedReads | None = None
    ) -> None:
        self._shared = shared
        self.changed = threading.Condition()
        self._options: dict[str, Any] = {"await_ms": _AWAIT_MS, "batch_size": batch_size, "comment": comment}
        self._parts: dict[str, _ReadShard] = {}
        self._forced_by_closed = 0
        self._clock = ClusterClock()

    def open(self, name: str, client: MongoClient[Any], after: ClusterTime) -> None:
        """Read a shard after ``after``. Does not wait for it."""
        shared = self._shared
        source = MongodSource(client, retry_seconds=math.inf) if shared is None else shared.source(name, client)
        reader = ShardReader(name, source, after, self.changed, **self._options)
        asker = Worker(f"tailrace-promise-{name}", self.changed)
        requester = PromiseRequester(client, name, lately=None if shared is None else shared.asked(client))
        self._parts[name] = _ReadShard(reader, requester, asker)

    def reader(self, name: str) -> ShardReader | None:
        """The reader of a shard that is open."""
        part = self._parts.get(name)
        return None if part is None else part.reader

    @property
    def names(self) -> tuple[str, ...]:
        """The shards that are read."""
        return tuple(self._parts)

    def next_batch(self, name: str) -> OplogBatch | None:
        """What was read of a shard next; ``None`` where nothing waits."""
        return self._parts[name].reader.next_batch()

    def request_promise(self, name: str, until: ClusterTime) -> float | None:
        """Ask a shard to write past ``until``, unless it was asked just now or is about to do so on its own.

        The answer comes as a batch, when the shard's reader has seen it. Gives the seconds after which it is worth
        asking again; ``None`` where a request is under way, or a batch that was read waits to be taken.
        """
        part = self._parts[name]
        part.reader.await_time(until)
        if part.asker.busy or part.reader.has_batch or part.reader.trouble is not None:
            return None
        now = time.monotonic()
        ready = max(part.asked_s + PROMISE_INTERVAL_S, part.reader.last_entry_s + _BUSY_S)
        if now < ready:
            return ready - now
        document = self._clock_document(until)
        if document is not None:
            part.asked_s = now
            part.asker.submit(partial(_ask, part.requester, until, document))
        return PROMISE_INTERVAL_S

    def _clock_document(self, until: ClusterTime) -> Mapping[str, Any] | None:
        """The largest ``$clusterTime`` that any member sent, as it was sent; ``None`` while it is before ``until``."""
        for part in self._parts.values():
            document = part.reader.clock_document
            if document is not None:
                self._clock.gossip(bson.encode(document))
        if self._clock.document is None or self._clock.now < until:
            return None
        return bson.decode(self._clock.document)

    def statistics(self) -> dict[str, ShardStatistics]:
        return {
            name: ShardStatistics(part.reader.read_up_to, part.reader.trouble, part.requester.forced)
            for name, part in self._parts.items()
        }

    @property
    def forced_noops(self) -> int:
        """How many no-ops were written because this stream asked for promises, over all shards."""
        return self._forced_by_closed + sum(part.requester.forced for part in self._parts.values())

    def close_shard(self, name: str) -> None:
        """Read a shard no further. Does not wait for its threads."""
        part = self._parts.pop(name, None)
        if part is not None:
            self._forced_by_closed += part.requester.forced
            part.asker.close()
            part.reader.close()

    def close(self) -> None:
        """Read no further, and wait a moment for the threads to end."""
        parts = list(self._parts.values())
        for name in list(self._parts):
            self.close_shard(name)
        deadline = time.monotonic() + _CLOSE_S
        for part in parts:
            for thread in (part.reader, part.asker):
                if not thread.join(max(0.0, deadline - time.monotonic())):
                    _log.info("shard %s: a thread still waits for its server and ends later", part.reader.name)


def _ask(requester: PromiseRequester, until: ClusterTime, document: Mapping[str, Any]) -> None:
    try:
        requester.ask(until, document)
    except PyMongoError as error:
        # The reader meets the same trouble and says so; the stream asks again as long as it waits.
        _log.debug("a shard could not be asked for a promise: %s", type(error).__name__)
