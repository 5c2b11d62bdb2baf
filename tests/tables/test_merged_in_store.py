"""Tables that are merged on read, in an object store: killed, cut off and restored at each of their steps.

``test_object_store.py`` has tables whose files are rewritten, ``test_merge_on_read.py`` those on a disk.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaProtocolError

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.lake.spark.tables import read as read_with_spark
from tailrace.lake.store import delta
from tailrace.lake.tables.deletion_vector import vector_of
from tailrace.lake.tables.holding import mark_for_rebuilding
from tailrace.lake.tables.live_files import files_at
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.verification import verify
from tailrace.lake.tables.writer import TablesWriter
from tailrace.masks import Masks
from tests import commands
from tests.masks.random_updates import SECRET as MASK_KEY
from tests.masks.workload import MarkedWrites, found_in, rules
from tests.patience import PATIENCE_S
from tests.server_in_use import SERVER_VERSION
from tests.tables.equality import in_collection
from tests.tables.object_server import ObjectServer, held_in
from tests.tables.test_equality import equal_after
from tests.tables.test_object_store import assert_equal, brought_up, collection, settings_of
from tests.tables.unkind_proxy import Fault, UnkindProxy

pytestmark = pytest.mark.mongod
__all__ = ["collection"]

MERGED: dict[str, Any] = {"merge_on_read": True, "grace_h": 0.0}
_CHILD = """
import json, sys
from pathlib import Path
from tailrace.base.object_place import object_place
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
uri, place, state, database, options = sys.argv[1:]
root = object_place(place, beside=Path(state), options=json.loads(options))
settings = TableSettings(root, (TableRule(f"{database}.*"),), every_s=0.0, merge_on_read=True, grace_h=0.0)
with TablesWriter(uri, settings) as writer:
    writer.run_to_present()
