"""Entries that only a later server writes, under the profile of an earlier one: refused, never ignored.

No test had such entries: each recording was replayed as its own version, and no test had a deployment in the middle of
an upgrade.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core.event.event_block import EventBlock
from tailrace.core.kernel.batch import EVENT, PLAIN, SKIPPED, KernelSettings, transform_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.errors import RESUMABLE_LABEL, LaterEntryError
from tailrace.read.images.fold import ImageFolder
from tailrace.read.images.state import ImageState
from tailrace.read.source.base import OplogSource
from tailrace.read.window.oplogs import OplogMember
from tests.golden import recording
from tests.golden.replay import as_written_by, entry_filter

UUID = Binary(bytes(range(16)), 4)
DELETES = [{"op": "d", "ns": "d.c", "ui": UUID, "o": {"_id": number}} for number in (1, 2)]
SESSION = {"lsid": {"id": UUID, "uid": b"u" * 32}, "txnNumber": Int64(1)}


def entry(number: int, **fields: Any) -> bytes:
    """An entry at second 10 + ``number``."""
    times = {"ts": Timestamp(10 + number, 1), "t": Int64(1), "v": Int64(2)}
    return bson.encode({**fields, **times, "wall": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)})


INSERT = entry(1, op="i", ns="d.c", ui=UUID, o={"_id": 1}, o2={"_id": 1})
BATCHED = entry(2, op="c", ns="admin.$cmd", o={"applyOps": DELETES})
COMMAND = entry(2, op="c", ns="admin.$cmd", o={"applyOps": DELETES, "$db": "admin"})
MULTI = entry(2, op="c", ns="admin.$cmd", o={"applyOps": DELETES}, multiOpType=1, **SESSION)
RETRY_AFTER = entry(3, op="i", ns="d.c", ui=UUID, o={"_id": 3}, o2={"_id": 3})
#: The recordings of 7.0.28 in which a command has removed or changed several documents at once.
HOLD_BATCHED = {f"{name}_7.0.28" for name in ("crafted_entries", "definitions")}
CLUSTER = Scope.cluster()
END = ClusterTime(1 << 62)
"""Every entry is before it."""


def _events(version: str, entries: list[bytes], scope: Scope = CLUSTER, *, kernel: Any) -> int:
    """How many events the entries give, of those that pass the stream's query. Raises what the stream raises."""
    plan = build_plan(StreamOptions.parse(scope, {}), profile_for(version)).start_at(ClusterTime.of(1, 0))
    stream = open_stream(plan, kernel=kernel)
    passes = entry_filter(stream.oplog_filter)
    stream.feed(ONE_OPLOG, OplogBatch(b"".join(filter(passes, entries)), END))
    count = 0
    while (block := stream.next_output()) is not None:
        count += len(block)  # type: ignore[arg-type]
    return count


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize(
    ("version", "later", "proven"),
    [
        *((version, BATCHED, "7.0") for version in ("4.4", "5.0", "6.0")),
        *((version, MULTI, "8.0") for version in ("6.0", "7.0", "7.0.28")),
    ],
)
def test_an_entry_of_a_later_version_ends_an_earlier_ones_stream(
    version: str, later: bytes, proven: str, kernel: str
) -> None:
    for scope in (Scope.cluster(), Scope.of_database("d"), Scope.of_collection("d", "c")):
        with pytest.raises(
            LaterEntryError, match=rf"at .* is an applyOps.*only MongoDB {proven}.*of {version}"
        ) as told:
            _events(version, [INSERT, later, RETRY_AFTER], scope, kernel=kernel)
        assert RESUMABLE_LABEL in told.value.labels
        assert "--server-version" in str(told.value.hint)


@pytest.mark.parametrize("kernel", ["always", "never"])
def test_what_an_earlier_stream_loses_nothing_by_does_not_end_it(kernel: str) -> None:
    assert _events("6.0", [INSERT, BATCHED, MULTI, RETRY_AFTER], Scope.of_database("e"), kernel=kernel) == 0
    assert _events("6.0", [INSERT, COMMAND, RETRY_AFTER], kernel=kernel) == 2
    assert _events("7.0", [INSERT, COMMAND, BATCHED, RETRY_AFTER], kernel=kernel) == 6
    assert _events("8.0", [INSERT, BATCHED, MULTI, RETRY_AFTER], kernel=kernel) == 6


