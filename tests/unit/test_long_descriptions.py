"""Updates whose description is far longer than their oplog entry: bounded while it is made, in the plain stages and in
the kernel. The size of an event used to be checked only once it was made."""

from __future__ import annotations

import tracemalloc
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.update_description import describe_update
from tailrace.core.kernel.batch import PLAIN, KernelSettings, transform_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.request import Emit, OplogBatch
from tailrace.errors import ServerError

UI = Binary(uuid.UUID(int=7).bytes, 4)
PATH = "p" * 60_000
#: Taking more than this for one entry of 300 kB would mean that there is no bound; the server's own limit is 64 MiB.
_MEMORY_MAX = 400 << 20


def _names(count: int) -> list[str]:
    return [f"f{number:06d}" for number in range(count)]


def _update(section: dict[str, Any], path: str = PATH) -> dict[str, Any]:
    return {"$v": 2, "diff": {f"s{path}": section}}


def _entry(o: dict[str, Any], number: int = 1) -> bytes:
    return bson.encode(
        {
            "op": "u",
            "ns": "d.c",
            "ui": UI,
            "o": o,
            "o2": {"_id": number},
            "ts": Timestamp(9, number),
            "t": Int64(1),
            "wall": datetime(2026, 1, 1),
        }
    )


def _set(count: int, path: str = PATH) -> dict[str, Any]:
    return _update({"u": dict.fromkeys(_names(count), 2)}, path)


def _peak(call: Any) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _code(o: dict[str, Any], *, disambiguated_paths: bool = False) -> int | None:
    try:
        describe_update(bson.encode(o), disambiguated_paths=disambiguated_paths)
    except ServerError as error:
        return error.code
    return None


@pytest.mark.parametrize(("path_size", "last"), [(60_000, 1117), (59_997, 1117), (3_000, 22_032)])
def test_too_many_updated_fields_are_refused_at_the_servers_field(path_size: int, last: int) -> None:
    """The edges are those of 6.0.27: up to them 10334, from the event's size, after them 16490."""
    path = "p" * path_size
    assert _code(_set(last, path)) is None
    assert _code(_set(last + 1, path)) == 16490


_BOMBS: dict[str, tuple[dict[str, Any], int]] = {
    "updated": (_set(20_000), 16490),
    "inserted": (_update({"i": dict.fromkeys(_names(20_000), 2)}), 16490),
    "items of an array": (_update({"a": True, **{f"u{index}": 2 for index in range(20_000)}}), 16490),
    "removed": (_update({"d": dict.fromkeys(_names(20_000), False)}), 13548),
    "truncated": (_update({f"s{name}": {"a": True, "l": 2} for name in _names(20_000)}), 13548),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", _BOMBS)
@pytest.mark.parametrize("disambiguated_paths", [False, True])
def test_a_bomb_is_refused_while_it_is_made(kind: str, disambiguated_paths: bool) -> None:
    o, code = _BOMBS[kind]
    found, peak = _peak(lambda: _code(o, disambiguated_paths=disambiguated_paths))
    assert found == code
    assert peak < _MEMORY_MAX


def test_the_kernel_leaves_a_bomb_to_the_plain_stages_before_its_buffer_grows() -> None:
    raw = b"".join(_entry(_set(20_000), number) for number in range(1, 4))
    made, peak = _peak(lambda: transform_batch(raw, KernelSettings(Scope.cluster())))
    assert made.kind.tolist() == [PLAIN] * 3
    assert peak < _MEMORY_MAX


def test_the_kernels_buffer_is_bounded_where_every_event_is_allowed() -> None:
    raw = b"".join(_entry(_set(250), number) for number in range(1, 41))  # 15 MB each
    made, peak = _peak(lambda: transform_batch(raw, KernelSettings(Scope.cluster())))
    assert 0 < made.kind.tolist().count(PLAIN) < 40
    assert made.events.size < _MEMORY_MAX
    assert peak < 2 * _MEMORY_MAX


def _emitted(entries: list[bytes]) -> Iterator[list[ChangeEvent]]:
    plan = build_plan(StreamOptions.parse(Scope.of_collection("d", "c"), {})).start_at(ClusterTime.of(1, 1))
    pipeline = ChangeStreamPipeline(plan)
    for request in pipeline.process(OplogBatch(b"".join(entries), ClusterTime.of(9, 99))):
        assert isinstance(request, Emit)
        yield request.events


def test_the_plain_stages_give_long_events_on_before_they_make_more() -> None:
    entries = [_entry(_set(250), number) for number in range(1, 13)]
    seen, peak = _peak(lambda: [[event.cluster_time.increment for event in some] for some in _emitted(entries)])
    assert [number for some in seen for number in some] == list(range(1, 13))
    assert max(len(some) for some in seen) <= 3
    assert peak < _MEMORY_MAX


def test_what_stands_before_a_bomb_is_given_before_its_error() -> None:
    emitted = _emitted([_entry(_set(2), 1), _entry(_set(20_000), 2), _entry(_set(2), 3)])
    assert [event.cluster_time.increment for event in next(emitted)] == [1]
    with pytest.raises(ServerError, match="Tried to make oversized document") as caught:
        next(emitted)
    assert caught.value.code == 16490
