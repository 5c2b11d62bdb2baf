"""The events that the simulation's stream gives: recorded ones, with the server's own tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import bson

from tailrace.core.event.resume_token import ResumeToken
from tests.golden import recording

#: Recordings and streams: many documents, few documents with many changes, transactions, an invalidate at the end.
STREAMS = (
    ("updates_6.0.27", "collection"),
    ("id_types_5.0.4", "collection"),
    ("sessions_6.0.27", "cluster plain"),
    ("transactions_4.4.2", "cluster plain"),
    ("pre_post_images_6.0.27", "db fd=default fdbc=off"),
    ("ddl_6.0.27", "database expanded"),
)


class RecordedEvent(NamedTuple):
    """``key`` names the document, or what else was changed; ``order`` is the token's place in the stream."""

    number: int
    token: dict[str, Any]
    order: bytes
    key: str
    time: int
    invalidate: bool


@lru_cache
def recorded(name: str, stream: str) -> tuple[RecordedEvent, ...]:
    found = next(one for one in recording.load(name).streams if one.name == stream)
    return tuple(_event(number, bson.decode(raw)) for number, raw in enumerate(found.events))


def _event(number: int, event: dict[str, Any]) -> RecordedEvent:
    token = ResumeToken.parse(event["_id"])
    key = repr(bson.encode({"of": event.get("documentKey", event.get("ns"))}))
    kind = event["operationType"]
    return RecordedEvent(number, event["_id"], token.sort_key, key, int(token.cluster_time), kind == "invalidate")
