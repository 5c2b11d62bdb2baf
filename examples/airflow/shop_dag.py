"""Tables that equal their collections, and a dbt project over what changed in them, as a DAG of Airflow.

Put this file into the DAGs folder, with ``TAILRACE_URI``, ``TAILRACE_TABLES`` (a directory that all workers share) and
``SHOP_DBT_PROJECT`` (a copy of examples/dbt) in the workers' environment. ``tailrace`` and ``dbt`` are called as
commands, so they may be installed in environments of their own.

Each run goes on where the last one stopped, whatever its logical date: the tables keep their own position. So runs are
neither caught up on nor run side by side.
"""

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG(
    "shop",
    schedule="*/10 * * * *",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": pendulum.duration(minutes=1)},
):
    orders_table = BashOperator(
        task_id="orders_table",
        bash_command='tailrace tables write "$TAILRACE_TABLES" shop.orders --change-feed 2d --once',
    )
    revenue_by_status = BashOperator(
        task_id="revenue_by_status",
        bash_command='dbt build --project-dir "$SHOP_DBT_PROJECT" --profiles-dir "$SHOP_DBT_PROJECT"',
    )
    orders_table >> revenue_by_status
