"""The sort key that a shard's part of a merged stream carries after each event (semantics 9)."""

from __future__ import annotations

from tailrace.core import raw_bson
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.raw_bson import ARRAY, OBJECT, encode_document, encode_element
from tailrace.core.stage.setup import RouterSetup, RouterStage


class AddSortKey(RouterStage):
    """Appends ``$sortKey: [<token>]``: what the merge over shards compares."""

    @classmethod
    def is_needed(cls, setup: RouterSetup) -> bool:
        return setup.adds_sort_key

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            key = encode_document(encode_element(OBJECT, b"0", event.token_bson))
            body = event.to_bson()[4:-1]
            event.replaced_by = raw_bson.encode_document(body, encode_element(ARRAY, b"$sortKey", key))
            out.append(event)
