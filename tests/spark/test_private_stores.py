"""Every store with documents is readable only by its owner if our commands make it. If its directory existed before,
that keeps its mode, and the files have what the umask leaves.

Each store had a test of its own directory, or none: that of exact images was 0755, and held every document.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pymongo
import pytest

from tailrace.embedded import ReplicaSet
from tests import commands
from tests.unit.test_private_directories import mode, umask

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

DATABASE = "privatestores"
STORES = ("lake", "checkpoint", "tables", "kept", "images")
PIPELINE = """\
source: {uri: '${TEST_URI}', database: privatestores, collection: orders, startingFrom: now, fullDocument: exact,
  images: images}
lake: {path: lake, checkpoint: checkpoint, columns: [event, token, wall_time]}
archive: {path: kept}
tables: {path: tables, collections: privatestores.orders}
"""


@pytest.fixture
def uri(replica_set: ReplicaSet) -> Iterator[str]:
    with pymongo.MongoClient[dict[str, object]](replica_set.uri) as client:
        client[DATABASE].orders.insert_many([{"_id": number, "n": 0} for number in range(10)])
        yield replica_set.uri
        client.drop_database(DATABASE)


def files_of(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file()]


@pytest.mark.parametrize("made_before", [None, 0o750], ids=["made by us", "made before"])
def test_the_stores_of_a_pipeline(
    uri: str, tailrace_run: Callable[..., tuple[int, str, str]], tmp_path: Path, made_before: int | None
) -> None:
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    if made_before is not None:
        for name in STORES:
            (tmp_path / name).mkdir()
            (tmp_path / name).chmod(made_before)
    with umask(0o022):
        code, _, err = tailrace_run(tmp_path / "pipeline.yaml", "--available-now", uri=uri)
    assert code == 0, err
    for name in STORES:
        assert oct(mode(tmp_path / name)) == oct(made_before or 0o700), name
        assert files_of(tmp_path / name), name
        # Nobody but the owner may write, whatever the directory; users who may enter an existing directory may read.
        open_to_others = [path for path in files_of(tmp_path / name) if mode(path) & (stat.S_IWGRP | stat.S_IWOTH)]
        assert open_to_others == [], name


def test_the_stores_of_single_commands(uri: str, tmp_path: Path) -> None:
    made = {name: tmp_path / "data" / name for name in ("tables", "archive", "images")}
    watch = ["watch", uri, f"{DATABASE}.orders", "--full-document", "exact", "--images", str(made["images"])]
    for command in (
        ["tables", "--once", "write", uri, str(made["tables"]), f"{DATABASE}.*"],
        ["archive", "--once", uri, str(made["archive"])],
        [*watch, "--until", "now"],
    ):
        done = commands.run(*command)
        assert done.returncode == 0, done.stderr.decode()
    assert {name: oct(mode(path)) for name, path in made.items()} == dict.fromkeys(made, oct(0o700))
    assert all(files_of(path) for path in made.values())
