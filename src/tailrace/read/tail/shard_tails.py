"""The tails of a cluster's shards: one for each shard, for all streams of a client over the cluster."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pymongo import MongoClient

from tailrace.core.oplog.namespace import Scope
from tailrace.core.stream.merge import CONFIG_SHARDS
from tailrace.read.source.promise import AskedLately
from tailrace.read.tail.reader import Attendant
from tailrace.read.tail.shared_tail import WINDOW_BYTES, SharedTail, TailStatistics
from tailrace.read.tail.tailed_source import TailedSource


class ShardTails:
    """A tail for each shard that a stream reads, made when the first one does.

    ``window_bytes``, ``on_read``, ``streams_min``, ``attendant``  of each tail
    """

    def __init__(
        self,
        *,
        window_bytes: int = WINDOW_BYTES,
        on_read: Callable[[int], object] = lambda size: None,
        streams_min: int = 2,
        attendant: Attendant | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "window_bytes": window_bytes,
            "on_read": on_read,
            "streams_min": streams_min,
            "attendant": attendant,
        }
        self._shards: dict[MongoClient[Any], tuple[SharedTail, AskedLately]] = {}
        self._lock = threading.Lock()

    def of_scope(self, scope: Scope) -> ScopedReads:
        """What a stream of ``scope`` reads by."""
        return ScopedReads(self, scope)

    def shard(self, client: MongoClient[Any]) -> tuple[SharedTail, AskedLately]:
        """What is shared on the shard that ``client`` reads."""
        with self._lock:
            found = self._shards.get(client)
            if found is None:
                found = self._shards[client] = SharedTail(client, **self._options), AskedLately()
            return found

    @property
    def statistics(self) -> TailStatistics:
        """Of all shards together; a stream counts on each of them."""
        with self._lock:
            tails = [tail for tail, _ in self._shards.values()]
        return TailStatistics.total(tail.statistics for tail in tails)

    def close(self) -> None:
        """Read no further."""
        with self._lock:
            tails = [tail for tail, _ in self._shards.values()]
        for tail in tails:
            tail.close()


@dataclass(frozen=True)
class ScopedReads:
    """One stream's part of it: a ``tailrace.read.source.sharded.SharedReads``."""

    tails: ShardTails
    scope: Scope

    def source(self, name: str, client: MongoClient[Any]) -> TailedSource:
        scope = Scope.parse(CONFIG_SHARDS) if name == CONFIG_SHARDS else self.scope
        return TailedSource(client, self.tails.shard(client)[0], scope, retry_seconds=math.inf)

    def asked(self, client: MongoClient[Any]) -> AskedLately:
        return self.tails.shard(client)[1]
