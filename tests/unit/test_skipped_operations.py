"""Entries with an operation that nobody knows give no event, as on the server, and whoever reads the stream is told.

The stages had counted them from the start; the count reached the statistics of a cluster's stream and nobody else."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.cli.main import main
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.pipeline.kernel import KernelUse
from tailrace.pipeline.merge import MergedStream
from tailrace.pipeline.stream import ONE_OPLOG, Stream, open_stream
from tailrace.plan.options import StreamOptions
from tailrace.plan.plan import Plan, build_plan
from tailrace.plan.profile import profile_for
from tailrace.plan.request import OplogBatch
from tailrace.spark.reading import slice_plan


def entry(number: int, operation: str) -> bytes:
    return bson.encode(
        {
            "ts": Timestamp(10 + number, 1),
            "t": Int64(1),
            "v": Int64(2),
            "op": operation,
            "ns": "db.c",
            "ui": Binary(bytes(16), 4),
            "wall": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
            "o": {"_id": number},
            "o2": {"_id": number},
        }
    )


ENTRIES = [entry(number, operation) for number, operation in enumerate(("i", "xi", "i", "km", "xi", "i"))]
SKIPPED = {"xi": 2, "km": 1}


def plan(version: str = "6.0") -> Plan:
    options = StreamOptions.parse(Scope.parse("db.c"), {"startAtOperationTime": Timestamp(1, 1)}, [])
    return build_plan(options, profile_for(version))


def read(stream: Stream, participant: str = ONE_OPLOG, entries: Sequence[bytes] = ENTRIES) -> int:
    """Feed the entries; how many events they give."""
    stream.feed(participant, OplogBatch(b"".join(entries), ClusterTime.of(99, 1)))
    count = 0
    while (out := stream.next_output()) is not None:
        count += len(out)  # type: ignore[arg-type]
    return count


@pytest.mark.parametrize("kernel", ["always", "never"])
def test_a_stream_counts_them(kernel: KernelUse) -> None:
    stream = open_stream(plan(), kernel=kernel)
    assert read(stream) == 3
    assert stream.statistics.unknown_operations == SKIPPED
    merged = MergedStream(plan(), ["a"], kernel=kernel)
    assert read(merged, "a") == 3
    assert merged.statistics.unknown_operations == SKIPPED


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize(
    "more",
    [
        {"lsid": {"id": Binary(bytes(16), 4), "uid": bytes(32)}, "txnNumber": Int64(1)},
        {"lsid": {"id": Binary(bytes(16), 4), "uid": bytes(32)}, "txnNumber": Int64(1), "multiOpType": 1},
        {},
    ],
    ids=["transaction", "retryable writes", "no session"],
)
def test_a_stream_counts_those_inside_an_entry(more: dict[str, Any], kernel: KernelUse) -> None:
    """They were passed over and not counted: the tests had unknown letters in entries of their own alone."""
    held = [bson.decode(one) for one in ENTRIES]
    operations = [{name: one[name] for name in ("op", "ns", "ui", "o", "o2")} for one in held]
    first = bson.decode(entry(9, "c"))
    whole = bson.encode({**first, "ns": "admin.$cmd", "o": {"applyOps": operations}, **more})
    stream = open_stream(plan("8.0"), kernel=kernel)
    assert read(stream, entries=[whole]) == 3
    assert stream.statistics.unknown_operations == SKIPPED


def test_replay_says_so_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "oplog.bson"
    dump.write_bytes(b"".join(ENTRIES))
    command = ["replay", str(dump), "db.c", "--format", "json", "--server-version", "6.0"]
    assert main(command) == 0
    out, said = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert (
        said
        == "tailrace: skipped oplog entries with an operation that this version does not know: 'km' (1), 'xi' (2)\n"
    )
    dump.write_bytes(ENTRIES[0])
    assert main(command) == 0
    assert capsys.readouterr().err == ""


def test_a_worker_of_spark_logs_each_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_plan, "_reported", set())
    stream = open_stream(plan())
    read(stream)
    with caplog.at_level(logging.WARNING, "tailrace.spark"):
        slice_plan.report_skipped(stream)
        slice_plan.report_skipped(stream)
    assert sorted(record.args for record in caplog.records) == [("km",), ("xi",)]
