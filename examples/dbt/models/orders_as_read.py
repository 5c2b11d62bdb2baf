"""The rows of the table of orders at the version up to which its changes were read."""

from deltalake import DeltaTable


def model(dbt, session):
    dbt.config(materialized="table")
    version = dbt.ref("order_changes").aggregate("max(_commit_version)").fetchall()[0][0]
    table = DeltaTable(dbt.config.get("table"), version=version)
    return table.to_pyarrow_table(columns=["_key", "status", "cents", "_changed"])