"""


def change(collection: Any, turn: int) -> None:
    """Change rows of all files, so that files are merged after most turns."""
    rng = random.Random(turn)
    collection.insert_many([{"_id": turn * 10 + number, "turn": turn} for number in range(10)])
    changed = [one for one in range(turn * 10 + 10) if rng.random() < 0.2]
    collection.update_many({"_id": {"$in": changed}}, {"$inc": {"n": 1}})
    collection.delete_one({"_id": turn * 10 + 5})


def versions(root: ObjectPlace, collection: Any) -> list[int]:
    return delta.commits_in(place_of(root, collection.full_name))


_COMMIT, _FILE = r"PUT \d{20}\.json", r"PUT [0-9a-f]{32}-.*\.parquet"
_POINTS = [
    *((one, number) for one in (_COMMIT, _FILE) for number in (1, 2)),  # the second ones are those of a merge
    (r"PUT \d{20}\.checkpoint\.parquet", 1),
    ("PUT _last_checkpoint", 1),
    *(("(POST|DELETE) .*", number) for number in (2, 3, 5)),  # the first one ends what a start tries
]


class Killing:
    """A proxy that kills a process at one of its requests, before or after the store gets it."""

    def __init__(self) -> None:
        self._wanted, self._left, self._after = "", 0, False
        self._begun = threading.Event()
        self._pid = 0

    def run(self, wanted: str, number: int, *arguments: str, after: bool) -> bool:
        """Run the writer, and kill it at the ``number``th request that is ``wanted``. Returns whether it had one."""
        self._wanted, self._left, self._after = wanted, number, after
        self._begun.clear()
        command = commands.Command(*arguments, code=_CHILD, stderr=2)
        self._pid = command.pid
        self._begun.set()
        ended = command.wait(PATIENCE_S)
        self._wanted = ""
        assert ended == (0 if self._left else -signal.SIGKILL)
        return not self._left

    def __call__(self, number: int, method: str, path: str) -> Fault | None:
        if not self._wanted or not self._left:
            return "cut" if self._wanted else None
        self._left -= bool(re.fullmatch(self._wanted, f"{method} {path.partition('?')[0].rpartition('/')[2]}"))
        if self._left:
            return None
        assert self._begun.wait(PATIENCE_S)
        os.kill(self._pid, signal.SIGKILL)
        return None if self._after else "cut"


@pytest.mark.parametrize("points", [_POINTS[:1], pytest.param(_POINTS[1:], marks=pytest.mark.slow)], ids=["one", "all"])
def test_a_writer_that_is_killed_at_a_request(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    points: Sequence[tuple[str, int]],
) -> None:
    """In a store each request is a step: the process is killed before and after those of commits, merges, checkpoints
    and removals. The other tests of kills had no merge of deleted rows, nor a request between two steps."""
    straight = object_store.place(prefix, tmp_path / "state")
    killing, turns = Killing(), iter(range(10_000))
    with UnkindProxy(object_store.address, killing) as proxy:
        options = json.dumps(object_store.options(proxy.address))
        where = (replica_set.uri, object_store.uri(prefix), str(tmp_path / "state"), collection.database.name, options)
        for wanted, number in points:
            for after in (False, True):
                for _ in range(24):  # not each run has a checkpoint, or a merge
                    change(collection, next(turns))
                    if killing.run(wanted, number, *where, after=after):
                        break
                else:
                    raise AssertionError(f"no run had {wanted}, {number} times")
                if len(points) > 1:
                    brought_up(replica_set.uri, straight, collection, **MERGED)
                    assert_equal(straight, collection)
    brought_up(replica_set.uri, straight, collection, **MERGED)
    assert_equal(straight, collection)
    assert "is rewritten" not in caplog.text


@pytest.mark.slow  # with files that are rewritten, test_object_store.py
@pytest.mark.parametrize("fault", ["slow down", "cut", "lost", "too many"])
def test_a_bad_day(  # noqa: PLR0917
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, fault: Fault
) -> None:
    """Every fourth request goes wrong, whatever it is, and so does the first try to write each object."""
    tried: set[str] = set()

    def chosen(number: int, method: str, path: str) -> Fault | None:
        is_first = method == "PUT" and path not in tried
        tried.update([path] if method == "PUT" else ())
        return fault if is_first or number % 4 == 0 else None

    straight = object_store.place(prefix, tmp_path / "state")
    numbers = []
    with UnkindProxy(object_store.address, chosen) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        for turn in range(12):  # so that there is a checkpoint
            change(collection, turn)
            brought_up(replica_set.uri, root, collection, **MERGED)
            assert_equal(straight, collection)
            numbers.append(versions(straight, collection)[-1])
        assert proxy.faults[fault] > 10
    assert all(1 <= after - before <= 2 for before, after in pairwise(numbers)), "a commit or a merge was written twice"


@pytest.mark.slow  # with files that are rewritten, test_object_store.py
def test_a_store_that_does_not_answer_is_no_damage(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever in a run the store goes away, the run ends with an error that says so, or leaves out what can wait, and
    the next one goes on."""
    away = never = 1 << 30
    kind: Fault = "cut"
    straight = object_store.place(prefix, tmp_path / "state")
    ended = 0
    with UnkindProxy(object_store.address, lambda number, *_: kind if number >= away else None) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address, retry_s=0.0)
        change(collection, 0)
        brought_up(replica_set.uri, root, collection, **MERGED)
        for turn in range(1, 80):
            change(collection, turn)
            kind = ("cut", "lost")[turn % 2]
            away = proxy.requests + turn
            try:
                brought_up(replica_set.uri, root, collection, **MERGED)
                assert_equal(straight, collection)
            except StoreAwayError:
                ended += 1
            away = never
            if turn % 7 == 0:
                brought_up(replica_set.uri, root, collection, **MERGED)
                assert_equal(straight, collection)
        brought_up(replica_set.uri, root, collection, **MERGED)
    # Not through the proxy: its threads wait while deltalake's query engine holds Python's lock.
    assert_equal(straight, collection)
    assert ended > 20
    assert "is rewritten" not in caplog.text


