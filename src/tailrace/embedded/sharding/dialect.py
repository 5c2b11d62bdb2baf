"""What the servers' internal commands are called from 4.4 to 6.0: as the mongos of each version sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bson.int64 import Int64

from tailrace.embedded.sharding.catalog import Chunk, Table
from tailrace.embedded.sharding.connections import MAJORITY
from tailrace.errors import UsageError

_CHUNK_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Dialect:
    """The commands of one release series, such as (6, 0)."""

    series: tuple[int, int]

    @property
    def coordinated(self) -> bool:
        """Whether the primary shard carries out definitions (5.0 and later) or the config server (4.4)."""
        return self.series >= (5, 0)

    def need(self, series: tuple[int, int], what: str) -> None:
        """Raise UsageError where the servers are older than ``series``."""
        if self.series < series:
            have, want = (".".join(map(str, one)) for one in (self.series, series))
            raise UsageError(f"{what} in an embedded cluster needs mongod {want} or later, not {have}")

    def shard_version(self, table: Table, shard: str) -> Any:
        """The field ``shardVersion`` of a command for one shard."""
        newest, epoch, timestamp = table.version_on(shard)
        if self.series >= (6, 0):
            return {"t": timestamp, "e": epoch, "v": newest}
        return [newest, epoch, timestamp] if self.series >= (5, 0) else [newest, epoch]

    def create_database(self, name: str, primary: str) -> dict[str, Any]:
        """For the config server. 4.4 would choose the primary shard itself unless sharding is enabled at once."""
        if not self.coordinated:
            return {"_configsvrEnableSharding": name, "primaryShard": primary, "writeConcern": MAJORITY}
        command: dict[str, Any] = {"_configsvrCreateDatabase": name, "primaryShardId": primary}
        if self.series < (6, 0):
            command["enableSharding"] = True
        return {**command, "writeConcern": MAJORITY}

    def split(self, table: Table, chunk: Chunk, at: Mapping[str, Any]) -> dict[str, Any]:
        """For the shard that owns the chunk."""
        assert table.collection is not None
        command: dict[str, Any] = {"splitChunk": table.namespace, "from": chunk.shard, "keyPattern": table.key}
        command["epoch"] = table.collection["lastmodEpoch"]
        if self.coordinated:
            command["timestamp"] = table.collection["timestamp"]
        return {**command, "min": chunk.minimum, "max": chunk.maximum, "splitKeys": [at]}

    def move(self, table: Table, chunk: Chunk, to: str, *, wait: bool) -> dict[str, Any]:
        """For the config server."""
        assert table.collection is not None
        ends = {"min": chunk.minimum, "max": chunk.maximum}
        if self.series >= (6, 0):
            command: dict[str, Any] = {"_configsvrMoveRange": table.namespace, "toShard": to, **ends}
            return {**command, "waitForDelete": wait, "writeConcern": MAJORITY}
        command = {"_configsvrMoveChunk": 1, "ns": table.namespace, **ends, "shard": chunk.shard}
        command |= {"lastmod": chunk.version, "lastmodEpoch": table.collection["lastmodEpoch"]}
        if self.coordinated:
            command |= {"lastmodTimestamp": table.collection["timestamp"], "uuid": table.collection["uuid"]}
        command |= {"toShard": to, "maxChunkSizeBytes": Int64(_CHUNK_BYTES_MAX)}
        command |= {"secondaryThrottle": {"secondaryThrottle": False}, "waitForDelete": wait, "forceJumbo": False}
        return {**command, "writeConcern": MAJORITY}
