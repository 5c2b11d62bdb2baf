"""Tables in a real object store: equal, whatever stores and networks do, or refused."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base.object_place import StoreAwayError
from tailrace.base.store_probe import check_store
from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError, SinkError
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.versions import Keeping
from tailrace.lake.tables.writer import TablesWriter
from tests import commands
from tests.amounts import amount
from tests.server_in_use import SERVER_VERSION
from tests.tables.equality import in_collection, in_table
from tests.tables.object_server import SECRET, ObjectServer, held_in, put_back
from tests.tables.test_equality import equal_after
from tests.tables.unkind_proxy import Fault, UnkindProxy

pytestmark = pytest.mark.mongod

#: The least number of requests of a run that changes one table.
REQUESTS = 85


@pytest.fixture
def collection(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.node.name.split("[")[0][-40:]
    with MongoClient[Any](replica_set.uri, w="majority") as client:  # before 5.0 a write does not wait for that
        client.drop_database(name)
        yield client[name]["Things"]
        client.drop_database(name)


def settings_of(root: Any, collection: Any, **more: Any) -> TableSettings:
    return TableSettings(
        root, (TableRule(f"{collection.database.name}.*"),), every_s=0.0, **{"compact_every": 0} | more
    )


def brought_up(uri: str, root: Any, collection: Any, **more: Any) -> ClusterTime:
    with TablesWriter(uri, settings_of(root, collection, **more)) as writer:
        return writer.run_to_present()


def change(collection: Any, turn: int) -> None:
    collection.insert_many([{"_id": turn * 10 + number, "turn": turn} for number in range(10)])
    collection.update_one({"_id": turn}, {"$set": {"n": turn}})
    collection.delete_one({"_id": turn * 10 + 5})


def commands_fail_at(place: str, uri: str, store: ObjectServer, folder: Path) -> None:
    """An archive's three commands, at a place in a bucket that does not exist."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment().items():
            patch.setenv(name, value)
        assert main(["archive", uri, place, "--state", str(folder / "a"), "--once"]) == 1
        assert main(["archive", "status", place]) == 1
        assert main(["replay", place]) == 1


def assert_equal(root: Any, collection: Any) -> None:
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_tables_equal_their_collections(replica_set: ReplicaSet, object_store: ObjectServer, tmp_path: Path) -> None:
    root = object_store.place("equal", tmp_path / "state")
    assert equal_after(replica_set.uri, root, 9101, amount(10, 150), SERVER_VERSION) == 5
    everything = b"".join(
        [*held_in(root).values(), *(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())]
    )
    assert SECRET.encode() not in everything
    assert not list((tmp_path / "state" / "uploads").iterdir())


