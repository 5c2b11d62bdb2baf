"""A table's Delta log with something changed in it: found, or without effect.

Only the file of the newest commit had a digest. If a character changed in the name of a file that an older commit
removes, the file stayed: rows were read twice without any message. Tests had changed only the newest commit.
"""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tailrace.lake.tables import delta_commit, log_chain
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_commit import PREVIOUS, SEAL
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.schema import TableSchema
from tests.amounts import amount
from tests.tables.equality import in_collection, in_table
from tests.tables.features import Made
from tests.tables.test_restored import brought_up
from tests.tables.test_restored import collection as collection  # noqa: PLC0414  a fixture

LAST = 57


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str], str]:
    """A table with a checkpoint at version 50 and commits after it; its checkpoints and the digest of the last one."""
    root = tmp_path_factory.mktemp("log") / "t"
    table = Made(root, TableSchema())
    table.whole([{"_id": number, "n": 0} for number in range(5)])
    for number in range(1, LAST + 1):
        table.change([{"_id": number % 7, "n": number}])
    assert table.table.committed is not None
    return root, table.table.checkpoints, table.table.committed[1]


def rows(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(str(root)).to_pyarrow_table(columns=["_key", "n"]).to_pylist()
    return sorted(found, key=lambda one: (one["_key"], one["n"]))


def change(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def keep_removed(root: Path, number: int) -> None:
    """Change the name of a file that a version removes, so that readers keep its rows."""
    [name] = [one["remove"]["path"] for one in delta_commit.actions_of(root, number) if "remove" in one][:1]
    other = ("0" if name[0] != "0" else "1") + name[1:]
    change(
        delta.commit_path(root, number),
        f'"remove": {{"path": "{name}"'.encode(),
        f'"remove": {{"path": "{other}"'.encode(),
    )


def test_the_log_as_it_was_written_has_no_fault(made: tuple[Path, dict[int, str], str]) -> None:
    root, checkpoints, digest = made
    assert set(checkpoints) == {50}
    assert log_chain.harm(root, LAST, checkpoints, digest) is None
    for number in range(LAST + 1):
        info = delta.info_of(delta_commit.actions_of(root, number))
        assert set(json.loads(info[PREVIOUS])) == ({str(number - 1)} if number else set())


def test_a_file_that_an_older_commit_removes_and_that_stays_is_found(
    made: tuple[Path, dict[int, str], str], tmp_path: Path
) -> None:
    root, checkpoints, digest = made
    expected = rows(root)
    shutil.copytree(root, tmp_path / "t")
    keep_removed(tmp_path / "t", LAST - 3)
    assert len(rows(tmp_path / "t")) > len(expected), "readers see rows twice"
    found = log_chain.harm(tmp_path / "t", LAST, checkpoints, digest)
    assert found == f"has a log that is not what was written: the file of version {LAST - 3} was changed"


def test_a_commit_of_the_same_table_in_another_history_is_found(
    made: tuple[Path, dict[int, str], str], tmp_path: Path
) -> None:
    """It has a matching seal, but is not the commit after which the next one was written."""
    root, checkpoints, digest = made
    shutil.copytree(root, tmp_path / "t")
    lines = delta_commit.actions_of(root, LAST - 2)
    lines[0]["commitInfo"]["timestamp"] += 1
    other = delta_commit.content_of(LAST - 2, lines, log_chain.previous(root, LAST - 2))
    delta.commit_path(tmp_path / "t", LAST - 2).write_bytes(other)
    found = log_chain.harm(tmp_path / "t", LAST, checkpoints, digest)
    assert found == f"has a version {LAST - 2} that is not the one that version {LAST - 1} was written after"
    delta.commit_path(tmp_path / "t", LAST - 2).unlink()
    assert log_chain.harm(tmp_path / "t", LAST, checkpoints, digest) == f"lacks version {LAST - 2} of its log"


@pytest.mark.parametrize("seed", range(amount(1, 10)))
def test_no_flipped_bit_of_the_log_gives_readers_other_rows_unseen(
    made: tuple[Path, dict[int, str], str], tmp_path: Path, seed: int
) -> None:
    root, checkpoints, digest = made
    expected, rng, seen = rows(root), random.Random(seed), 0
    copy = tmp_path / "t"
    shutil.copytree(root, copy)
    files = [delta.commit_path(copy, number) for number in (3, *range(49, LAST + 1))]
    files += [copy / "_delta_log" / "_last_checkpoint", *delta.checkpoints_in(copy)[50]]
    for _ in range(amount(60, 300)):
        path = rng.choice(files)
        whole = path.read_bytes()
        content = bytearray(whole)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        harm = log_chain.harm(copy, LAST, checkpoints, digest)
        with suppress(DeltaError, OSError, ValueError):  # in that case nobody reads it
            assert harm is not None or rows(copy) == expected, path.name
        seen += harm is not None
        path.write_bytes(whole)
    assert seen > 20


def test_what_other_programs_write_is_taken_and_then_compared(tmp_path: Path) -> None:
    """`optimize`, checkpoints and `vacuum` of deltalake, as users run them."""
    root = tmp_path / "t"
    table = Made(root, TableSchema())
    table.whole([{"_id": number, "n": 0} for number in range(5)])
    for number in range(1, 4):
        table.change([{"_id": number, "n": number}])
    foreign = DeltaTable(str(root))
    foreign.optimize.compact()
    foreign.create_checkpoint()
    foreign.vacuum(0, enforce_retention_duration=False, dry_run=False)
    version = foreign.version()
    assert version > 3
    assert log_chain.harm(root, 3, {}) is None
    table.table = CollectionTable(root, "shop.orders", declared="")
    table.change([{"_id": 4, "n": 4}])
    number = version + 1
    assert set(json.loads(delta.info_of(delta_commit.actions_of(root, number))[PREVIOUS])) == {
        str(one) for one in range(3, number)
    }
    assert log_chain.harm(root, number, {}) is None
    assert rows(root) == sorted(rows(root), key=lambda one: one["_key"])
    assert [one["n"] for one in rows(root)] == [0, 1, 2, 3, 4]
    change(delta.commit_path(root, version), b'"timestamp":1', b'"timestamp":2')
    assert log_chain.harm(root, number, {}) == (
        f"has a version {version} that is not the one that version {number} was written after"
    )


def test_a_checkpoint_of_another_program_is_compared_with_the_log(tmp_path: Path) -> None:
    root = tmp_path / "t"
    table = Made(root, TableSchema())
    table.whole([{"_id": number, "n": 0} for number in range(5)])
    table.change([{"_id": 1, "n": 1}])
    keep_removed(root, 1)
    DeltaTable(str(root)).create_checkpoint()
    shutil.copytree(root, tmp_path / "whole")
    content = delta.commit_path(root, 1).read_bytes()
    assert SEAL.encode() in content
    name = next(one["add"]["path"] for one in delta_commit.actions_of(root, 0) if "add" in one)
    start = content.index(b'"remove": {"path": "') + len(b'"remove": {"path": "')
    delta.commit_path(root, 1).write_bytes(content[:start] + name.encode() + content[start + len(name) :])
    assert log_chain.harm(root, 1, {}) == "has a checkpoint of version 1 that does not agree with its log"


@pytest.fixture
def older(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> tuple[Path, Path, ClusterTime]:
    """Tables with five versions; their directory, the table's, and the time of an older version."""
    root = tmp_path / "t"
    between = ClusterTime(0)
    for turn in range(5):
        collection.insert_one({"_id": turn})
        collection.update_one({"_id": 0}, {"$set": {"turn": turn}})
        brought_up(replica_set.uri, root, collection)
        if turn == 3:
            between = ClusterTime.from_timestamp(collection.database.client.admin.command("ping")["operationTime"])
    return root, root / folder_of(collection.full_name), between


@pytest.mark.mongod
def test_a_bit_of_the_log_lets_the_table_be_written_anew(
    replica_set: ReplicaSet, collection: Any, older: tuple[Path, Path, ClusterTime], caplog: pytest.LogCaptureFixture
) -> None:
    root, folder, between = older
    brought_up(replica_set.uri, root, collection)
    assert as_of(root, collection.full_name, between, uri=replica_set.uri).rows.num_rows == 4
    keep_removed(folder, 2)
    with pytest.raises(AssertionError, match="a row is there twice"):
        in_table(root, collection.full_name)
    assert main(["tables", "verify", replica_set.uri, str(root)]) == 1
    with pytest.raises(SinkError, match=r"does not match its state: it has a log that is not what was written"):
        as_of(root, collection.full_name, between, uri=replica_set.uri)
    caplog.clear()
    brought_up(replica_set.uri, root, collection)
    assert "has a log that is not what was written: the file of version 2 was changed: it is rewritten" in caplog.text
    assert in_table(root, collection.full_name) == in_collection(collection)
    assert main(["tables", "verify", replica_set.uri, str(root)]) == 0
    # Versions of the log before it no longer exist; from now on there is nothing to report.
    with pytest.raises(SinkError, match=r"file of version 2 was changed|is damaged: it was changed"):
        as_of(root, collection.full_name, between, uri=replica_set.uri)
    caplog.clear()
    collection.insert_one({"_id": "more"})
    brought_up(replica_set.uri, root, collection)
    assert "rewritten" not in caplog.text
    assert in_table(root, collection.full_name) == in_collection(collection)


@pytest.mark.mongod
def test_a_bit_of_a_checkpoint_lets_the_table_be_written_anew(
    replica_set: ReplicaSet, collection: Any, older: tuple[Path, Path, ClusterTime], caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint that was made when the table was rewritten."""
    root, folder, _ = older
    keep_removed(folder, 2)
    brought_up(replica_set.uri, root, collection)
    collection.insert_one({"_id": "more"})
    brought_up(replica_set.uri, root, collection)
    [(number, [path])] = delta.checkpoints_in(folder).items()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["tables", "verify", replica_set.uri, str(root)]) == 1
    caplog.clear()
    try:
        brought_up(replica_set.uri, root, collection)
    except SinkError as error:
        assert "cannot be read" in error.message  # noqa: PT017  a bit that deltalake itself refuses
        shutil.rmtree(folder)
        brought_up(replica_set.uri, root, collection)
    else:
        assert f"has a checkpoint of version {number} that is not the one that was written" in caplog.text
    assert in_table(root, collection.full_name) == in_collection(collection)
