"""``tailrace run`` with masks: a lake and tables hold what plain Python makes of the server's events and collections,
and no byte of a masked value is on the disk, not even in quarantine."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest

from tailrace.cli.main import main
from tailrace.core.masking import events
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.lake.spark.query.options import parse
from tests.masks.random_updates import SECRET, PlainMasks
from tests.masks.workload import MARK, RULES, MarkedWrites, found_in, rules
from tests.spark.commands import PATIENCE_S, finished, tailrace
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
_PLAIN = {**RULES["{db}.*"], "bad": "hash"}
#: A stage that fails at an event whose value is not a number, with a message that quotes the value.
_FAILING = [{"$match": {"$expr": {"$ne": [{"$toInt": {"$ifNull": ["$fullDocument.bad", "1"]}}, 0]}}}]
_IMAGES = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}


def pipeline_file(folder: Path, database: str, more: str = "") -> Path:
    (folder / "mask.key").write_bytes(SECRET)
    path = folder / "pipeline.yaml"
    given = {pattern: {**paths, "bad": "hash"} for pattern, paths in rules(database).items()}
    path.write_text(
        f"source: {{uri: '${{TEST_URI}}', database: {database}, startingFrom: oldest, showExpandedEvents: true, "
        f"fullDocument: whenAvailable, fullDocumentBeforeChange: whenAvailable, pipeline: {json.dumps(_FAILING)}}}\n"
        f"lake: {{path: disk/lake, onError: quarantine}}\n"
        f"tables: {{path: disk/tables, collections: '{database}.*', changeFeed: 1 hour}}\n"
        "spark: {cores: 2, config: {spark.sql.shuffle.partitions: 2}}\n"
        f"masks: {{key: {{file: mask.key}}, rules: {json.dumps(given)}}}\n{more}"
    )
    return path


def write(client: Any, database: str, writes: MarkedWrites, count: int) -> None:
    writes.write(count)
    client[database]["people"].insert_one({"bad": f"{MARK} is no number"})


def native(uri: str, database: str, start: Any, until: Any) -> list[bytes]:
    """The server's own events, except those that go into quarantine."""
    pipeline = {"$match": {"fullDocument.bad": {"$exists": False}}}
    stage = {"showExpandedEvents": True, **_IMAGES}
    return server_events(uri, (database, None), start, until, stage=stage, pipeline=(pipeline,))


def assert_masked(lake: Path, expected: list[bytes]) -> None:
    plain = PlainMasks(_PLAIN)
    found = [bson.decode(event) for event in lake_events(lake)]
    assert [one["_id"] for one in found] == [bson.decode(one)["_id"] for one in expected]
    for event, raw in zip(found, expected, strict=True):
        assert event == plain.event(bson.decode(raw))


