"""What people unfamiliar with tables may do to their directory: equal afterwards, or refused with a sentence.

Half a copy, files of one table in the folder of another, and the tools that users of Delta tables run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tests.tables.equality import in_collection, in_table
from tests.tables.test_restored import brought_up, made
from tests.tables.test_restored import collection as collection  # noqa: PLC0414  a fixture

pytestmark = pytest.mark.mongod


def optimize(folder: Path, backup: Path) -> None:
    table = DeltaTable(str(folder))
    table.optimize.compact()
    table.vacuum(0, enforce_retention_duration=False, dry_run=False)


def z_order(folder: Path, backup: Path) -> None:
    DeltaTable(str(folder)).optimize.z_order(["_key"])


def shorten(folder: Path, backup: Path) -> None:
    table = DeltaTable(str(folder))
    table.create_checkpoint()
    table.cleanup_metadata()


def checkpoint_and_remove_all_before(folder: Path, backup: Path) -> None:
    table = DeltaTable(str(folder))
    table.create_checkpoint()
    for number in range(table.version()):
        delta.commit_path(folder, number).unlink()


def optimize_and_lose_it(folder: Path, backup: Path) -> None:
    table = DeltaTable(str(folder))
    table.optimize.compact()
    delta.commit_path(folder, table.version()).unlink()


def copy_over(folder: Path, backup: Path) -> None:
    shutil.copytree(backup, folder, dirs_exist_ok=True)


def copy_the_log(folder: Path, backup: Path) -> None:
    shutil.rmtree(folder / "_delta_log")
    shutil.copytree(backup / "_delta_log", folder / "_delta_log")


def copy_the_files(folder: Path, backup: Path) -> None:
    for path in folder.glob("*.parquet"):
        path.unlink()
    for path in backup.glob("*.parquet"):
        shutil.copy(path, folder)


def go_back(folder: Path, backup: Path) -> None:
    DeltaTable(str(folder)).restore(1)


def delete(folder: Path, backup: Path) -> None:
    DeltaTable(str(folder)).delete()


def change_settings(folder: Path, backup: Path) -> None:
    DeltaTable(str(folder)).alter.set_table_properties({"delta.appendOnly": "true"})


def take_the_newest_commit_of(folder: Path, backup: Path) -> None:
    newest = delta.commit_path(folder, DeltaTable(str(folder)).version())
    newest.write_bytes(delta.commit_path(backup, DeltaTable(str(backup)).version()).read_bytes())


def state_file(folder: Path) -> Path:
    return folder.parent / "_tailrace" / "state" / "data.mdb"


def shuffle_pages(folder: Path, backup: Path) -> None:
    content = state_file(folder).read_bytes()
    page = os.sysconf("SC_PAGE_SIZE")
    state_file(folder).write_bytes(content[: 2 * page] + content[3 * page : 4 * page] + content[3 * page :])


def older_state_file(folder: Path, backup: Path) -> None:
    shutil.copy(state_file(backup), state_file(folder))


def quarantine_of_nobody(folder: Path, backup: Path) -> None:
    shutil.copytree(folder, folder.parent / "_quarantine")


STRANGERS: dict[str, Callable[[Path, Path], object]] = {
    one.__name__.replace("_", " "): one
    for one in (
        optimize,
        z_order,
        shorten,
        checkpoint_and_remove_all_before,
        optimize_and_lose_it,
        copy_over,
        copy_the_log,
        copy_the_files,
        go_back,
        delete,
        change_settings,
        take_the_newest_commit_of,
        shuffle_pages,
        older_state_file,
        quarantine_of_nobody,
    )
}
STRANGERS |= {
    "cut the state short": lambda folder, backup: os.truncate(
        state_file(folder), state_file(folder).stat().st_size // 2
    ),
    "empty the state": lambda folder, backup: os.truncate(state_file(folder), 0),
    "remove the last checkpoint's name": lambda folder, backup: (folder / "_delta_log" / "_last_checkpoint").unlink(
        missing_ok=True
    ),
    "empty the newest commit": lambda folder, backup: os.truncate(
        delta.commit_path(folder, DeltaTable(str(folder)).version()), 0
    ),
    "an empty commit on top": lambda folder, backup: delta.commit_path(
        folder, DeltaTable(str(folder)).version() + 1
    ).touch(),
    "another program's folder": lambda folder, backup: shutil.copytree(folder, folder.parent / "my copy"),
}


#: The messages for those that are refused.
REFUSALS = {
    **dict.fromkeys(("go back", "delete", "change settings"), "another program has changed the table .*tables rebuild"),
    **dict.fromkeys(("shuffle pages", "cut the state short"), "state is damaged: .*Remove .*: the next run copies"),
}


@pytest.mark.parametrize("harm", STRANGERS)
def test_tables_equal_their_collections_or_are_refused(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, harm: str
) -> None:
    root = tmp_path / "t"
    folder = made(replica_set.uri, root, collection)
    backup = root.with_name("backup") / folder.name
    STRANGERS[harm](folder, backup)
    for turn in range(2):
        collection.update_one({"_id": 1}, {"$set": {"after": turn}})
        collection.delete_one({"_id": 7 + turn})
        if harm in REFUSALS:
            with pytest.raises(SinkError, match=REFUSALS[harm]):
                brought_up(replica_set.uri, root, collection)
            continue
        brought_up(replica_set.uri, root, collection)
        assert in_table(root, collection.full_name) == in_collection(collection)
