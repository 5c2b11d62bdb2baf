"""A sync's state that somebody has edited is refused, and not misinterpreted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.act.sync.state import document_of, synced_collection
from tailrace.act.sync.undamaged import undamaged
from tailrace.errors import SinkError

TIME = Timestamp(1_700_000_000, 1)
WHOLE: dict[str, Any] = {
    "_id": "sync",
    "format": 1,
    "epoch": Int64(3),
    "owner": "me",
    "expiresAt": datetime(2026, 1, 1, tzinfo=UTC),
    "phase": "follow",
    "time": TIME,
    "hold": TIME,
    "batch": Int64(8),
    "stamp": "",
    "members": [{"name": "rs0", "host": "localhost:1"}],
    "witness": None,
    "barrier": {"time": TIME, "command": "drop", "namespace": "shop.a"},
    "commits": [{"time": TIME, "at": TIME}],
    "sessions": [],
    "prepared": True,
    "making": [],
    "paused": False,
}
COLLECTION: dict[str, Any] = {
    "_id": {"sync": "sync", "uuid": Binary(bytes(16), 4)},
    "namespace": "shop.a",
    "target": "shop.a",
    "targetUuid": Binary(bytes(16), 4),
    "pending": False,
    "filled": "",
    "capped": False,
    "asOf": None,
}
OTHERS: list[Any] = ["x", 7, 1.5, True, None, [1], {"a": 1}, TIME]
#: Other values that a field may have.
TAKEN: dict[str, tuple[Any, ...]] = {
    "epoch": (7,),
    "batch": (7,),
    "owner": ("x", None),
    "expiresAt": (None,),
    "time": (TIME,),
    "hold": (TIME,),
    "stamp": ("x",),
    "witness": (None,),
    "barrier": (None,),
    "sessions": ([1],),
    "prepared": (True,),
    "making": ([1],),
    "paused": (True,),
    "namespace": ("x",),
    "target": ("x",),
    "pending": (True,),
    "filled": ("x",),
    "capped": (True,),
    "asOf": (TIME, None),
}
#: Fields that earlier versions did not write, or that have not been requested yet.
MAY_BE_MISSING = ("stamp", "sessions", "prepared", "making", "paused", "asOf")


def test_what_is_whole_is_read() -> None:
    assert document_of(WHOLE).epoch == 3
    assert synced_collection(COLLECTION).namespace == "shop.a"


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "_id"])
def test_a_field_of_the_sync_s_document_that_is_not_as_it_was_written(name: str) -> None:
    """``phase: "x"`` was followed like ``follow``, in the middle of a copy too."""
    for value in OTHERS:
        if any(type(value) is type(one) and value == one for one in TAKEN.get(name, ())):
            document_of({**WHOLE, name: value})
            continue
        with pytest.raises(SinkError, match="the document of the sync 'sync' on the target is damaged"):
            document_of({**WHOLE, name: value})
    without = {key: value for key, value in WHOLE.items() if key != name}
    if name in MAY_BE_MISSING:
        document_of(without)
        return
    with pytest.raises(SinkError, match=f"damaged: KeyError.*{name}") as raised:
        document_of(without)
    assert "Restore the state and the documents of the target together" in str(raised.value.hint)


@pytest.mark.parametrize("name", [name for name in COLLECTION if name != "_id"])
def test_a_field_of_a_collection_that_is_not_as_it_was_written(name: str) -> None:
    """``pending: 7`` left the collection out of each verification."""
    for value in OTHERS:
        damaged = {**COLLECTION, name: value}
        if any(type(value) is type(one) and value == one for one in TAKEN.get(name, ())):
            synced_collection(damaged)
            continue
        with pytest.raises(SinkError, match="a collection on the target is damaged"), undamaged("a collection"):
            synced_collection(damaged)
