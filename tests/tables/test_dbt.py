"""The dbt project in ``examples/dbt`` over tables that follow a server: run after run, what it makes of the change feed
is what the server's own ``$group`` gives; what it cannot follow it refuses."""

from __future__ import annotations

import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.lake.store.delta import commit_path
from tailrace.lake.tables.settings import TableRule, TableSettings
from tests.gateway.packaged import pip
from tests.gateway.programs import Unavailable
from tests.tables.test_writer import brought_up

pytestmark = pytest.mark.mongod

PROJECT = Path(__file__).parents[2] / "examples" / "dbt"
#: dbt, its adapter and what these need beside what is installed for the tests.
DBT = tuple((Path(__file__).parent / "dbt-requirements.txt").read_text().split())
OTHER = "the table of orders is another one, or an older copy of it"


class Shop:
    """Orders that are written at random, and the tables that follow them."""

    def __init__(self, uri: str, root: Path) -> None:
        self.uri, self.client = uri, MongoClient[dict[str, Any]](uri)
        self.orders = self.client.shop.orders
        self.orders.drop()
        self.settings = TableSettings(root, (TableRule("shop.orders"),), every_s=0.0, compact_every=3, feed_h=24.0)
        self._chosen = random.Random(36)

    def trade(self, operations: int) -> None:
        for _ in range(operations):
            key, draw = self._chosen.randrange(30), self._chosen
            if draw.random() < 0.2:
                self.orders.delete_one({"_id": key})
            else:
                now = {"status": draw.choice(["new", "paid", "sent"]), "cents": draw.randrange(10_000)}
                self.orders.update_one({"_id": key}, {"$set": now}, upsert=True)

    def bring_up(self) -> None:
        brought_up(self.uri, self.settings)

    def revenue(self) -> list[tuple[Any, ...]]:
        """By the server itself."""
        by_status = {"_id": "$status", "orders": {"$sum": 1}, "cents": {"$sum": "$cents"}}
        found = self.orders.aggregate([{"$group": by_status}])
        return sorted((one["_id"], one["orders"], one["cents"]) for one in found)


