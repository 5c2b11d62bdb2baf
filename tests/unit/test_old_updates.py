"""From 7.0 on an update entry in the old form ends the stream with 6741200, as the server's stream does (measured on
7.0.28); earlier versions show it. No test had one for 7.0."""

from __future__ import annotations

import datetime
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.event.event_block import EventBlock
from tailrace.core.kernel.batch import EVENT, PLAIN, KernelSettings, transform_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.errors import OplogFormatError

UUID = Binary(bytes(16), 4)
SESSION: dict[str, Any] = {"lsid": {"id": UUID, "uid": bytes(32)}, "txnNumber": Int64(1)}
#: The number in the message, and the ``o`` of the update.
REFUSED = {
    "old modifiers": (1, {"$v": 1, "$set": {"a": 1}}),
    "modifiers without $v": (0, {"$set": {"a": 1}, "$unset": {"b": True}}),
    "neither $v nor _id": (0, {"a": 1}),
    "nothing": (0, {}),
}
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("update", {"$v": 2, "diff": {"u": {"a": 1}}}),
    "replacement": ("replace", {"_id": 1, "a": 1}),
}


def entry(number: int, op: str, o: dict[str, Any], **more: Any) -> bytes:
    fields = {"ts": Timestamp(10 + number, 1), "t": Int64(1), "v": Int64(2), "op": op, "ns": "d.c", "ui": UUID}
    wall = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return bson.encode({**fields, "wall": wall, "o": o, "o2": {"_id": 1}, **more})


def inside(number: int, o: dict[str, Any]) -> bytes:
    operations = [{"op": "u", "ns": "d.c", "ui": UUID, "o": o, "o2": {"_id": 1}}]
    return entry(number, "c", {"applyOps": operations}, **SESSION, ns="admin.$cmd")


BEFORE = entry(1, "i", {"_id": 1})
AFTER = entry(3, "d", {"_id": 1})


def events(version: str, entries: list[bytes], kernel: KernelUse) -> tuple[list[str], OplogFormatError | None]:
    """The types of the events, and the error after them."""
    plan = build_plan(StreamOptions.parse(Scope.cluster(), {}), profile_for(version)).start_at(ClusterTime.of(1, 0))
    stream = open_stream(plan, kernel=kernel)
    stream.feed(ONE_OPLOG, OplogBatch(b"".join(entries), ClusterTime.of(99, 1)))
    found: list[str] = []
    try:
        while isinstance(block := stream.next_output(), EventBlock):
            found += [bson.decode(event)["operationType"] for event in block.events()]
    except OplogFormatError as error:
        return found, error
    return found, None


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize("version", ["7.0", "7.0.28"])
@pytest.mark.parametrize("made", [lambda o: entry(2, "u", o), lambda o: inside(2, o)], ids=["alone", "transaction"])
@pytest.mark.parametrize("name", REFUSED)
def test_7_refuses_the_old_form(name: str, made: Any, version: str, kernel: KernelUse) -> None:
    number, o = REFUSED[name]
    found, error = events(version, [BEFORE, made(o), AFTER], kernel)
    assert found == ["insert"]
    assert error is not None
    assert (error.message, error.code) == (f"Unsupported or missing oplog version, $v: {number}", 6741200)
    assert "oplog entry 1970-01-01 00:00:12 UTC (12,1)" in str(error.hint)


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize("made", [lambda o: entry(2, "u", o), lambda o: inside(2, o)], ids=["alone", "transaction"])
def test_what_7_reads_and_what_6_read_is_shown(made: Any, kernel: KernelUse) -> None:
    for kind, o in READ.values():
        for version in ("6.0", "7.0", "7.0.28"):
            assert events(version, [BEFORE, made(o), AFTER], kernel) == (["insert", kind, "delete"], None)
    for _, o in REFUSED.values():
        assert events("6.0", [BEFORE, made(o), AFTER], kernel) == (["insert", "update", "delete"], None)


def test_the_kernel_leaves_exactly_these_to_the_plain_stages() -> None:
    raw = b"".join(entry(number, "u", o) for number, (_, o) in enumerate([*REFUSED.values(), *READ.values()]))
    kinds = transform_batch(raw, KernelSettings(scope=Scope.cluster(), refuses_old_updates=True)).kind.tolist()
    assert kinds == [PLAIN] * len(REFUSED) + [EVENT] * len(READ)
    kinds = transform_batch(raw, KernelSettings(scope=Scope.cluster())).kind.tolist()
    assert kinds == [EVENT] * (len(REFUSED) + len(READ))
