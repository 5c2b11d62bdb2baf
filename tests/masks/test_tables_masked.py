"""Masked tables equal their masked collections, and no byte of a masked value is on the disk: after a copy, changes of
all operators, and kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from deltalake import DeltaTable
from pymongo import MongoClient

from tailrace.core.masking import documents
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.lake.tables.resync import request_resync
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.verification import verify
from tailrace.lake.tables.writer import TablesWriter
from tailrace.masks import Masks
from tests.masks.random_updates import SECRET, PlainMasks
from tests.masks.workload import RULES, MarkedWrites, found_in, rules
from tests.tables.equality import in_table, key_of

pytestmark = pytest.mark.mongod
_PLAIN = RULES["{db}.*"]
_ITEMS = "array<struct<sku: int, secret: json, gone: json, n: json>>"
_CHILD = """
import sys
from pathlib import Path
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.masks import Masks
uri, root, pattern, masks = sys.argv[1:]
settings = TableSettings(
    Path(root), (TableRule(pattern, TableSchema(nested=True)),), every_s=0.0, compact_every=2, feed_h=1.0,
    masks=Masks.load(masks)
)
with TablesWriter(uri, settings) as writer:
    print("begun", flush=True)
    writer.run()
"""


@pytest.fixture
def client(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](replica_set.uri) as client:
        yield client


@pytest.fixture
def database(client: MongoClient[Any], request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name.split("[")[0][-50:]
    client.drop_database(name)
    yield name
    client.drop_database(name)


def declared(folder: Path, given: dict[str, dict[str, str]]) -> Path:
    (folder / "mask.key").write_bytes(SECRET + b"\n")
    file = folder / "masks.json"
    file.write_text(json.dumps({"key": {"file": "mask.key"}, "rules": given}))
    return file


def settings(root: Path, database: str, masks: Masks | None, **options: Any) -> TableSettings:
    return TableSettings(root, (TableRule(f"{database}.*", **options),), every_s=0.0, feed_h=1.0, masks=masks)


def assert_masked(root: Path, client: MongoClient[Any], database: str, plain: PlainMasks) -> None:
    """The tables hold what plain Python makes of the collections."""
    for name in client[database].list_collection_names():
        expected = {}
        for one in client[database][name].find():
            masked = plain.document(one)
            expected[key_of(bson.encode({"_id": one["_id"]}))] = masked
        table = in_table(root, f"{database}.{name}")
        assert table is not None
        assert {key: bson.decode(raw) for key, raw in table.items()} == expected


def test_tables_equal_masked_collections_and_no_masked_byte_is_on_the_disk(
    replica_set: ReplicaSet, client: MongoClient[Any], database: str, tmp_path: Path
) -> None:
    masks = Masks.load(declared(tmp_path, rules(database)))
    root, uri, plain = tmp_path / "tables", replica_set.uri, PlainMasks(_PLAIN)
    writes = MarkedWrites(client, database, seed=7)
    writes.open()
    writes.write(60)
    # A declared column that does not fit: the document goes into quarantine.
    columns = {
        "n": "int",
        "items": _ITEMS,
        "card": "struct<number: json, holder: struct<name: json>>",
        "phones": "json",
    }
    strict = settings(root, database, masks, schema=TableSchema.declared(columns, "quarantine"))
    with TablesWriter(uri, strict) as writer:
        writer.run_to_present()
        for _ in range(4):
            writes.write(40)
            writer.run_to_present()
        client[database]["people"].insert_one({"_id": "misfit", "n": "text", **{"email": writes._text()}})
        writer.run_to_present()
        client[database]["people"].delete_one({"_id": "misfit"})
        request_resync(root, f"{database}.others")
        writes.write(20)
        writer.run_to_present()
    assert (root / "_quarantine").is_dir()
    rows = DeltaTable(root / f"{database}.people").to_pyarrow_table(columns=["items", "card"]).to_pylist()
    shown = [item for row in rows for item in row["items"] or () if item is not None]
    assert any(item["secret"] for item in shown), "no masked value is in a struct"
    assert not any(item["gone"] for item in shown)
    assert_masked(root, client, database, plain)
    assert found_in([root]) == []
    for report in verify(root, uri, masks=masks):
        assert report.good
    for other in (None, Masks.of({"rules": {f"{database}.*": {"notes": "drop"}}})):
        with pytest.raises(UsageError, match="masked differently"):
            list(verify(root, uri, masks=other))
        with pytest.raises(UsageError, match="masked differently"):
            TablesWriter(uri, settings(root, database, other)).close()


def test_a_collection_that_is_renamed_is_masked_by_its_new_name(
    replica_set: ReplicaSet, client: MongoClient[Any], database: str, tmp_path: Path
) -> None:
    given = {f"{database}.a": {"x": "hash"}, f"{database}.b": {"y": "hash"}}
    masks, root = Masks.load(declared(tmp_path, given)), tmp_path / "tables"
    client[database]["a"].insert_many([{"_id": number, "x": number, "y": number} for number in range(5)])
    with TablesWriter(replica_set.uri, settings(root, database, masks)) as writer:
        writer.run_to_present()
        client[database]["a"].rename("b")
        client[database]["b"].update_one({"_id": 3}, {"$set": {"x": 7, "y": 8}})
        writer.run_to_present()
    assert_masked(root, client, database, PlainMasks({"y": "hash"}))


@pytest.mark.slow
def test_so_they_do_after_kills(
    replica_set: ReplicaSet, client: MongoClient[Any], database: str, tmp_path: Path
) -> None:
    file = declared(tmp_path, rules(database))
    root, chosen = tmp_path / "tables", random.Random(3)
    writes = MarkedWrites(client, database, seed=8)
    writes.open()
    writes.write(200)
    (tmp_path / "tmp").mkdir()
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, replica_set.uri, str(root), f"{database}.*", str(file)],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "log").open("ab"),
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        ends = time.monotonic() + chosen.random() * 3
        while time.monotonic() < ends:
            writes.write(10)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert found_in([root, tmp_path / "tmp"]) == []
    assert b"MaRkEr" not in (tmp_path / "log").read_bytes()
    nested = settings(root, database, Masks.load(file), schema=TableSchema(nested=True))
    with TablesWriter(replica_set.uri, nested) as writer:
        writer.run_to_present()
    assert_masked(root, client, database, PlainMasks(_PLAIN))
    assert found_in([root, tmp_path / "tmp"]) == []


def test_a_field_that_is_forgotten_is_found(
    replica_set: ReplicaSet,
    client: MongoClient[Any],
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: deltas are applied as they are."""
    monkeypatch.setattr(documents.DocumentMask, "update", lambda mask, change: change)
    masks, root = Masks.load(declared(tmp_path, rules(database))), tmp_path / "tables"
    collection = client[database]["people"]
    collection.insert_one({"_id": 1, "email": "MaRkEr"})
    with TablesWriter(replica_set.uri, settings(root, database, masks)) as writer:
        writer.run_to_present()
        assert found_in([root]) == []
        collection.update_one({"_id": 1}, {"$set": {"email": "MaRkEr again"}})
        writer.run_to_present()
    assert found_in([root]) != []
