"""Entries of unknown kinds give no event, as on the server, and the reader of the stream is told.

The stages had always counted operation letters, but the count only reached the statistics of a cluster's stream.
Unknown commands, and no-ops of unknown forms, were ignored and not counted: no test had any."""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.act.consumer import metrics as consumer_metrics
from tailrace.cli.compare import _remarks
from tailrace.cli.main import main
from tailrace.cli.run_skipped import SkippedOperations
from tailrace.core.expression import compile_stages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry_kinds import PASSED_OVER
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.merge import MergedStream
from tailrace.core.stream.stream import ONE_OPLOG, Stream, open_stream
from tailrace.errors import OplogFormatError
from tailrace.lake.spark.reading import slice_plan
from tailrace.read.archive.columns import record_batch
from tailrace.read.archive.metrics import ArchiveCollector
from tailrace.read.archive.unknown import UnknownEntries
from tailrace.read.archive.writer import ArchiveProgress
from tailrace.read.source import unknown_kinds
from tailrace.watch.compare.comparison import Compared
from tailrace.watch.compare.seen import SeenEvents
from tailrace.watch.gateway import stage_process


@pytest.fixture(autouse=True)
def nothing_passed_over() -> Iterator[None]:
    """The tally of this process is as the other tests expect it."""
    PASSED_OVER.clear()
    yield
    PASSED_OVER.clear()


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
    assert said == "tailrace: skipped oplog entries of kinds that this version does not know: 'km' (1), 'xi' (2)\n"
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


# -- commands and no-ops -----------------------------------------------------------------------------------------------


def command(number: int, body: dict[str, Any], *, namespace: str = "db.$cmd", **more: Any) -> bytes:
    return bson.encode({**bson.decode(entry(number, "c")), "ns": namespace, "o": body, "o2": {}, **more})


def no_op(number: int, announced: dict[str, Any] | None, *, namespace: str = "db.c", **more: Any) -> bytes:
    whole = {**bson.decode(entry(number, "n")), "ns": namespace, "o": {"msg": "x"}, **more}
    del whole["o2"]
    return bson.encode(whole if announced is None else {**whole, "o2": announced})


UNKNOWN_KINDS = [
    (command(0, {"mergeCollections": "c", "with": "d"}), "command mergeCollections"),
    (command(0, {"truncateRange": "db.c", "minRecordId": 1}), "command truncateRange"),
    (command(0, {"mergeDatabases": 1}), "command mergeDatabases"),
    (command(0, {"merge": "c", "create": "d"}), "command merge"),
    (command(0, {"a" * 99: 1}), "command " + "a" * 40),
    (command(0, {"two\nlines": 1}), "command two\\u000alines"),
    (no_op(0, {"moveRange": "db.c"}), "no-op moveRange"),
    (no_op(0, {"reshardingUUID": 1, "type": "reshardPause"}), "no-op reshardPause"),
    (no_op(0, {"type": 1}), "no-op type"),
    (entry(0, "cd"), "cd"),
]
#: Known kinds, and entries that do not concern the stream.
KNOWN_KINDS = [
    command(0, {"startIndexBuild": "c", "indexes": []}),
    command(0, {"abortIndexBuild": "c", "indexes": []}),
    command(0, {"dbCheck": "db.c", "type": "batch"}),
    command(0, {"emptycapped": "c"}),
    command(0, {"create": "d"}),
    command(0, {"commitTransaction": 2}),
    command(0, {"abortTransaction": 1}, namespace="admin.$cmd"),
    command(0, {"mergeCollections": "c"}, namespace="other.$cmd"),
    command(0, {"mergeCollections": "d"}),
    command(0, {"truncateRange": "db.d"}),
    command(0, {"mergeDatabases": 1}, fromMigrate=True),
    command(0, {}),
    no_op(0, None),
    no_op(0, {}),
    no_op(0, {"type": "reshardFinalOp", "reshardingUUID": 1}),
    no_op(0, {"sessionMigrateCloneStart": "db.c"}),
    no_op(0, bson.decode(entry(5, "u"))),
    no_op(0, {"$incompleteOplogHistory": 1}),
    no_op(0, {"migrateLastChunkFromShard": "db.c"}),
    no_op(0, {"moveRange": "db.d"}, namespace="db.d"),
    bson.encode({**bson.decode(entry(0, "cd")), "ns": "db.d"}),
]