def test_the_kernel_leaves_them_to_the_plain_stages() -> None:
    entries = INSERT + BATCHED + COMMAND + MULTI
    old = KernelSettings(scope=Scope.cluster())
    assert transform_batch(entries, old).kind.tolist() == [EVENT, PLAIN, SKIPPED, PLAIN]
    new = KernelSettings(scope=Scope.cluster(), unwinds_apply_ops_without_session=True, multi_op_is_no_transaction=True)
    assert transform_batch(entries, new).kind.tolist() == [EVENT] * 4


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize("name", [name for name in recording.names() if name.endswith("_7.0.28")])
def test_a_recording_of_7_is_refused_by_6_where_it_would_lose_a_write(name: str, kernel: str) -> None:
    entries = [as_written_by(7, raw) for raw in recording.load(name).oplog]
    lost = [raw for raw in entries if _is_batched(raw)]
    assert bool(lost) == (name in HOLD_BATCHED)
    if lost:
        with pytest.raises(LaterEntryError):
            _events("6.0", lost, kernel=kernel)


def _is_batched(raw: bytes) -> bool:
    decoded = RawBSONDocument(raw)
    if decoded["op"] != "c" or "lsid" in decoded or list(decoded["o"]) != ["applyOps"]:
        return False
    return any(not one["ns"].startswith(("admin.", "config.", "local.")) for one in decoded["o"]["applyOps"])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("version", "is_refused"), [("6.0", True), ("7.0", False), ("8.0", False)])
def test_exact_images_fold_batched_deletes_or_refuse_them(
    tmp_path: Path, version: str, is_refused: bool, compiled: bool
) -> None:
    with closing(ImageState.open(tmp_path / "state", buckets=2, map_bytes=64 << 20)) as state:
        folder = ImageFolder(state, Scope.cluster(), profile_for(version), kernel=lambda size: compiled)
        folder.fold(OplogBatch(INSERT, ClusterTime.of(11, 1)), lambda times: [])
        position = state.position
        batch = OplogBatch(BATCHED, END)
        if is_refused:
            with pytest.raises(LaterEntryError):
                folder.fold(batch, lambda times: [])
            assert state.position == position
        else:
            images = folder.fold(batch, lambda times: [])
            assert [bson.decode(image) for image in images.values()] == [{"_id": 1}]


@pytest.mark.parametrize("kernel", ["always", "never"])
def test_what_comes_before_such_an_entry_is_given(kernel: Any) -> None:
    """In one batch: the plain stages did not give it unless the error was about the entry's format."""
    plan = build_plan(StreamOptions.parse(CLUSTER, {}), profile_for("6.0")).start_at(ClusterTime.of(1, 0))
    stream = open_stream(plan, kernel=kernel)
    stream.feed(ONE_OPLOG, OplogBatch(INSERT + BATCHED + RETRY_AFTER, END))
    block = stream.next_output()
    assert isinstance(block, EventBlock)
    assert len(block) == 1
    with pytest.raises(LaterEntryError):
        stream.next_output()
    assert stream.token.cluster_time == ClusterTime.of(11, 1)


class NoEntries:
    """An oplog that must not be asked for anything."""

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        raise AssertionError(f"the entries at {times} are no part of it")


@pytest.mark.parametrize("version", ["4.4.2", "6.0.27", "7.0.28", "8.0.4"])
def test_tables_hold_what_entries_of_any_version_wrote(version: str) -> None:
    """A writer keeps the version that it has begun with, so it may not matter. The session's earlier writes, which
    ``prevOpTime`` leads to, are entries of their own."""
    member = OplogMember("rs0", cast(OplogSource, NoEntries()), version)
    previous = {"ts": Timestamp(5, 5), "t": Int64(1)}
    linked = entry(2, op="c", ns="admin.$cmd", o={"applyOps": DELETES}, multiOpType=1, prevOpTime=previous, **SESSION)
    for raw in (BATCHED, COMMAND, MULTI, linked):
        found = [(one.operation, bson.decode(one.o or b"")) for one in member.operations(raw)]
        assert found == [("d", {"_id": 1}), ("d", {"_id": 2})]
