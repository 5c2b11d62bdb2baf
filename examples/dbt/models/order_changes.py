"""What changed in the table of orders. The first run takes the table as it is; each later one reads from its change
feed the versions that came since the run before, and only those."""

import pyarrow
from deltalake import DeltaTable

COLUMNS = ["_key", "status", "cents", "_changed"]
OF_FEED = ["_change_type", "_commit_version"]


def model(dbt, session):
    dbt.config(materialized="incremental", incremental_strategy="append", on_schema_change="fail")
    table = DeltaTable(dbt.config.get("table"))
    table_id = str(table.metadata().id)
    since = _read_up_to(session, dbt.this, table, table_id) if dbt.is_incremental else None
    if since == table.version():
        return session.sql(f"SELECT * FROM {dbt.this} LIMIT 0")
    rows = _as_it_is(table) if since is None else _changes(table, since)
    return rows.append_column("_table_id", pyarrow.array([table_id] * len(rows), pyarrow.string()))


def _read_up_to(session, ours, table, table_id):
    """The version that the last run came to, if there was one. Another table in this place has a feed of its own: to
    add its rows to ours would be wrong, and nobody would be told."""
    ask = f"SELECT max(_commit_version), max(_committed_ms), any_value(_table_id) FROM {ours}"
    version, committed_ms, known = session.execute(ask).fetchall()[0]
    if known is None:
        return None
    if known != table_id or version > table.version() or _committed_ms(table, version) not in (None, committed_ms):
        raise ValueError("the table of orders is another one, or an older copy of it: run dbt with --full-refresh")
    return version


def _committed_ms(table, version):
    """When a version was committed; None where the log no longer says so. A copy that was written to since then
    has other versions under the same numbers."""
    entries = table.history(table.version() - version + 1)
    return next((one["timestamp"] for one in entries if one["version"] == version), None)


def _as_it_is(table):
    rows = table.to_pyarrow_table(columns=COLUMNS)
    rows = rows.append_column("_change_type", pyarrow.array(["insert"] * len(rows), pyarrow.string()))
    versions = pyarrow.array([table.version()] * len(rows), pyarrow.uint64())
    moments = pyarrow.array([_committed_ms(table, table.version())] * len(rows), pyarrow.int64())
    return rows.append_column("_commit_version", versions).append_column("_committed_ms", moments)


def _changes(table, since):
    """Fails if the feed no longer reaches back to ``since``: run dbt with --full-refresh, or keep the feed longer."""
    wanted = [*COLUMNS, *OF_FEED, "_commit_timestamp"]
    feed = pyarrow.table(table.load_cdf(starting_version=since + 1, ending_version=table.version(), columns=wanted))
    moments = feed["_commit_timestamp"].cast(pyarrow.timestamp("ms")).cast(pyarrow.int64())
    return feed.select(COLUMNS + OF_FEED).append_column("_committed_ms", moments)
