"""How what a shard's reader has read ahead is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch, PreImageKey
from tailrace.read.source import shard_reader
from tailrace.read.source.shard_reader import ShardReader

_PATIENCE_S = 60.0
_IMAGES = {PreImageKey(bytes(16), ClusterTime(3), 0): b"image"}


class _Source:
    """In place of a ``MongodSource``: an oplog that comes in these batches and then ends."""

    trouble = clock_document = None

    def __init__(self, batches: Sequence[OplogBatch]) -> None:
        self._batches = batches

    def wait_until_reachable(self) -> None: ...

    def expect_present_version(self) -> None: ...

    def tail(self, after: ClusterTime, **options: Any) -> Iterator[OplogBatch]:
        yield from self._batches

    def interrupt(self) -> None: ...


def given(batches: Sequence[OplogBatch]) -> list[OplogBatch]:
    """What a reader gives that had read everything before it was asked."""
    source: Any = _Source(batches)
    reader = ShardReader(
        "shard0", source, ClusterTime(0), threading.Condition(), await_ms=250, batch_size=None, comment=None
    )
    assert reader.join(_PATIENCE_S)
    taken = []
    while (batch := reader.next_batch()) is not None:
        taken.append(batch)
    assert not reader.has_batch
    return taken


def test_batches_that_wait_are_given_together() -> None:
    """Each was given by itself, and no test had a reader that is ahead at the end of the oplog: images were then looked
    up entry by entry."""
    read = [OplogBatch(b"%d" % number, ClusterTime(number)) for number in range(1, 5)]
    assert given([*read, OplogBatch(b"", ClusterTime(9))]) == [OplogBatch(b"1234", ClusterTime(9))]
    assert given(read[:1]) == read[:1]


def test_a_batch_with_exact_images_stays_alone() -> None:
    plain = [OplogBatch(b"%d" % number, ClusterTime(number)) for number in range(1, 7)]
    read = [*plain[:2], plain[2]._replace(images=_IMAGES), *plain[3:]]
    assert given(read) == [OplogBatch(b"12", ClusterTime(2)), read[2], OplogBatch(b"456", ClusterTime(6))]


def test_no_more_are_joined_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that shards take turns; the queue has room again for what was taken."""
    monkeypatch.setattr(shard_reader, "_PIECE_BYTES", 5)
    read = [OplogBatch(b"ab", ClusterTime(number)) for number in range(1, 6)]
    read.append(OplogBatch(b"a long one", ClusterTime(7)))
    expected = [b"abab", b"abab", b"ab", b"a long one"]
    found = given(read)
    assert [batch.raw for batch in found] == expected
    assert [batch.high_water for batch in found] == [ClusterTime(number) for number in (2, 4, 5, 7)]
