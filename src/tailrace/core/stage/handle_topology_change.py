"""HandleTopologyChange: after the merge, follows the cluster's shards and swallows the events that announced them.

A shard is added by an insert into ``config.shards``, which comes to the merge from the config server's oplog. Every
cursor that the server opens then starts one tick after that insert: before that it was not a shard. A shard is removed
by a deletion there, alone (4.4) or in an ``applyOps`` (5.0, 6.0). The server does not follow removals: its cursor stays
on the servers that were a shard until it fails. Here the shard's part ends with the removal.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Final, Self, cast

from tailrace.core import raw_bson
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.plan.request import Answer, NeedShard
from tailrace.core.raw_bson import STRING
from tailrace.core.stage.setup import RouterSetup, RouterStage
from tailrace.errors import OplogFormatError, invariant

_CONFIG_SHARDS: Final = (b"config", b"shards")


class HandleTopologyChange(RouterStage):
    """Asks for each new shard (``NeedShard``) and gives only the user's events. A shard that was removed and comes back
    is a new one: it may be on other servers.

    ``shards``   the names of all shards that the stream reads or has asked for
    ``removed``  those whose removal has passed and that the merge still holds
    """

    @classmethod
    def is_needed(cls, setup: RouterSetup) -> bool:
        return setup.topology is not None

    @classmethod
    def of(cls, setup: RouterSetup) -> Self:
        """That of the merge, which tells it of the shards."""
        invariant(setup.topology is not None, "a stream over one oplog has no topology")
        return cast(Self, setup.topology)

    def __init__(self, shards: Iterable[str]) -> None:
        self.shards = set(shards)
        self.removed: list[str] = []

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> Generator[NeedShard, Answer, None]:
        for event in events:
            if event.witness or not event.bypasses:
                out.append(event)
            elif event.namespace == _CONFIG_SHARDS:
                yield from self._follow(event)

    @staticmethod
    def removed_by(event: ChangeEvent) -> str | None:
        """The name of the shard that an event of the config server's removes; ``None`` for any other event."""
        if event.namespace != _CONFIG_SHARDS or event.operation_type != "delete":
            return None
        return _text(event, event.document_key, b"_id")

    def _follow(self, event: ChangeEvent) -> Generator[NeedShard, Answer, None]:
        if event.operation_type == "insert":
            name, host = _text(event, event.full_document, b"_id"), _text(event, event.full_document, b"host")
            if name not in self.shards:
                self.shards.add(name)
                yield NeedShard(name, host, event.cluster_time.tick())
            return
        removed = self.removed_by(event)
        if removed in self.shards:
            self.shards.remove(removed)
            self.removed.append(removed)


def _text(event: ChangeEvent, document: bytes | None, field: bytes) -> str:
    element = None if document is None else raw_bson.find(document, field)
    if document is None or element is None or element.type != STRING:
        raise OplogFormatError(
            f"a document of config.shards has no string '{field.decode()}'",
            position=f"oplog entry {event.cluster_time} of the config server",
        )
    return raw_bson.read_string(document, element.value_start).decode("utf-8", "replace")
