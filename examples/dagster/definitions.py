"""Tables that equal their collections, and a dbt project over what changed in them, as assets of Dagster.

    pip install dagster dbt-duckdb deltalake pyarrow
    export TAILRACE_URI='mongodb://localhost/?replicaSet=rs0' TAILRACE_TABLES=$PWD/tables
    dagster dev -f examples/dagster/definitions.py

``tailrace`` and ``dbt`` are called as commands, so they may be installed in environments of their own. Every run of the
job goes on where the last one stopped; the tables keep their own position.
"""

import os
import re
import subprocess
from pathlib import Path

import dagster

TABLES = os.environ.get("TAILRACE_TABLES", "tables")
DBT_PROJECT = Path(__file__).parents[1] / "dbt"
_REACHED = re.compile(r"at cluster time (\S+)")


def _run(context: dagster.AssetExecutionContext, *command: str) -> str:
    """What a command prints. An exit status other than 0 fails the asset, with the command's own message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    context.log.info(said)
    if done.returncode:
        raise dagster.Failure(f"{command[0]} ended with status {done.returncode}: {said.strip()[-2000:]}")
    return said


@dagster.asset
def orders_table(context: dagster.AssetExecutionContext) -> dagster.MaterializeResult:
    """The Delta table of shop.orders, equal to its collection at a cluster time. TAILRACE_URI names the deployment."""
    said = _run(context, "tailrace", "tables", "write", TABLES, "shop.orders", "--change-feed", "2d", "--once")
    reached = _REACHED.search(said)
    return dagster.MaterializeResult(metadata={"cluster time": reached[1] if reached else "not told"})


@dagster.asset(deps=[orders_table])
def revenue_by_status(context: dagster.AssetExecutionContext) -> None:
    """The models of examples/dbt, with their tests: each run reads only what changed."""
    _run(context, "dbt", "build", "--project-dir", str(DBT_PROJECT), "--profiles-dir", str(DBT_PROJECT))


shop = dagster.define_asset_job("shop", selection=[orders_table, revenue_by_status])
defs = dagster.Definitions(
    assets=[orders_table, revenue_by_status],
    jobs=[shop],
    schedules=[dagster.ScheduleDefinition(job=shop, cron_schedule="*/10 * * * *")],
)