@pytest.fixture
def shop(replica_set: ReplicaSet, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(replica_set.uri, tmp_path / "tables")
    with made.client:
        yield made


class Models:
    """The project's models without dbt: only what a run of dbt-duckdb needs."""

    def __init__(self, tables: Path) -> None:
        self.session = duckdb.connect()
        self.is_incremental = False
        self.this = "order_changes"
        self._table = str(tables / "shop.orders")

    @property
    def config(self) -> Any:
        return type("Config", (), {"get": lambda _, name: self._table, "__call__": lambda _, **options: None})()

    def ref(self, name: str) -> Any:
        return self.session.table(name)

    def run(self) -> None:
        self._take(self._python("order_changes"), "order_changes", append=self.is_incremental)
        self.is_incremental = True
        for name in ("orders", "revenue_by_status"):
            self.session.execute(f"CREATE OR REPLACE TABLE {name} AS {self._sql(f'models/{name}.sql')}")
        self._take(self._python("orders_as_read"), "orders_as_read", append=False)

    def differences(self) -> list[Any]:
        return self.rows(self._sql("tests/orders_are_equal.sql"))

    def rows(self, query: str) -> list[Any]:
        found: list[Any] = self.session.execute(query).fetchall()
        return found

    def _python(self, name: str) -> Any:
        return runpy.run_path(str(PROJECT / "models" / f"{name}.py"))["model"](self, self.session)

    def _take(self, made: Any, name: str, *, append: bool) -> None:
        self.session.register("made", made)
        begin = f"INSERT INTO {name}" if append else f"CREATE OR REPLACE TABLE {name} AS"
        self.session.execute(f"{begin} FROM made")
        self.session.unregister("made")

    @staticmethod
    def _sql(path: str) -> str:
        return re.sub(r"\{\{ ref\('(\w+)'\) \}\}", r"\1", (PROJECT / path).read_text())


def test_every_run_adds_what_came_and_equals_the_server(shop: Shop, tmp_path: Path) -> None:
    models = Models(tmp_path / "tables")
    for operations in (60, 0, 25, 25):
        shop.trade(operations)
        shop.bring_up()
        models.run()
        assert sorted(models.rows("SELECT * FROM revenue_by_status")) == shop.revenue()
        assert models.differences() == []
    models.rows("UPDATE order_changes SET cents = cents + 1 WHERE _change_type = 'update_postimage'")
    models.run()
    assert models.differences()


def test_another_table_in_its_place_is_refused(shop: Shop, tmp_path: Path) -> None:
    """Its feed begins anew, so its versions are not the ones that were read."""
    models = Models(tmp_path / "tables")
    shop.trade(40)
    shop.bring_up()
    models.run()
    shutil.rmtree(tmp_path / "tables")
    shop.bring_up()
    with pytest.raises(ValueError, match=OTHER):
        models.run()


def test_an_older_copy_is_refused(shop: Shop, tmp_path: Path) -> None:
    models = Models(tmp_path / "tables")
    shop.trade(40)
    shop.bring_up()
    shutil.copytree(tmp_path / "tables", tmp_path / "copy")
    shop.trade(40)
    shop.bring_up()
    models.run()
    for _ in range(3):  # as it is, and after further writes: its versions have the numbers of those that were read
        shutil.rmtree(tmp_path / "tables")
        shutil.copytree(tmp_path / "copy", tmp_path / "tables")
        with pytest.raises(ValueError, match=OTHER):
            models.run()
        shop.trade(40)
        shop.bring_up()
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(tmp_path / "tables", tmp_path / "copy")


def test_a_feed_that_no_longer_reaches_back_is_refused(shop: Shop, tmp_path: Path) -> None:
    models = Models(tmp_path / "tables")
    shop.trade(40)
    shop.bring_up()
    models.run()
    for _ in range(4):
        shop.trade(10)
        shop.bring_up()
    folder = tmp_path / "tables" / "shop.orders"
    table = DeltaTable(folder)
    table.create_checkpoint()
    for number in range(table.version() - 1):
        commit_path(folder, number).unlink()
    with pytest.raises(DeltaError):
        models.run()
    models.is_incremental = False
    models.run()
    assert sorted(models.rows("SELECT * FROM revenue_by_status")) == shop.revenue()


# -- by dbt itself ----------------------------------------------------------------------------------------------------


def _dbt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        packages = pip(*DBT)
    except Unavailable as missing:
        pytest.skip(str(missing))
    places = {"TAILRACE_TABLES": str(folder / "tables"), "SHOP_DUCKDB": str(folder / "shop.duckdb")}
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from dbt.cli.main import cli; cli()", *words]
    command += ["--profiles-dir", str(PROJECT), "--target-path", str(folder / "target"), "--log-path", str(folder)]
    env = os.environ | places | {"PYTHONPATH": path, "DO_NOT_TRACK": "1", "DBT_USE_COLORS": "0"}
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_dbt_builds_it_run_after_run(shop: Shop, tmp_path: Path) -> None:
    for operations in (60, 0, 40):
        shop.trade(operations)
        shop.bring_up()
        done = _dbt(tmp_path, "build")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert "PASS=8" in done.stdout
        with duckdb.connect(str(tmp_path / "shop.duckdb")) as connection:
            found = connection.execute("SELECT * FROM revenue_by_status").fetchall()
        assert sorted(found) == shop.revenue()
    shutil.rmtree(tmp_path / "tables")
    shop.bring_up()
    refused = _dbt(tmp_path, "build")
    assert refused.returncode == 1
    assert OTHER in refused.stdout
    assert _dbt(tmp_path, "build", "--full-refresh").returncode == 0
