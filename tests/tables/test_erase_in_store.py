"""Deleted documents, erased from tables in an object store: no byte of them is left below the prefix or in the state,
even if the erasure is killed at any step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.cli.main import main
from tailrace.core.event.named_document import NamedDocument, NamedDocuments
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.tables.erasure import erase_documents
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.tables.equality import in_collection, in_table
from tests.tables.object_server import ObjectServer, held_in
from tests.tables.test_erase import MARKER
from tests.traces import traces

pytestmark = pytest.mark.mongod


@pytest.fixture
def collection(replica_set: ReplicaSet) -> Iterator[Any]:
    with MongoClient[Any](replica_set.uri, w="majority") as client:  # before 5.0 a write does not wait for that
        client.drop_database("tables_erase_in_store")
        yield client["tables_erase_in_store"]["people"]
        client.drop_database("tables_erase_in_store")


def settings_of(root: Any, collection: Any, **more: Any) -> TableSettings:
    schema = TableSchema.declared({"name": "string", "n": "int"})
    rule = TableRule(collection.full_name, schema=schema, z_order=("name",))
    return TableSettings(root, (rule,), every_s=0.0, compact_every=0, feed_h=1.0, **more)


def brought_up(uri: str, root: Any, collection: Any, **more: Any) -> None:
    with TablesWriter(uri, settings_of(root, collection, **more)) as writer:
        writer.run_to_present()


def left_in(root: ObjectPlace, state: Path, copy: Path) -> list[str]:
    """Where the marker is, in the store or in the state."""
    for name, content in held_in(root).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    return [*traces(copy, MARKER.encode()), *traces(state, MARKER.encode())]


def deployment_of(root: ObjectPlace) -> str:
    return str(json.loads((root / "_tailrace" / "owner.json").read_bytes())["deployment"])


def ended_at(number: int) -> Callable[[str], None]:
    left = iter(range(number))

    def observe(name: str) -> None:
        if name.startswith(("tables", "state")) and next(left, None) is None:
            raise KeyboardInterrupt

    return observe


@pytest.mark.parametrize("merge_on_read", [False, True])
def test_what_is_gone_at_the_source_leaves_no_byte(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    merge_on_read: bool,
) -> None:
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    state = tmp_path / "state"
    root, uri = object_store.place(prefix, state), replica_set.uri
    collection.insert_many([{"_id": number, "name": f"p{number}", "n": number} for number in range(20)])
    collection.insert_one({"_id": "anna", "name": MARKER, "n": 1})
    brought_up(uri, root, collection, merge_on_read=merge_on_read)
    collection.update_one({"_id": "anna"}, {"$set": {"n": f"no number: {MARKER}"}})
    collection.update_one({"_id": 3}, {"$set": {"n": "no number"}})
    brought_up(uri, root, collection, merge_on_read=merge_on_read)
    where = object_store.uri(prefix)
    erase = ["erase", "--document", collection.full_name, '"anna"', "--tables", where, "--state", str(state)]
    assert main(erase) == 1  # it is still there
    collection.delete_one({"_id": "anna"})
    brought_up(uri, root, collection, merge_on_read=merge_on_read)
    before, owner = held_in(root), deployment_of(root)
    assert main([*erase, "--dry-run"]) == 1
    assert held_in(root) == before
    assert main([*erase[:-1], str(tmp_path / "other")]) == 1  # no state is there
    assert len(left_in(root, state, tmp_path / "before")) > 3
    status = 130
    for number in range(30):
        durable.observe_steps(ended_at(number))
        try:
            status = main(erase)
        finally:
            durable.observe_steps(None)
        if status != 130:
            break
    assert status == 0
    assert number > 2
    assert left_in(root, state, tmp_path / "after") == []
    table, truth = in_table(root, collection.full_name), in_collection(collection)
    assert table is not None
    assert len(truth.keys() - table.keys()) == 1, "the one in quarantine"
    assert all(truth[key] == document for key, document in table.items())
    assert deployment_of(root) == owner != ""
    assert main(["tables", "verify", uri, where, "--state", str(state)]) == 0
    collection.update_one({"_id": 3}, {"$set": {"n": 3}})
    brought_up(uri, root, collection, merge_on_read=merge_on_read)
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_a_writer_that_runs_is_replaced(
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
) -> None:
    """A copy of the state may erase, which the writer with the state notices; no other state may."""
    state = tmp_path / "state"
    root = object_store.place(prefix, state)
    collection.insert_many([{"_id": 1, "name": MARKER}, {"_id": 2}])
    brought_up(replica_set.uri, root, collection)
    collection.delete_one({"_id": 1})
    documents = NamedDocuments([NamedDocument(collection.full_name, bson.encode({"_id": 1}))])
    with TablesWriter(replica_set.uri, settings_of(root, collection)) as writer:
        writer.run_to_present()
        with pytest.raises(SinkError, match="another process writes"):
            erase_documents(root, documents)
        shutil.copytree(state, tmp_path / "copy")
        copied = object_store.place(prefix, tmp_path / "copy")
        erase_documents(copied, documents)
        collection.insert_one({"_id": 3})
        with pytest.raises(SinkError, match="another writer has taken over"):
            writer.run_to_present()
    with pytest.raises(SinkError, match="a copy of this state"):
        brought_up(replica_set.uri, root, collection)
    assert left_in(root, tmp_path / "copy", tmp_path / "read") == []
