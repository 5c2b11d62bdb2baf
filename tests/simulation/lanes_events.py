"""The changes of a simulation of lanes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import bson

from tailrace.act.consumer.rules.lane_key import PlacedEvent
from tailrace.core.event.resume_token import ResumeToken

_UUID = bytes(16)


class InvariantBrokenError(AssertionError):
    """What must never happen has happened."""


@dataclass(frozen=True)
class SimulatedEvent:
    """The ``number``-th event: the ``n``-th of its ``key``, or a barrier (no key)."""

    number: int
    key: int | None
    n: int
    token: Mapping[str, Any]
    order: bytes
    is_invalidate: bool = False
    error: None = None

    @property
    def is_barrier(self) -> bool:
        return self.key is None

    @property
    def event(self) -> SimulatedEvent:
        return self

    def placed(self, key: str) -> PlacedEvent:
        """By the key of a name: "path:half" puts two documents into one lane."""
        return PlacedEvent(self.order, self.key // 2 if key and self.key is not None else self.key)


def events_of(rng: random.Random, count: int, keys: int, barriers: int) -> list[SimulatedEvent]:
    at = set(rng.sample(range(count), barriers))
    counted: dict[int | None, int] = defaultdict(int)
    events = []
    for number in range(count):
        key = None if number in at else rng.randrange(keys)
        counted[key] += 1
        token = bson.decode(ResumeToken((number + 2) << 32, uuid=_UUID).to_bson())
        events.append(SimulatedEvent(number, key, counted[key], token, token["_data"].encode()))
    return events
