"""Entries that no server writes, in a real oplog, read by each version's own streams and by ours. The golden recording
of broken entries is of 6.0 only, reads each entry only with expanded events, and has no chain that points forward.

Not on 4.4: a mongod 4.4.2 ends where an entry older than its oldest timestamp is written, and no later version that
would take it opens its files."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
from bson.int64 import Int64
from bson.timestamp import Timestamp

import tailrace
from tailrace.cli.main import main
from tailrace.cli.run_skipped import SkippedOperations
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.reading import slice_plan
from tailrace.lake.spark.reading.slice_reader import slice_events
from tailrace.read.source.mongod import MongodSource
from tests.amounts import WHOLE
from tests.differential.compare import Bench, Case
from tests.differential.execute import note
from tests.differential.native import aggregate, read
from tests.differential.ours import SourceOplog, read_into_memory
from tests.differential.wire import Wire
from tests.golden.crafted import BROKEN, GAP_S, HARMLESS, apply_ops, insert, placed, write
from tests.golden.replay import OurStream

pytestmark = pytest.mark.mongod

_FORWARD = apply_ops(
    {"op": "i", "ns": "gr.c", "ui": insert(1)["ui"], "o": {"_id": 1}, "o2": {"_id": 1}},
    prevOpTime={"ts": Timestamp(2**31 - 1, 1), "t": Int64(1)},
)
#: A stream must begin with an entry that is whole: the server parses the first one apart.
_ENTRIES = [
    HARMLESS,
    BROKEN["collMod without o2"],
    HARMLESS,
    BROKEN["dropIndexes without o2"],
    insert(1),
    HARMLESS,
    _FORWARD,
    HARMLESS,
    insert(2),
]


@pytest.mark.parametrize("version", ["6.0.27", pytest.param("5.0.4", marks=pytest.mark.slow)])
def test_definitions_without_o2_and_a_chain_that_leads_forward(version: str, tmp_path: Path) -> None:
    with ReplicaSet(version=version, data_dir=tmp_path) as deployment, Wire.to(deployment.uri) as wire:
        before = note(wire, "the gap begins")
        time.sleep(GAP_S)
        end = note(wire, "the gap ends")
        member = deployment.members[0]
    write(member, placed(_ENTRIES, before), version="6.0.27" if version == "5.0.4" else None)
    expected = {False: (2, [286])}
    if version == "6.0.27":
        expected[True] = (2, [8, 8, 286])
    with ReplicaSet(version=version, data_dir=tmp_path) as deployment, Wire.to(deployment.uri) as wire:
        source = MongodSource(deployment.uri)
        memory = read_into_memory(wire, source, ClusterTime(before - 1), end)
        bench = Bench(wire, memory, SourceOplog(source), version, end)
        for expanded, (events, codes) in expected.items():
            # make test-landing takes each scope once for either kind of events, alternately from memory and live.
            for number, scope in enumerate((("gr", "c"), ("gr", None), ("admin", None))):
                for live in (False, True) if WHOLE else ((number + expanded) % 2 == 0,):
                    shown = {"showExpandedEvents": True} if expanded else {}
                    stage = {"startAtOperationTime": before.to_timestamp(), **shown}
                    result = bench.compare(Case(scope, stage, live=live))
                    assert result.difference is None
                    assert result.equal_events == events
                    assert [error.code for error in result.errors_met] == codes
        source.close()


_NO_OP = {"op": "n", "ns": "gr.c", "ui": insert(1)["ui"], "o": {"msg": "crafted"}}
#: A shard that gets its first chunk of a collection, as servers up to 6.0 write it, and in 7.0's form. Only a stream
#: with ``needsMerge`` shows them.
_NEW_SHARDS = [
    insert(1),
    {**_NO_OP, "o2": {"type": "migrateChunkToNewShard", "from": "sh0", "to": "sh1"}},
    {**_NO_OP, "o2": {"migrateChunkToNewShard": "gr.c", "fromShardId": "sh0", "toShardId": "sh1"}},
    {**_NO_OP, "o2": {"migrateChunkToNewShard": "gr.c", "fromShardId": "sh1", "toShardId": "sh2"}, "fromMigrate": True},
    {**_NO_OP, "ns": "gr.d", "o2": {"migrateChunkToNewShard": "gr.d", "fromShardId": "sh0", "toShardId": "sh1"}},
    {**_NO_OP, "o2": {"reshardBegin": "gr.c", "reshardingUUID": insert(1)["ui"]}},
    insert(2),
]
_NEW_SHARD_NAMES = {"6.0.27": b"kNewShardDetected", "7.0.28": b"migrateChunkToNewShard"}


# Of 7.0 tests/golden/test_sharded_recordings.py has merged streams of a cluster whose chunks move.
@pytest.mark.parametrize("version", ["6.0.27", pytest.param("7.0.28", marks=pytest.mark.slow)])
def test_a_part_of_a_merged_stream_tells_of_new_shards(version: str, tmp_path: Path) -> None:
    """The entries were recorded on 7.0.28 for streams without ``needsMerge`` alone, which show none of them."""
    with ReplicaSet(version=version, data_dir=tmp_path) as deployment, Wire.to(deployment.uri) as wire:
        before = note(wire, "the gap begins")
        time.sleep(GAP_S)
        end = note(wire, "the gap ends")
        member = deployment.members[0]
    write(member, placed(_NEW_SHARDS, before))
    seen = 0
    with (
        ReplicaSet(version=version, data_dir=tmp_path) as deployment,
        Wire.to(deployment.uri) as wire,
        closing(MongodSource(deployment.uri)) as source,
    ):
        memory = read_into_memory(wire, source, ClusterTime(before - 1), end)
        oplogs = (memory, SourceOplog(source))
        for merging in ({}, {"fromMongos": True, "needsMerge": True}):
            for shown in ({}, {"showExpandedEvents": True}, {"showMigrationEvents": True}):
                for scope in (("gr", "c"), ("gr", None), ("admin", None)):
                    stage = {"startAtOperationTime": before.to_timestamp(), **shown}
                    database, command = aggregate(scope, stage, server=version)
                    native = read(wire, database, {**command, **merging}, end)
                    for oplog, kernel in product(oplogs, ("always", "never")):
                        ours = OurStream(oplog, database, {**command, **merging}, server=version, kernel=kernel)
                        ours.advance(end)
                        assert (ours.error, ours.events) == (native.error, native.events), (merging, shown, scope)
                    named = sum(_NEW_SHARD_NAMES[version] in event for event in native.events)
                    assert bool(named) == bool(merging)
                    seen += named
    assert seen == {"6.0.27": 9, "7.0.28": 27}[version]


@pytest.mark.parametrize(
    "version", ["6.0.27", *(pytest.param(one, marks=pytest.mark.slow) for one in ("5.0.4", "6.0.27 in a run"))]
)
def test_entries_of_unknown_kinds_are_skipped_and_told_of(
    version: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The counts had been tested only with streams that are fed: no test checked that they get through a live reader to
    the statistics, the command line and the log of Spark's workers. ``tailrace run`` reports them too; in ``make
    test-landing`` the reader of its log stands for it."""
    version, _, runs = version.partition(" ")
    unknown = [insert(7) | {"op": operation} for operation in ("xi", "km", "xi")]
    unknown.append({**_NO_OP, "op": "c", "ns": "gr.$cmd", "o": {"mergeCollections": "c"}})
    unknown.append({**_NO_OP, "o2": {"moveRange": "gr.c"}})
    with ReplicaSet(version=version, data_dir=tmp_path) as deployment, Wire.to(deployment.uri) as wire:
        before = note(wire, "the gap begins")
        time.sleep(GAP_S)
        end = note(wire, "the gap ends")
        member = deployment.members[0]
    entries = placed([HARMLESS, insert(1), *unknown, insert(2)], before)
    write(member, entries, version="6.0.27" if version == "5.0.4" else None)
    start = before.to_timestamp()
    with ReplicaSet(version=version, data_dir=tmp_path) as deployment, Wire.to(deployment.uri) as wire:
        source = MongodSource(deployment.uri)
        memory = read_into_memory(wire, source, ClusterTime(before - 1), end)
        bench = Bench(wire, memory, SourceOplog(source), version, end)
        result = bench.compare(Case(("gr", "c"), {"startAtOperationTime": start}, live=True))
        if version == "5.0.4":  # docs/reference/differences.md
            assert result.difference is not None
            assert "Enumeration value 'xi'" in result.difference.server
            assert result.equal_events == 1
        else:
            assert (result.difference, result.equal_events) == (None, 2)

        with tailrace.connect(deployment.uri) as client:
            stream = client.gr.c.watch(start_at_operation_time=start, max_await_time_ms=100)
            assert [next(stream)["documentKey"]["_id"] for _ in range(2)] == [1, 2]
            assert stream.statistics.unknown_operations == _UNKNOWN
            stream.close()

        at = f"{start.time},{start.inc}"
        watch = ["watch", deployment.uri, "gr.c", "--format", "json", "--start-at-operation-time", at, "--until", "2"]
        assert main(watch) == 0
        out, said = capsys.readouterr()
        assert len(out.splitlines()) == 2
        assert said.splitlines()[-1] == (
            "tailrace: skipped oplog entries of kinds that this version does not know: "
            "'command mergeCollections' (1), 'km' (1), 'no-op moveRange' (1), 'xi' (2)"
        )
        # With the oplog query that a $match makes, the kinds are reported all the same.
        with tailrace.connect(deployment.uri) as client:
            match = [{"$match": {"operationType": "insert", "fullDocument.x": 5}}]
            stream = client.gr.c.watch(match, start_at_operation_time=start, max_await_time_ms=100)
            assert [next(stream)["documentKey"]["_id"] for _ in range(2)] == [1, 2]
            assert stream.statistics.unknown_operations == _UNKNOWN
            stream.close()

        monkeypatch.setattr(slice_plan, "_reported", set())
        slice_ = OplogSlice(ClusterTime(before - 1), end, version, 1, None)
        with caplog.at_level(logging.WARNING, "tailrace.spark"):
            told_by_workers(deployment.uri, slice_, source, caplog, tmp_path)
        source.close()
        if runs:
            tell_of_skipped_entries_in_a_pipeline(deployment.uri, at, tmp_path)


