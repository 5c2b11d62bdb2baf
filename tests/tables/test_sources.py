"""Tables read from a hidden member, by a user who may not see everything that the patterns select, and with names that
no driver sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.errors import SourceError
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_table import tables_in
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.verification import verify
from tailrace.lake.tables.writer import TablesWriter
from tests.differential.hidden import hide_a_member
from tests.differential.wire import Wire, raw_command, raw_insert
from tests.tables.equality import in_collection, in_table

pytestmark = pytest.mark.mongod

OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]


def brought_up(uri: str, root: Path, pattern: str) -> Any:
    with TablesWriter(uri, TableSettings(root, (TableRule(pattern),), every_s=0.0)) as writer:
        return writer.run_to_present()


@pytest.mark.parametrize("version", ["6.0.27", *OLDER])
def test_tables_from_a_hidden_member(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str
) -> None:
    """Over a direct connection it offers no sessions, and tables asked for one."""
    running = start_replica_set(2, version=version)
    uri = hide_a_member(running)
    with MongoClient[Any](running.uri, w=2) as client:
        things = client["hidden_tables"]["things"]
        things.insert_many([{"_id": number} for number in range(20)])
        brought_up(uri, tmp_path, "hidden_tables.*")
        things.update_many({}, {"$set": {"n": 1}})
        client["hidden_tables"]["made"].insert_one({"_id": 1})
        then = brought_up(uri, tmp_path, "hidden_tables.*")
        for collection in (things, client["hidden_tables"]["made"]):
            assert in_table(tmp_path, collection.full_name) == in_collection(collection)
        assert all(report.good for report in verify(tmp_path, uri))
        assert as_of(tmp_path, things.full_name, then, uri=uri).rows.num_rows == 20


def test_a_user_who_may_see_a_part_gets_no_tables_of_all(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    """Only what the user may see was copied, but later changes of the rest appeared."""
    running = start_replica_set(root_password="root")
    with MongoClient[Any](running.uri) as client:
        for name in ("shop", "hr"):
            client[name]["things"].insert_one({"_id": 1})
        roles = [{"role": "read", "db": "shop"}, {"role": "read", "db": "local"}]
        client.admin.command("createUser", "some", pwd="pw", roles=roles)
    uri = f"mongodb://some:pw@{running.members[0].host}/?replicaSet={running.name}&authSource=admin"
    with pytest.raises(SourceError, match="may not list all databases"):
        brought_up(uri, tmp_path / "all", "*.*")
    brought_up(uri, tmp_path / "shop", "shop.*")
    assert len(in_table(tmp_path / "shop", "shop.things") or {}) == 1


@pytest.mark.parametrize("version", ["6.0.27", *OLDER])
def test_collections_whose_names_are_not_utf8_have_no_table_until_they_get_another_name(
    request: pytest.FixtureRequest, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str
) -> None:
    """Two such names shared one table, which kept the rows of one of them when both were dropped. All names in the
    tests came from drivers, which send no such names."""
    uri = request.getfixturevalue("replica_set").uri if version == "6.0.27" else start_replica_set(version=version).uri
    with MongoClient[Any](uri) as client, Wire.to(uri) as wire:
        plain = client["odd_tables"]["plain"]
        plain.insert_one({"_id": 1})
        brought_up(uri, tmp_path, "odd_tables.*")
        for name in (b"odd\xfe", b"odd\xff"):
            wire.exchange(raw_insert(b"odd_tables", name, *({"_id": number} for number in range(3))))
        plain.insert_one({"_id": 2})
        brought_up(uri, tmp_path, "odd_tables.*")
        wire.exchange(raw_command("drop", b"odd_tables", b"odd\xfe"))
        to = bson.encode({"to": "odd_tables.x"})[4:-1]
        reply = wire.exchange(raw_command("renameCollection", b"admin", b"odd_tables.odd\xff", to))
        assert bson.decode(reply)["ok"] == 1
        brought_up(uri, tmp_path, "odd_tables.*")
        assert tables_in(tmp_path).keys() == {"odd_tables.plain", "odd_tables.x"}
        for name in ("plain", "x"):
            assert in_table(tmp_path, f"odd_tables.{name}") == in_collection(client["odd_tables"][name])
        client.drop_database("odd_tables")