def test_readers_of_a_store(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """By the page's calls, with the store's keys; readers without deletion vectors refuse it and name them."""
    root = object_store.place(prefix, tmp_path / "state")
    for turn in range(3):
        change(collection, turn)
        brought_up(replica_set.uri, root, collection, merge_on_read=True)
    collection.delete_one({})  # too few rows for a merge
    brought_up(replica_set.uri, root, collection, merge_on_read=True)
    folder, truth = place_of(root, collection.full_name), in_collection(collection)
    uri, options = folder.as_uri(), object_store.options()
    assert any(file.gone for file in files_at(folder, delta.commits_in(folder)[-1]))
    table = DeltaTable(uri, storage_options=options)
    found = [
        QueryBuilder().register("t", table).execute("SELECT _key, _bson FROM t").read_all(),
        polars.scan_delta(uri, storage_options=options).select("_key", "_bson").collect().to_arrow(),
    ]
    for one in map(pa.table, found):
        assert dict(zip(one.column("_key").to_pylist(), one.column("_bson").to_pylist(), strict=True)) == truth
    for refused in (table.to_pyarrow_dataset, table.to_pandas):
        with pytest.raises(DeltaProtocolError, match="deletionVectors"):
            refused()
    with pytest.raises(UsageError, match="in an object store"):
        read_with_spark(None, uri)  # type: ignore[arg-type]


@pytest.mark.slow  # with files that are rewritten, test_object_store.py
@pytest.mark.parametrize("step", ["table.uploaded", "table.commit", "tables.done", "table.compacted"])
def test_another_writer_takes_over(  # noqa: PLR0917
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, step: str
) -> None:
    """Before, after and between a commit and its merge. What the first one still writes only moves rows, or is
    refused."""
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    taken, told = list[str](), list[str]()

    def take(at: str) -> None:
        if at == step and not taken:
            taken.append(at)
            brought_up(replica_set.uri, other, collection, take_over=True, **MERGED)

    for turn in range(3):
        with TablesWriter(replica_set.uri, settings_of(one, collection, take_over=True, **MERGED)) as writer:
            writer.run_to_present()
            taken.clear()
            durable.observe_steps(take)
            try:
                for number in range(9):  # not each of them merges files
                    change(collection, 9 * turn + number)
                    writer.run_to_present()
            except SinkError as error:
                told.append(error.message)
            finally:
                durable.observe_steps(None)
        assert len(told) == turn + 1, "it did not see the other one"
        brought_up(replica_set.uri, other, collection, take_over=True, **MERGED)
        assert_equal(other, collection)
        [report] = verify(other, replica_set.uri, [collection.full_name])
        assert report.good


@pytest.mark.parametrize(
    ("storage", "changes"),
    [("i", False), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("i", True), ("u", False), ("u", True)))],
)
def test_a_deletion_vector_of_another_program(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    storage: str,
    changes: bool,
) -> None:
    """Whatever the commit claims to be, it deletes rows: the writer took such a commit for a merge, and `verify`
    compared the version before it. In tests, other programs' commits had no vectors, or none that a writer
    encountered."""
    root = object_store.place(prefix, tmp_path / "state")
    for turn in range(2):
        change(collection, turn)
        brought_up(replica_set.uri, root, collection, **MERGED)
    folder = place_of(root, collection.full_name)
    number = delta.commits_in(folder)[-1]
    file = max(files_at(folder, number), key=lambda one: one.rows or 0)
    vector = vector_of(np.array([0, 1]))
    if storage == "u":  # of a file that is not there
        vector |= {"storageType": "u", "pathOrInlineDv": "0" * 20, "offset": 1}
    actions = [
        delta.commit_info(1, "DELETE", {}, ours={}),
        delta.remove(file.path, {}, file.size, 1, changes=changes, vector=file.vector),
        delta.add(file.path, {}, file.size, 1, changes=changes, stats=file.stats, vector=vector),
    ]
    delta.commit_path(folder, number + 1).create(delta.content_of(actions, ascii_only=False))
    [report] = verify(root, replica_set.uri, [collection.full_name])
    assert report.faults == [f"another program has changed it: version {number + 1} is not one of Tailrace's"]
    change(collection, 2)
    with pytest.raises(SinkError, match=rf"another program has changed the table .*\(version {number + 1}\)"):
        brought_up(replica_set.uri, root, collection, **MERGED)
    mark_for_rebuilding(root, collection.full_name)
    brought_up(replica_set.uri, root, collection, **MERGED)
    assert_equal(root, collection)
    [report] = verify(root, replica_set.uri, [collection.full_name])
    assert report.good


