"""What a sink's note reveals about a checkpoint that is behind it, so that no event is skipped. Without Spark.

The tests with Spark repeated a batch unchanged, and a fresh checkpoint always had a name of its own. So they never had
a batch with a number that the sink has and with other events.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument

from tailrace.core.event.resume_token import encode_event_token
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.spark.applied import AppliedBatches
from tailrace.lake.spark.batch import MicroBatch
from tailrace.read.snapshot.event import snapshot_event


def token(number: int) -> str:
    return f"82{1_700_000_000 + number:08X}000000012B"


class Frame:
    """The parts of a Spark DataFrame that a batch uses, with tokens as rows."""

    columns = ("token",)

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens

    def __getitem__(self, _: str) -> Frame:
        return self

    def __gt__(self, least: str) -> Callable[[str], bool]:
        return lambda one: one > least

    def where(self, condition: Any) -> Frame:
        return Frame([one for one in self._tokens if condition != "false" and condition(one)])

    def agg(self, _: object) -> Frame:
        return self

    def first(self) -> tuple[str | None]:
        return (max(self._tokens, default=None),)

    def toLocalIterator(self, **_: object) -> Iterator[dict[str, str]]:  # noqa: N802
        return ({"token": one} for one in self._tokens)


def batch(query: str, number: int, *events: int) -> MicroBatch:
    return MicroBatch(query, number, Frame([token(n) for n in events]))  # type: ignore[arg-type]


def apply(connection: sqlite3.Connection, given: MicroBatch) -> list[str]:
    with AppliedBatches(connection, "mine").transaction(given) as new:
        return [row["token"] for row in new.rows()]


def test_an_old_copy_of_a_checkpoint_passes_no_event_over() -> None:
    """Such a copy plans its next batches anew: they have numbers that the sink already has, and reach further than the
    sink."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for number in range(4):
            assert apply(connection, batch("one", number, number)) == [token(number)]
        assert apply(connection, batch("one", 1, 1)) == [], "a batch that is there may be given again"
        with pytest.raises(SinkError, match="checkpoint is behind sink 'mine': it gives batch 2 with events"):
            apply(connection, batch("one", 2, 2, 3, 4))
        assert apply(connection, batch("one", 3, 2, 3, 4)) == [token(4)], "the newest batch, and longer than it was"
        assert apply(connection, batch("one", 3, 2, 3, 4)) == []
        assert apply(connection, batch("one", 4, 5)) == [token(5)]


def test_a_fresh_checkpoint_under_the_same_name_passes_no_event_over() -> None:
    """The name is chosen by the user if Spark does not tell the query's id, as with Spark Connect."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for number in range(3):
            apply(connection, batch("orders", number, number))
        with pytest.raises(SinkError, match="a fresh one begun under the same name") as raised:
            apply(connection, batch("orders", 0, 2, 3, 4))
        assert "start()" in str(raised.value)
        assert apply(connection, batch("orders.anew", 0, 2, 3, 4)) == [token(3), token(4)]


def test_a_sink_that_has_only_empty_batches_takes_what_comes() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        assert apply(connection, batch("orders", 0)) == []
        assert apply(connection, batch("orders", 0, 1)) == [token(1)]


def test_within_a_copy_no_fresh_checkpoint_goes_on() -> None:
    """It went on at the copy's time, which skipped documents that had not been copied. Earlier tests restarted only
    sinks of streams without a copy."""
    start = ClusterTime.of(1_700_000_000, 7)
    copied = [
        bson.decode(snapshot_event(bson.encode({"_id": key}), "shop.c", b"u" * 16, start, None, position=key))
        for key in range(3)
    ]
    tokens = [event["_id"]["_data"] for event in copied]
    inserted = encode_event_token(
        start.tick(),
        version=2,
        txn_op_index=0,
        from_invalidate=False,
        uuid=b"u" * 16,
        identifier=bson.encode({"operationType": "insert", "documentKey": {"_id": {"operationType": "snapshot"}}}),
    )
    event = bson.decode(bson.encode({"_id": RawBSONDocument(inserted)}))["_id"]["_data"]
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE events (token TEXT)")
        connection.commit()
        sink = AppliedBatches(connection, "mine")
        assert apply(connection, MicroBatch("one", 0, Frame(tokens))) == tokens  # type: ignore[arg-type]
        with pytest.raises(SinkError, match="in the middle of a copy"):
            sink.start()
        assert apply(connection, MicroBatch("one", 1, Frame([event]))) == [event]  # type: ignore[arg-type]
        assert sink.start() == {"startAtOperationTime": "1700000000,8"}