def counted(entries: Sequence[bytes], kernel: KernelUse, version: str = "6.0") -> dict[str, int]:
    stream = open_stream(plan(version), kernel=kernel)
    assert read(stream, entries=entries) == 0
    return dict(stream.statistics.unknown_operations)


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize(("raw", "kind"), UNKNOWN_KINDS, ids=[kind for _, kind in UNKNOWN_KINDS])
def test_each_unknown_kind_is_counted_by_its_name(raw: bytes, kind: str, kernel: KernelUse) -> None:
    assert counted([raw, raw], kernel) == {kind: 2}


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize("version", ["4.4", "5.0", "6.0", "7.0.28", "8.0"])
@pytest.mark.parametrize("raw", KNOWN_KINDS, ids=lambda raw: str(bson.decode(raw).get("o2") or bson.decode(raw)["o"]))
def test_known_kinds_without_an_event_are_not_counted(raw: bytes, version: str, kernel: KernelUse) -> None:
    assert counted([raw], kernel, version) == {}


@pytest.mark.parametrize(
    ("name", "since"), [("reshardBegin", "7.0"), ("migrateChunkToNewShard", "7.0"), ("moveChunk", "8.0")]
)
def test_an_announcement_in_the_form_of_a_later_version_is_unknown(name: str, since: str) -> None:
    raw = no_op(0, {name: "db.c", "reshardingUUID": Binary(bytes(16), 4)})
    assert counted([raw], "always") == {f"no-op {name}": 1}
    stream = open_stream(plan(since), kernel="always")
    read(stream, entries=[raw])
    assert stream.statistics.unknown_operations == {}


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize(
    "announced",
    [
        {"createDatabasePrepare": "db", "primaryShard": "shard1", "isImported": False},
        {"createDatabase": "db", "isImported": False},
        {"shards": ["shard0"], "shardCollectionPrepare": "db.c", "shardKey": {"_id": 1}},
        {"movePrimary": "db"},
    ],
    ids=lambda one: next(iter(one)),
)
def test_what_a_7_0_cluster_announces_is_known(announced: dict[str, Any], kernel: KernelUse) -> None:
    """``shards`` was reported as unknown for each collection that was sharded. Tests had followed 7.0.28's clusters
    only with collections that were sharded earlier."""
    assert counted([no_op(0, announced)], kernel, "7.0") == {}
    kind = "shardCollectionPrepare" if "shards" in announced else next(iter(announced))
    assert counted([no_op(0, announced)], kernel, "6.0") == {f"no-op {kind}": 1}


@pytest.mark.parametrize("kernel", ["always", "never"])
def test_unknown_commands_inside_of_an_entry_are_counted_once(kernel: KernelUse) -> None:
    """One that is read for its other operations, and one that the server would not read at all."""
    unknown = {"op": "c", "ns": "db.$cmd", "o": {"mergeDatabases": 1}}
    written = {"op": "i", "ns": "db.c", "ui": Binary(bytes(16), 4), "o": {"_id": 1}, "o2": {"_id": 1}}
    session = {"lsid": {"id": Binary(bytes(16), 4), "uid": bytes(32)}, "txnNumber": Int64(1)}
    for held, events in (([unknown, written], 1), ([unknown, unknown], 0)):
        whole = command(3, {"applyOps": held}, namespace="admin.$cmd", **session)
        stream = open_stream(plan("7.0"), kernel=kernel)
        assert read(stream, entries=[whole]) == events
        assert stream.statistics.unknown_operations == {"command mergeDatabases": held.count(unknown)}


def test_what_is_told_apart_is_bounded() -> None:
    found = counted([command(number, {f"merge{number}": 1}) for number in range(300)], "never")
    assert len(found) == 101
    assert found["others"] == 200


