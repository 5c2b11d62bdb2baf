"""The examples for Dagster and Airflow, run by them: tables, then dbt over what changed in them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tailrace.embedded import ReplicaSet
from tests.gateway.packaged import environment, pip
from tests.gateway.programs import Unavailable
from tests.tables.test_dbt import DBT, OTHER, Shop

pytestmark = [pytest.mark.mongod, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shop(replica_set: ReplicaSet, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(replica_set.uri, tmp_path / "tables")
    with made.client:
        yield made


@pytest.fixture
def run(replica_set: ReplicaSet, tmp_path: Path) -> Run:
    """Runs a program of an environment, which also has the commands ``tailrace`` and ``dbt``."""
    try:
        packages = pip(*DBT)
    except Unavailable as missing:
        pytest.skip(str(missing))
    commands = tmp_path / "commands"
    commands.mkdir()
    python, path = shlex.quote(sys.executable), shlex.quote(str(packages))
    for name, words in {
        "tailrace": f'{python} -m tailrace "$@"',
        "dbt": f'env PYTHONPATH={path} {python} -c "from dbt.cli.main import cli; cli()" "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\nexec {words}\n")
        (commands / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "TAILRACE_URI": replica_set.uri,
        "TAILRACE_TABLES": str(tmp_path / "tables"),
        "SHOP_DUCKDB": str(tmp_path / "shop.duckdb"),
        "SHOP_DBT_PROJECT": str(EXAMPLES / "dbt"),
        "DBT_TARGET_PATH": str(tmp_path / "target"),
        "DBT_LOG_PATH": str(tmp_path),
        "DO_NOT_TRACK": "1",
        "DAGSTER_HOME": str(tmp_path),
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }

    def of(programs: Path, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(programs / "python"), "-m", *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900)

    return of


def programs_of(*wanted: str) -> Path:
    try:
        return environment(*wanted)
    except Unavailable as missing:
        pytest.skip(str(missing))


def revenue(folder: Path) -> list[Any]:
    with duckdb.connect(str(folder / "shop.duckdb"), read_only=True) as connection:
        return sorted(connection.execute("SELECT * FROM revenue_by_status").fetchall())


def test_dagster_runs_the_job_again_and_again(shop: Shop, run: Run, tmp_path: Path) -> None:
    programs = programs_of("dagster==1.13.29")
    job = ["dagster", "job", "execute", "-f", str(EXAMPLES / "dagster" / "definitions.py"), "-j", "shop"]
    for operations in (40, 20):
        shop.trade(operations)
        done = run(programs, *job)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "cluster time" in done.stderr
        assert revenue(tmp_path) == shop.revenue()
    shutil.rmtree(tmp_path / "tables")
    refused = run(programs, *job)
    assert refused.returncode != 0, "dbt refuses another table in this place"
    assert OTHER in refused.stdout + refused.stderr


def test_airflow_runs_the_dag_again_and_again(shop: Shop, run: Run, tmp_path: Path) -> None:
    programs = programs_of("apache-airflow==3.3.2")
    dags = tmp_path / "airflow" / "dags"
    dags.mkdir(parents=True)
    shutil.copy(EXAMPLES / "airflow" / "shop_dag.py", dags)
    assert run(programs, "airflow", "db", "migrate").returncode == 0
    for operations in (40, 20):
        shop.trade(operations)
        done = run(programs, "airflow", "dags", "test", "shop")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert revenue(tmp_path) == shop.revenue()