_UNKNOWN = {"xi": 2, "km": 1, "command mergeCollections": 1, "no-op moveRange": 1}


def told_by_workers(
    uri: str, slice_: OplogSlice, source: MongodSource, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    options = parse({"uri": uri, "database": "gr", "collection": "c"})
    assert sum(len(block) for block in slice_events(options, slice_, source)) == 2
    told = [record for record in caplog.records if record.name == "tailrace.spark"]
    assert sorted((record.args for record in told), key=str) == sorted([(kind,) for kind in _UNKNOWN], key=str)
    log = folder / "spark.log"
    log.write_text("".join(f"{record.getMessage()}\n" for record in told))
    assert sorted(SkippedOperations(log).look()) == sorted(_UNKNOWN)


def tell_of_skipped_entries_in_a_pipeline(uri: str, at: str, folder: Path) -> None:
    """The workers' log goes to a file that `tailrace run` removes at its end, so nobody read it there."""
    settings = {"uri": uri, "database": "gr", "collection": "c", "startAtOperationTime": at}
    pipeline = folder / "pipeline.yaml"
    pipeline.write_text(json.dumps({"source": settings, "lake": {"path": str(folder / "lake")}}))
    command = [sys.executable, "-m", "tailrace", "run", str(pipeline), "--available-now"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "2 events" in done.stderr
    for kind in _UNKNOWN:
        words = f"tailrace: oplog entries of the kind '{kind}' are skipped: this version does not know it"
        assert done.stderr.count(words) == 1
