"""A shard's state: where it may begin again, and what it reads."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import bson
import pytest
from bson.binary import Binary
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.witness import DeploymentIdentity
from tailrace.core.plan.profile import SERVER_6_0
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import UsageError
from tailrace.read.images.bucket import ImageStateError
from tailrace.read.images.source import ExactSource
from tailrace.read.source.mongod import MongodSource

UUID = Binary(bytes(range(16)), 4)


def at(increment: int) -> ClusterTime:
    return ClusterTime((100 << 32) | increment)


def entry(op: str, time: int, o: dict[str, Any], o2: dict[str, Any] | None = None) -> tuple[int, bytes]:
    fields = {"op": op, "ns": "shop.orders", "ui": UUID, "o": o, "ts": Timestamp(100, time), "t": 1, "v": 2}
    return time, bson.encode(fields | ({} if o2 is None else {"o2": o2}))


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oplog in memory belongs to no deployment that could be asked for its identity."""
    monkeypatch.setattr("tailrace.read.images.source.identity_if_allowed", lambda client: DeploymentIdentity())


class _Shard:
    """An oplog in memory. ``tail`` gives each entry as a batch and ends."""

    name = "shard0"
    client = None

    def __init__(self, entries: Sequence[tuple[int, bytes]]) -> None:
        self.entries_there = entries
        self.times_read = 0
        self.begins = 0

    def oldest(self) -> tuple[int, int]:
        return int(at(self.begins)), 1

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        there = {at(time): raw for time, raw in self.entries_there}
        return [there.get(time) for time in times]

    def newest(self) -> ClusterTime:
        return max(at(time) for time, _ in self.entries_there)

    def tail(self, after: ClusterTime, **_: Any) -> Generator[OplogBatch, None, None]:
        self.times_read += 1
        for time, raw in self.entries_there:
            if at(time) > after:
                yield OplogBatch(raw, at(time))

    def read(self, after: ClusterTime, until: ClusterTime, **_: Any) -> Generator[OplogBatch, None, None]:
        yield from (batch for batch in self.tail(after) if batch.high_water <= until)


def exact(directory: Path, shard: _Shard) -> ExactSource:
    scope = Scope.of_collection("shop", "orders")
    return ExactSource(cast(MongodSource, shard), directory, scope, SERVER_6_0, of_shard=True)


def images_after(directory: Path, shard: _Shard, after: ClusterTime) -> list[dict[str, Any]]:
    """The pre-images of a stream that begins after ``after``."""
    source = exact(directory, shard)
    try:
        source.begin(after, cast(Any, None))
        source.take_back(after)
        with closing(source.tail(after)) as batches:
            return [bson.decode(image) for batch in batches for image in (batch.images or {}).values()]
    finally:
        source.release()


WRITES = [
    entry("i", 5, {"_id": 1, "count": 1}, {"_id": 1}),
    entry("u", 6, {"$v": 2, "diff": {"u": {"count": 2}}}, {"_id": 1}),
    entry("d", 7, {"_id": 1}),
]
IMAGES = [{"_id": 1, "count": 1}, {"_id": 1, "count": 2}]


def test_a_stream_goes_back_to_before_the_time_at_which_a_shard_joined(tmp_path: Path) -> None:
    """The shard's state began empty with its first reader; the stream stopped, and its token is older than that. (No
    test resumed a stream from before a shard was added.)"""
    shard = _Shard(WRITES)
    joined = exact(tmp_path, shard)
    with closing(joined.tail(at(4))) as batches:
        assert [bson.decode(image) for batch in batches for image in (batch.images or {}).values()] == IMAGES
    assert images_after(tmp_path, shard, at(2)) == IMAGES
    assert images_after(tmp_path, shard, at(1)) == IMAGES  # and once more, from what began at 2
    assert images_after(tmp_path, shard, at(5)) == IMAGES  # later than its beginning: taken back
    assert images_after(tmp_path, shard, at(6)) == IMAGES[1:]


def test_what_a_state_has_learned_is_not_given_up_where_the_oplog_no_longer_has_it(tmp_path: Path) -> None:
    shard = _Shard(WRITES)
    assert images_after(tmp_path, shard, at(4)) == IMAGES
    shard.begins = 5
    with pytest.raises(ImageStateError, match="can be taken back to"):
        images_after(tmp_path, shard, at(2))
    assert images_after(tmp_path, shard, at(6)) == IMAGES[1:]


def test_a_state_that_was_copied_does_not_begin_earlier(tmp_path: Path) -> None:
    """It knew documents at its beginning, which would be lost."""
    source = exact(tmp_path, _Shard(WRITES))
    with source.state.batch(int(at(4))):
        pass
    source.state.settle()
    source.release()
    with pytest.raises(ImageStateError, match="can be taken back to"):
        images_after(tmp_path, _Shard(WRITES), at(2))


def test_a_state_that_no_reader_has_had_reads_from_the_source_it_is_given_last(tmp_path: Path) -> None:
    """The first one may have been interrupted with its reader, which never got to read. (The state was kept.)"""
    first, second = _Shard(WRITES), _Shard(WRITES)
    source = exact(tmp_path, first)
    source.begin(at(4), cast(Any, None))
    source.read_from(cast(MongodSource, second))
    with closing(source.tail(at(4))) as batches:
        list(batches)
    assert (first.times_read, second.times_read > 0) == (0, True)


def test_a_replica_set_does_not_take_the_directory_of_a_cluster(tmp_path: Path) -> None:
    """It wrote its own state there, and the cluster's stream was refused from then on. (Only the other way round was
    tested.)"""
    exact(tmp_path / "shard-a" / "shard0", _Shard(WRITES)).release()
    scope = Scope.of_collection("shop", "orders")
    with pytest.raises(UsageError, match="belong to a sharded cluster"):
        ExactSource(cast(MongodSource, _Shard(WRITES)), tmp_path, scope, SERVER_6_0)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-a"]