@pytest.mark.slow  # documents of another size, through the same code
@pytest.mark.parametrize("fault", ["lost", "cut"])
def test_large_documents(  # noqa: PLR0917
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, fault: Fault
) -> None:
    """Its files are sent in parts; each request fails the first time, including each part and each completion of an
    upload."""
    tried: set[str] = set()

    def chosen(number: int, method: str, path: str) -> Fault | None:
        is_first = method in ("PUT", "POST") and path not in tried
        tried.update([path])
        return fault if is_first else None

    rng = random.Random(1)
    with UnkindProxy(object_store.address, chosen) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        for turn in range(4):
            value = rng.randbytes(7_000_000)  # more would not fit into the cache of the tests' servers
            collection.replace_one({"_id": turn % 2}, {"_id": turn % 2, "v": value}, upsert=True)
            collection.insert_many([{"_id": 10 + 10 * turn + number} for number in range(10)])
            brought_up(replica_set.uri, root, collection, **MERGED)
        assert any("partNumber" in one or "comp=block" in one for one in tried), "it was sent in one part"
    straight = object_store.place(prefix, tmp_path / "state")
    assert_equal(straight, collection)
    [report] = verify(straight, replica_set.uri, [collection.full_name])
    assert report.good


@pytest.mark.slow  # on a disk, tests/masks/test_tables_masked.py
def test_no_object_has_a_byte_of_a_masked_value(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """Neither do the local folder's files, nor any object that existed for a time. With bounds of columns in the log, a
    change feed and a quarantine."""
    database, client = collection.database.name, collection.database.client
    (tmp_path / "mask.key").write_bytes(MASK_KEY + b"\n")
    (tmp_path / "masks.json").write_text(json.dumps({"key": {"file": "mask.key"}, "rules": rules(database)}))
    masks, root = Masks.load(tmp_path / "masks.json"), object_store.place(prefix, tmp_path / "state")
    writes = MarkedWrites(client, database, seed=7)
    writes.open()
    client[database]["people"].insert_one({"_id": "misfit", "n": "text", "email": writes._text()})
    seen = tmp_path / "seen"
    schema = TableSchema.declared({"n": "int", "email": "string", "phones": "json"}, "quarantine")
    rule = TableRule(f"{database}.*", schema, z_order=("email", "n"))
    settings = TableSettings(root, (rule,), every_s=0.0, merge_on_read=True, grace_h=0.0, feed_h=1.0, masks=masks)
    for _ in range(6):
        writes.write(40)
        with TablesWriter(replica_set.uri, settings) as writer:
            writer.run_to_present()
        for name, content in held_in(root).items():
            path = seen / name.replace("!", "~")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    assert list((seen / "_quarantine").glob("*.parquet"))
    marked = [one for one in seen.rglob("*.json") if b"deletionVector" in one.read_bytes()]
    assert marked
    assert found_in([seen, tmp_path / "state"]) == []
    for report in verify(root, replica_set.uri, masks=masks):
        assert report.good


@pytest.mark.slow  # with files that are rewritten, test_object_store.py
@pytest.mark.parametrize("seed", [9104, 9105])
def test_random_steps(replica_set: ReplicaSet, object_store: ObjectServer, tmp_path: Path, seed: int) -> None:
    root = object_store.place(f"random-{seed}", tmp_path / "state")
    assert equal_after(replica_set.uri, root, seed, 150, SERVER_VERSION, merges=True) == 5