def test_every_command(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    where = [object_store.uri(f"{prefix}/a/b"), "--state", str(tmp_path / "state")]
    root = object_store.place(prefix, tmp_path / "state")
    root = root / "a" / "b"
    namespace, uri = collection.full_name, replica_set.uri
    truths = []
    for turn in range(4):
        change(collection, turn)
        assert main(["tables", "write", uri, *where, f"{collection.database.name}.*", "--once"]) == 0
        truths.append((stated(capsys.readouterr().err), in_collection(collection)))
        assert_equal(root, collection)
    assert main(["tables", "status", *where]) == 0
    assert f"{namespace}: version 3, 36 rows" in capsys.readouterr().out
    for moment, truth in truths:
        assert main(["tables", "as-of", *where, namespace, moment]) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(truth)
    assert main(["tables", "compact", *where]) == 0
    assert main(["tables", "expire", *where, "--keep", "0s"]) == 0
    assert_equal(root, collection)
    assert main(["tables", "rebuild", *where, namespace]) == 0
    assert main(["tables", "resync", *where, namespace]) == 0
    assert main(["tables", "write", uri, *where, f"{collection.database.name}.*", "--once"]) == 0
    assert main(["tables", "verify", uri, *where]) == 0
    assert "equal at" in capsys.readouterr().out
    name = next(file.name for file in CollectionTable(place_of(root, namespace), namespace).files())
    (place_of(root, namespace) / name).unlink()
    assert main(["tables", "verify", uri, *where]) == 1
    assert main(["tables", "status", where[0]]) == 2
    assert main(["tables", "status", f"s3://tester:{SECRET}@tests/a", "--state", "x"]) != 0
    text = capsys.readouterr()
    assert "need --state" in text.err
    assert SECRET not in text.err + text.out


def stated(text: str) -> str:
    return text.split("cluster time ")[1].split(maxsplit=1)[0]


def test_earlier_states_and_what_is_removed(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    times = []
    for turn in range(3):
        change(collection, turn)
        times.append((brought_up(replica_set.uri, root, collection), in_collection(collection)))
    for moment, truth in times:
        found = as_of(root, collection.full_name, moment, uri=replica_set.uri).rows
        assert dict(zip(found.column("_key").to_pylist(), found.column("_bson").to_pylist(), strict=True)) == truth
    folder = place_of(root, collection.full_name)
    table = CollectionTable(folder, collection.full_name)
    left = folder / "left.parquet"
    left.create(b"of a writer that was killed")
    for ahead_s in (7200.0, -7200.0):  # a wrong clock does not cause early removals
        root.bucket.clock[:] = [ahead_s]
        assert not table.expire(Keeping(1.0))
    root.bucket.clock[:] = [0.0]
    while not (removed := table.expire(Keeping(0.0))) or left.exists():
        time.sleep(0.1)
    assert removed
    assert_equal(root, collection)


def test_documents_that_do_not_fit(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    rule = TableRule(f"{collection.database.name}.*", TableSchema.declared({"n": "long"}, "quarantine"))
    collection.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": "x"}])
    for turn in range(2):
        with TablesWriter(replica_set.uri, TableSettings(root, (rule,))) as writer:
            writer.run_to_present()
        held = in_table(root, collection.full_name)
        assert held is not None
        assert len(held) == 1 + turn
        collection.update_one({"_id": 2}, {"$set": {"n": 2}})


# -- what stores and networks do --------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # "too many" differs from "slow down" only in the status
    "fault", ["slow down", "cut", "lost", "slow", pytest.param("too many", marks=pytest.mark.slow)]
)
def test_a_bad_day(  # noqa: PLR0917
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, fault: Fault
) -> None:
    """Every fourth request goes wrong, whatever it is, and so does the first try to write each object."""
    tried: set[str] = set()

    def chosen(number: int, method: str, path: str) -> Fault | None:
        is_first = method == "PUT" and path not in tried
        tried.update([path] if method == "PUT" else ())
        return fault if is_first or number % 4 == 0 else None

    with UnkindProxy(object_store.address, chosen) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        for turn in range(2):
            change(collection, turn)
            brought_up(replica_set.uri, root, collection)
        assert proxy.faults[fault] > 10
    straight = object_store.place(prefix, tmp_path / "state")
    assert_equal(straight, collection)
    folder = place_of(straight, collection.full_name)
    assert CollectionTable(folder, collection.full_name).version == 1, "a commit was written twice"


def test_a_store_that_throttles_for_a_while(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """A request was given up after the libraries' ten retries, in seconds and not in three minutes. No test had refused
    a request more than once, or let it be repeated for more than three seconds."""
    until = 0
    with UnkindProxy(object_store.address, lambda number, *_: "too many" if number <= until else None) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        for attempt in (lambda: (root / "one").create(b"content"), lambda: CollectionTable(root / "x", "a.b")):
            until = proxy.requests + 12
            attempt()
            assert proxy.requests > until
    assert (object_store.place(prefix, tmp_path / "state") / "one").read_bytes() == b"content"


@pytest.mark.parametrize("places", [6, pytest.param(84, marks=pytest.mark.slow)])
def test_a_store_that_does_not_answer_is_no_damage(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    places: int,
) -> None:
    """Wherever in a run it goes away, the run ends with an error that says so, and the next one goes on."""
    away = never = 1 << 30
    with UnkindProxy(object_store.address, lambda number, *_: "cut" if number >= away else None) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address, retry_s=0.0)
        more = {"compact_every": 1, "grace_h": 0.0}
        change(collection, 0)
        brought_up(replica_set.uri, root, collection, **more)
        for turn in range(1, 1 + places):
            change(collection, turn)
            away = proxy.requests + turn * REQUESTS // (places + 1)
            with pytest.raises(StoreAwayError) as caught:
                brought_up(replica_set.uri, root, collection, **more)
            assert SECRET not in f"{caught.value} {caught.value.hint}"
            away = never
            if turn % 10 == 0:
                brought_up(replica_set.uri, root, collection, **more)
                assert_equal(root, collection)
        brought_up(replica_set.uri, root, collection, **more)
        assert_equal(root, collection)
    assert "is rewritten" not in caplog.text


def test_a_store_that_ignores_conditions_is_refused(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    with UnkindProxy(object_store.address, lambda *_: "no condition") as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        with pytest.raises(SinkError, match="overwrites an object"):
            TablesWriter(replica_set.uri, settings_of(root, collection))
    assert not held_in(object_store.place(prefix, tmp_path / "state"))


def test_wrong_keys(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    root = object_store.place(prefix, tmp_path / "state", **object_store.wrong)
    for attempt in (lambda: check_store(root), lambda: CollectionTable(root / "x", "a.b")):
        with pytest.raises(SinkError, match=object_store.refusal) as caught:
            attempt()
        assert not any(one in str(caught.value) for one in object_store.wrong.values())
    assert not any(one in repr(root) + repr(root.bucket) for one in object_store.wrong.values())


# -- writers ----------------------------------------------------------------------------------------------------------


def test_two_writers(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    change(collection, 0)
    with TablesWriter(replica_set.uri, settings_of(one, collection)) as first:
        first.run_to_present()
        with pytest.raises(SinkError, match="another state writes the tables"):
            TablesWriter(replica_set.uri, settings_of(other, collection))
        change(collection, 1)
        first.run_to_present()
        assert_equal(one, collection)
        with TablesWriter(replica_set.uri, settings_of(other, collection, take_over=True)) as second:
            change(collection, 2)
            with pytest.raises(SinkError, match="another writer has taken over"):
                first.run_to_present()
            second.run_to_present()
            assert_equal(other, collection)
            change(collection, 3)
            second.run_to_present()
            assert_equal(other, collection)
    with pytest.raises(SinkError, match="another state writes the tables"):
        TablesWriter(replica_set.uri, settings_of(one, collection))
    change(collection, 4)
    brought_up(replica_set.uri, one, collection, take_over=True)
    assert_equal(one, collection)


def test_a_writer_that_does_not_see_the_other_cannot_commit(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The moment between the check of the owner and the commit: the log's numbers decide."""
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    change(collection, 0)
    with TablesWriter(replica_set.uri, settings_of(one, collection)) as first:
        first.run_to_present()
        brought_up(replica_set.uri, other, collection, take_over=True)
        change(collection, 1)
        monkeypatch.setattr(first._publication, "_check", lambda: None)
        with pytest.raises(SinkError, match="another program has changed the table"):
            first.step(at_once=True)
    monkeypatch.undo()
    brought_up(replica_set.uri, other, collection)
    assert_equal(other, collection)


def test_a_copy_of_the_state(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    change(collection, 0)
    brought_up(replica_set.uri, one, collection)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    change(collection, 1)
    brought_up(replica_set.uri, other, collection)
    change(collection, 2)
    with pytest.raises(SinkError, match="a copy of this state, or a newer one, writes the tables"):
        TablesWriter(replica_set.uri, settings_of(one, collection))
    brought_up(replica_set.uri, one, collection, take_over=True)
    assert_equal(one, collection)


def test_a_lost_state(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    change(collection, 0)
    brought_up(replica_set.uri, root, collection)
    shutil.rmtree(tmp_path / "state")
    change(collection, 1)
    with pytest.raises(SinkError, match="another state") as caught:
        brought_up(replica_set.uri, root, collection)
    assert "--take-over" in (caught.value.hint or "")
    brought_up(replica_set.uri, root, collection, take_over=True)
    assert_equal(root, collection)


@pytest.mark.parametrize("left", ["everything", "all but the owner"])
def test_a_store_that_was_set_back(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    left: str,
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    change(collection, 0)
    brought_up(replica_set.uri, root, collection)
    copy = held_in(root)
    if left != "everything":
        del copy["_tailrace/owner.json"]
    for turn in (1, 2):
        change(collection, turn)
        brought_up(replica_set.uri, root, collection)
    put_back(root, copy)
    brought_up(replica_set.uri, root, collection)
    assert_equal(root, collection)
    assert "is older than its state" in caplog.text


def test_a_store_that_is_set_back_while_a_writer_runs(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    with TablesWriter(replica_set.uri, settings_of(root, collection)) as writer:
        change(collection, 0)
        writer.run_to_present()
        copy = held_in(root)
        change(collection, 1)
        writer.run_to_present()
        put_back(root, copy)
        change(collection, 2)
        writer.run_to_present()  # the owner's object is unchanged, so only the tables were restored
        assert writer.progress.anew == 1
        assert_equal(root, collection)
        del copy["_tailrace/owner.json"]
        put_back(root, copy)
        change(collection, 3)
        with pytest.raises(SinkError, match="gone or set back"):
            writer.run_to_present()
    brought_up(replica_set.uri, root, collection)
    assert_equal(root, collection)


def test_the_tables_of_another_deployment(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    change(collection, 0)
    brought_up(replica_set.uri, root, collection)
    place = root / "_tailrace" / "owner.json"
    content, etag = place.read()
    place.swap(json.dumps(json.loads(content) | {"deployment": "0" * 24}).encode(), etag)
    before = held_in(root)
    for take_over in (False, True):
        with pytest.raises(OtherHistoryError, match="another deployment"):
            brought_up(replica_set.uri, object_store.place(prefix, tmp_path / "x"), collection, take_over=take_over)
    assert held_in(root) == before


# -- kills ------------------------------------------------------------------------------------------------------------

STEPS = ("table.uploaded", "tables.state", "table.commit", "tables.done", "table.compacted")
_CHILD = """
import os, signal, sys, json
from tailrace.base import durable
from pathlib import Path
from tailrace.base.object_place import object_place
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.versions import Keeping
from tailrace.lake.tables.writer import TablesWriter
uri, place, state, database, step, options = sys.argv[1:]
durable.observe_steps(lambda name: name == step and os.kill(os.getpid(), signal.SIGKILL))
root = object_place(place, beside=Path(state), options=json.loads(options))
rules = (TableRule(f"{database}.*"),)
with TablesWriter(uri, TableSettings(root, rules, every_s=0.0, compact_every=1, grace_h=0.0)) as writer:
    writer.run_to_present()
"""


def test_a_writer_that_is_killed(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """At each of its steps; the next one goes on."""
    root = object_store.place(prefix, tmp_path / "state")
    options = json.dumps(object_store.options())
    killed = set()
    for turn, step in enumerate(STEPS):
        change(collection, turn)
        where = [
            replica_set.uri,
            object_store.uri(prefix),
            str(tmp_path / "state"),
            collection.database.name,
            step,
            options,
        ]
        ended = commands.run(*where, code=_CHILD)
        assert ended.returncode in (0, -signal.SIGKILL)
        killed |= {step} if ended.returncode else set()
    assert killed >= set(STEPS[:4])
    brought_up(replica_set.uri, root, collection)
    assert_equal(root, collection)
    folder = place_of(root, collection.full_name)
    numbers = [one.name for one in folder.objects() if one.name.endswith(".json")]
    assert len(set(numbers)) == len(numbers)
