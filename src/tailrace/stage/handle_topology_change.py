"""HandleTopologyChange: behind the merge, follows the cluster's growth and swallows what told of it.

A shard is added by an insert into ``config.shards``, which comes to the merge from the config server's oplog. Every
cursor that the server opens then starts one tick behind that insert: before it the shard was none. Removals are not
followed (6.0): a removed shard has given everything that it had, and stays in the merge until its cursor ends.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Final

from tailrace import raw_bson
from tailrace.errors import OplogFormatError
from tailrace.event.change_event import ChangeEvent
from tailrace.pipeline.request import Answer, NeedShard
from tailrace.raw_bson import STRING

_CONFIG_SHARDS: Final = (b"config", b"shards")


class HandleTopologyChange:
    """Asks for each new shard (``NeedShard``) and gives only the user's events. A shard that was removed and comes back
    is a new one: it may be on other servers.

    ``shards``   the names of all shards that the stream reads or has asked for
    ``removed``  those of them whose document in ``config.shards`` was deleted since
    """

    def __init__(self, shards: Iterable[str]) -> None:
        self.shards = set(shards)
        self.removed: set[str] = set()

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> Generator[NeedShard, Answer, None]:
        for event in events:
            if not event.bypasses:
                out.append(event)
            elif event.namespace == _CONFIG_SHARDS:
                yield from self._follow(event)

    def _follow(self, event: ChangeEvent) -> Generator[NeedShard, Answer, None]:
        if event.operation_type == "insert":
            name, host = _text(event, event.full_document, b"_id"), _text(event, event.full_document, b"host")
            if name not in self.shards or name in self.removed:
                self.shards.add(name)
                self.removed.discard(name)
                yield NeedShard(name, host, event.cluster_time.tick())
        elif event.operation_type == "delete":
            name = _text(event, event.document_key, b"_id")
            if name in self.shards:
                self.removed.add(name)


def _text(event: ChangeEvent, document: bytes | None, field: bytes) -> str:
    element = None if document is None else raw_bson.find(document, field)
    if document is None or element is None or element.type != STRING:
        raise OplogFormatError(
            f"a document of config.shards has no string '{field.decode()}'",
            position=f"oplog entry {event.cluster_time} of the config server",
        )
    return raw_bson.read_string(document, element.value_start).decode("utf-8", "replace")
