"""The event of a copied document is made when it is first used, and is what the copy would have given."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tailrace.act.consumer import copied
from tailrace.act.consumer.copied import CopiedDocument
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.snapshot import SnapshotChunk

DOCUMENT = bson.encode({"_id": 7, "region": {"name": "north"}, "total": 3})


def chunk(key: dict[str, Any] | None = None) -> SnapshotChunk:
    return SnapshotChunk(0, 0, b"", "shop.orders", bytes(range(16)), [DOCUMENT], ClusterTime(1 << 40), key)


@pytest.mark.parametrize("key", [None, {"region.name": 1}])
def test_it_is_the_event_of_the_chunk(key: dict[str, Any] | None) -> None:
    whole = chunk(key)
    (event,) = whole.events()
    shown = bson.decode(event)
    found = CopiedDocument(DOCUMENT, whole)
    assert found.raw == event
    assert set(found) == set(shown)
    assert len(found) == len(shown)
    assert found["operationType"] == "snapshot"
    assert bson.encode(dict(found.token)) == bson.encode(shown["_id"])
    assert bson.decode(found.key) == shown["documentKey"]
    assert found.time.to_timestamp() == shown["clusterTime"]


def test_it_is_made_once_and_only_if_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    genuine = copied.snapshot_event
    monkeypatch.setattr(copied, "snapshot_event", lambda *given: made.append(1) or genuine(*given))
    found = CopiedDocument(DOCUMENT, chunk())
    token = found.token
    assert found.document == DOCUMENT
    assert not made
    assert token["_data"] == found["_id"]["_data"]
    assert made == [1]