MATCHES: list[dict[str, Any]] = [
    {},
    {"operationType": "insert"},
    {"operationType": "drop"},
    {"fullDocument.a": 1, "ns.coll": "c"},
]


@pytest.mark.parametrize("scope", ["db.c", "db", None])
@pytest.mark.parametrize("match", MATCHES, ids=str)
def test_the_oplog_query_lets_them_through_whatever_the_match_says(match: dict[str, Any], scope: str | None) -> None:
    """With any ``$match`` on operations, the oplog query left them out, so that nobody could count them."""
    stages = [{"$match": match}] if match else []
    options = StreamOptions.parse(Scope.parse(scope), {"startAtOperationTime": Timestamp(1, 1)}, stages)
    pipeline = open_stream(build_plan(options, profile_for("7.0")))
    query = bson.encode({"$match": RawBSONDocument(pipeline.oplog_filter or bson.encode({}))})
    passes = compile_stages([query])
    session = {"lsid": {"id": Binary(bytes(16), 4), "uid": bytes(32)}, "txnNumber": Int64(1)}
    inside = {"op": "c", "ns": "db.$cmd", "o": {"mergeDatabases": 1}}
    held = command(0, {"applyOps": [inside]}, namespace="admin.$cmd", **session)
    wanted = [raw for raw, kind in UNKNOWN_KINDS if kind != "command merge"]  # it has a known one's field, and no name
    for raw in (*wanted, held):
        assert passes.apply(raw) is not None, bson.decode(raw)
    if match:
        assert passes.apply(command(0, {"dbCheck": "db.c"})) is None
        assert passes.apply(no_op(0, bson.decode(entry(5, "u")))) is None


ODD_UPDATE = bson.encode({**bson.decode(entry(1, "u")), "o": {"$v": 3, "diff": {"u": {"a": 1}}}})


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize("version", ["7.0", "8.0"])
def test_an_update_in_a_form_that_nobody_knows_is_refused(version: str, kernel: KernelUse) -> None:
    stream = open_stream(plan(version), kernel=kernel)
    with pytest.raises(OplogFormatError, match=r"Unsupported or missing oplog version, \$v: 3") as refused:
        read(stream, entries=[ODD_UPDATE])
    assert refused.value.code == 6741200
    assert refused.value.hint == "At oplog entry 1970-01-01 00:00:11 UTC (11,1)"


@pytest.mark.parametrize("kernel", ["always", "never"])
@pytest.mark.parametrize("version", ["4.4", "5.0", "6.0"])
def test_where_the_server_shows_it_so_do_we_and_it_is_told(version: str, kernel: KernelUse) -> None:
    """6.0.27 shows a delta of ``$v: 3`` as an update that changes nothing. So did we, and said nothing."""
    known = [
        bson.encode({**bson.decode(ODD_UPDATE), "o": o}) for o in ({"$v": 1, "$set": {"a": 1}}, {"$set": {"a": 1}})
    ]
    stream = open_stream(plan(version), kernel=kernel)
    assert read(stream, entries=[ODD_UPDATE, *known]) == 3
    assert stream.statistics.unknown_operations == {"update $v 3, shown as an old one": 1}


# -- who is told -------------------------------------------------------------------------------------------------------


def test_the_log_of_a_process_says_each_kind_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_kinds, "_told", set())
    monkeypatch.setattr(unknown_kinds, "PASSED_OVER", Counter())
    with caplog.at_level(logging.WARNING, "tailrace"):
        for kinds in ({}, {"xi": 1}, {"xi": 5, "command new": 1}, {"xi": 5, "command new": 1}):
            unknown_kinds.PASSED_OVER.update(kinds)
            unknown_kinds.tell_of_unknown_kinds()
    assert [record.getMessage() for record in caplog.records] == [
        f"oplog entries of the kind '{kind}' give no correct event: this version of Tailrace does not know it"
        for kind in ("xi", "command new")
    ]


def test_what_any_stream_of_the_process_counts_is_counted_for_its_metrics() -> None:
    for kernel in ("always", "never"):
        counted([UNKNOWN_KINDS[0][0], no_op(0, {"moveRange": "db.c"})], kernel)  # type: ignore[arg-type]
    assert PASSED_OVER == {"command mergeCollections": 2, "no-op moveRange": 2}