def test_a_lake_and_tables_hold_masked_values_alone(
    tailrace_run: Any, replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, path, uri = "lakemasked", pipeline_file(tmp_path, "lakemasked"), replica_set.uri
    start = newest(uri)
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client.drop_database(database)
        writes = MarkedWrites(client, database, seed=1)
        writes.open()
        write(client, database, writes, 80)
        code, _, err = tailrace_run(path, "--available-now", uri=uri)
        assert code == 0, err
        write(client, database, writes, 40)
        until = newest(uri)
        code, _, err = tailrace_run(path, "--available-now", uri=uri)
        assert code == 0, err
    assert_masked(tmp_path / "disk" / "lake", native(uri, database, start, until))
    assert len(list((tmp_path / "disk" / "lake" / "_quarantine").rglob("*.parquet"))) > 0
    assert found_in([tmp_path / "disk"]) == []
    text = path.read_text()
    path.write_text(text.replace('"notes": "drop"', '"notes": "hash"'))
    code, _, err = tailrace_run(path, "--available-now", uri=uri)
    assert (code, "masked differently" in err) == (1, True), err
    path.write_text(text)
    (tmp_path / "mask.key").write_bytes(b"another key, which is long enough too")
    code, _, err = tailrace_run(path, "--available-now", uri=uri)
    assert (code, "masked differently" in err) == (1, True), err
    assert "another key" not in err


@pytest.mark.parametrize(
    ("planted", "update"),
    [("_described", True), ("_field", False), ("masked_block", False)],
    ids=["update-descriptions", "documents", "blocks"],
)
def test_what_is_forgotten_is_found(
    planted: str, update: bool, replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults, in a read as a lake's tasks do it."""
    from tailrace.lake.spark.reading import masked
    from tailrace.lake.spark.reading.slice_reader import read_slice
    from tailrace.lake.spark.source.batch_reader import TailraceBatchReader

    uri, database = replica_set.uri, "lakeplanted"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        start = newest(uri)
        client[database]["c"].insert_one({"_id": 1, "email": "plain" if update else MARK})
        client[database]["c"].update_one({"_id": 1}, {"$set": {"email": MARK if update else "other"}})
        until = newest(uri)
        client.drop_database(database)
    masks = {"rules": {f"{database}.*": {"email": "drop"}}}
    options = {
        "uri": uri,
        "database": database,
        "masks": json.dumps(masks),
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "endAtOperationTime": f"{until.seconds},{until.increment}",
    }
    parsed = parse(options)

    def holds() -> bool:
        slices: Any = TailraceBatchReader(parsed).partitions()
        rows = [row for one in slices for batch in read_slice(parsed, one) for row in batch.to_pylist()]
        assert len(rows) == 2
        return MARK in str(rows)

    assert not holds()
    if planted == "masked_block":
        monkeypatch.setattr(masked, "masked_block", lambda masks, block: block)
    else:
        monkeypatch.setattr(events, planted, lambda *_: None)
    assert holds()


@pytest.mark.slow
def test_no_masked_byte_is_on_the_disk_after_kills(replica_set: ReplicaSet, tmp_path: Path) -> None:
    database, uri, chosen = "lakemaskedkilled", replica_set.uri, random.Random(5)
    path = pipeline_file(tmp_path, database, "trigger: {every: 200 milliseconds}\n")
    (tmp_path / "tmp").mkdir()
    there = {"TEST_URI": uri, "TMPDIR": str(tmp_path / "tmp"), "SPARK_LOCAL_DIRS": str(tmp_path / "tmp")}
    start, stop = newest(uri), threading.Event()
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client.drop_database(database)
        writes = MarkedWrites(client, database, seed=2)
        writes.open()

        def work() -> None:
            while not stop.wait(0.05):
                write(client, database, writes, 5)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(4):
                process = tailrace("run", str(path), "--progress", "json", own_group=True, **there)
                assert process.stdout is not None
                assert process.stdout.readline()
                time.sleep(chosen.random() * 6)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert found_in([tmp_path / "disk", tmp_path / "tmp"]) == []
        finally:
            stop.set()
            worker.join()
        until = newest(uri)
    watchdog = threading.Timer(PATIENCE_S, process.kill)
    process = tailrace("run", str(path), "--available-now", **there)
    watchdog.start()
    code, _, err = finished(process)
    watchdog.cancel()
    assert code == 0, err
    assert_masked(tmp_path / "disk" / "lake", native(uri, database, start, until))
    assert found_in([tmp_path / "disk", tmp_path / "tmp"]) == []


def test_what_does_not_go_together_with_masks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"uri": "mongodb://127.0.0.1:1", "masks": json.dumps({"rules": {"a.b": {"x": "drop"}}})}
    for stage in (
        {"$set": {"y": "$fullDocument.x"}},
        {"$addFields": {"y": 1}},
        {"$project": {"y": "$fullDocument.x"}},
        {"$project": {"fullDocument": {"y": "$fullDocument.x"}}},
        {"$replaceRoot": {"newRoot": "$fullDocument"}},
        {"$replaceWith": "$fullDocument"},
        {"$redact": "$$KEEP"},
        {"$changeStreamSplitLargeEvent": {}},
        {"$unset": "documentKey.x"},
        {"$project": {"ns.coll": 0}},
    ):
        with pytest.raises(UsageError, match="mask"):
            parse({**base, "pipeline": json.dumps([stage])})
    for stage in (
        {"$match": {"fullDocument.x": 1}},
        {"$project": {"fullDocument.x": 0}},
        {"$unset": ["updateDescription"]},
    ):
        assert parse({**base, "pipeline": json.dumps([stage])}).masks is not None
    with pytest.raises(UsageError, match="exact images"):
        parse({**base, "fullDocument": "exact", "images": str(tmp_path)})
    monkeypatch.setenv("TEST_URI", "mongodb://127.0.0.1:1")
    path = pipeline_file(tmp_path, "refused", "archive: {path: kept}\n")
    assert main(["run", str(path)]) == 1
    assert "masks and archive cannot be used together" in capsys.readouterr().err