def test_a_listeners_metrics_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_metrics, "PASSED_OVER", Counter({"command new": 3}))
    families = {
        family.name: family
        for family in consumer_metrics.ListenerCollector(
            [], lag=lambda _: pytest.fail("there is no listener")
        ).collect()
    }
    [sample] = families["tailrace_listener_unknown_entries"].samples
    assert (sample.name, sample.labels, sample.value) == (
        "tailrace_listener_unknown_entries_total",
        {"kind": "command new"},
        3,
    )


def test_an_archive_counts_them_and_keeps_them() -> None:
    known = [raw for raw in KNOWN_KINDS if bson.decode(raw)["ns"] != "db.d"]
    found = UnknownEntries("6.0.27")
    found.saw(record_batch(b"".join([*ENTRIES, *known])))
    found.saw(record_batch(b"".join(raw for raw, _ in UNKNOWN_KINDS)))
    expected = Counter(kind for _, kind in UNKNOWN_KINDS) + Counter(SKIPPED)
    # One oplog for all: what a stream of db.c is not told of is another one's, which makes an event of one more too.
    expected += Counter({"command mergeCollections": 2, "command truncateRange": 1})
    del expected["command merge"]
    assert found.counts == expected
    written = SimpleNamespace(statistics=lambda: {"rs0": ArchiveProgress(unknown=found.counts)})
    families = {family.name: family for family in ArchiveCollector(written).collect()}  # type: ignore[arg-type]
    samples = families["tailrace_archive_unknown_entries"].samples
    assert {sample.labels["kind"]: sample.value for sample in samples} == dict(expected)


def test_a_process_of_the_gateways_stages_tells_what_it_has_counted_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_process, "PASSED_OVER", tally := Counter({"xi": 2}))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGPROF, signal.SIGUSR1)}
    ours, theirs = socket.socketpair()
    control, told = os.pipe()
    step = stage_process.Begin(1, "db", bson.encode({"aggregate": 1, "pipeline": 7}), 0, "6.0", False, 1)
    data = pickle.dumps(stage_process.WorkerRequest((), (), step))
    monkeypatch.setattr(stage_process, "_limit_cpu", lambda seconds: None)
    process = stage_process.StageProcess(theirs, control)
    try:
        for _ in range(2):
            ours.sendall(stage_process.LENGTH.pack(len(data)) + data)
        ours.shutdown(socket.SHUT_WR)
        counts = []
        plain = process._stepped

        def stepped(*given: Any) -> Any:
            tally["command new"] += 1
            return plain(*given)

        monkeypatch.setattr(process, "_stepped", stepped)
        process.serve()
        for _ in range(2):
            size = stage_process.LENGTH.unpack(ours.recv(stage_process.LENGTH.size, socket.MSG_WAITALL))[0]
            counts.append(pickle.loads(ours.recv(size, socket.MSG_WAITALL)).passed_over)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for one in (ours, theirs):
            one.close()
        os.close(control)
        os.close(told)
    assert counts == [{"xi": 2, "command new": 1}, {"command new": 1}]


def test_compare_names_them() -> None:
    compared = Compared(SeenEvents(keeps_names=True), unknown_operations=Counter({"xi": 1, "command new": 2}))
    assert list(_remarks(compared)) == [
        "oplog entries of unknown kinds, which give no event here: 'command new': 2, 'xi': 1"
    ]


def test_a_pipelines_log_is_read_for_every_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pattern wanted letters without a space."""
    log = tmp_path / "spark.log"
    stream = open_stream(plan())
    odd = "it's new"
    read(stream, entries=[command(0, {odd: 1}), no_op(1, {"moveRange": 1})])
    slice_plan._reported.clear()
    with caplog.at_level(logging.WARNING, "tailrace.spark"):
        slice_plan.report_skipped(stream)
    log.write_text("".join(f"WARN {record.getMessage()}\n" for record in caplog.records))
    assert sorted(SkippedOperations(log).look()) == [f"command {odd}", "no-op moveRange"]
