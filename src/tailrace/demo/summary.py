"""What the demo prints at its end."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tailrace.demo.comparison import shown
from tailrace.demo.conductor import DemoResult
from tailrace.demo.upgrade_act import NEW, OLD

#: For DuckDB in Python, over a dataset named ``lake``: what is in the lake.
SQL = (
    "SELECT collection, operation_type, count(*) AS events, max(wall_time) AS newest, "
    "any_value(full_document) AS example FROM lake GROUP BY ALL ORDER BY ALL;"
)


def print_summary(result: DemoResult) -> None:
    """The events by type and collection, throughput, lag, the crash, the differences, and where to look."""
    console = Console(highlight=False, soft_wrap=True)
    comparison = result.comparison
    console.print(_table(result))
    console.print(
        f"operations    {sum(result.operations.values()):,} by the shop, in {result.seconds:.0f} s with all waits"
    )
    console.print(
        f"throughput    {comparison.events / result.seconds:,.0f} events/s into the lake, "
        f"{result.commits:,} micro-batches"
    )
    if result.lag is not None:
        lag = result.lag
        console.print(
            f"lag           p50 {lag.p50:.2f} s, p99 {lag.p99:.2f} s, longest {lag.longest:.2f} s"
            + (" (Spark's start and the crash included)" if result.crash else " (Spark's start included)")
        )
    console.print(_crash(result))
    for problem in result.report.problems:
        console.print(f"[red]problem[/]       {problem}")
    for position, expected, found in comparison.examples:
        console.print(f"event {position}: the server has {shown(expected)}", markup=False)
        console.print(f"event {position}: the lake has {shown(found)}", markup=False)
    colour = "green" if comparison.differences == 0 else "red"
    console.print(
        f"[bold {colour}]differences: {comparison.differences}[/] in {comparison.events:,} events, byte for byte"
    )
    _print_tables(console, result)
    _print_upgrade(console, result)
    console.print(f"lake          {result.lake}")
    console.print(f"look at it    lake = deltalake.DeltaTable('{result.lake}').to_pyarrow_dataset()", markup=False)
    console.print(f'              duckdb.sql("{SQL}")', markup=False)


def _print_tables(console: Console, result: DemoResult) -> None:
    """Print how the tables compare with their collections, and the ``as of`` query with its answer."""
    tables = result.tables
    if tables is None:
        return
    rows = ", ".join(f"{name} {count:,}" for name, count in tables.rows.items())
    colour = "green" if tables.differences == 0 else "red"
    console.print(f"tables        rows: {rows}")
    console.print(f"[bold {colour}]differences: {tables.differences}[/] between the tables and their collections")
    recorded = tables.recorded
    said = "as the server had then" if tables.as_of_equal else f"[red]the server had {len(recorded.documents):,}[/]"
    when = f"when the doors opened ({recorded.time.seconds},{recorded.time.increment})"
    console.print(f"as of         {when}, {recorded.namespace} held {tables.answered:,} documents, {said}")


def _print_upgrade(console: Console, result: DemoResult) -> None:
    """Print how a shop went from one version to another."""
    done = result.upgrade
    if done is None:
        return
    console.print(
        f"upgrade       from MongoDB {OLD} to {NEW} under {done.operations:,} operations: {done.verified:,} documents "
        f"compared while the shop worked; cut over in {done.cut_over_s:.1f} s"
    )
    colour = "green" if done.differences == 0 else "red"
    console.print(
        f"[bold {colour}]differences: {done.differences}[/] between the old deployment and the new one, in "
        f"{done.documents:,} documents, with indexes and options"
    )


def _table(result: DemoResult) -> Table:
    counts = result.comparison.by_type
    collections = sorted({collection for _, collection in counts})
    table = Table(title="Change events in the lake", title_justify="left")
    table.add_column("")
    for collection in collections:
        table.add_column(collection, justify="right")
    table.add_column("all", justify="right")
    for kind in sorted({kind for kind, _ in counts}):
        row = [counts[kind, collection] for collection in collections]
        table.add_row(kind, *[f"{n:,}" if n else "" for n in row], f"{sum(row):,}")
    table.add_section()
    sums = [sum(n for (_, where), n in counts.items() if where == collection) for collection in collections]
    table.add_row("all", *[f"{n:,}" for n in sums], f"{sum(sums):,}")
    return table


def _crash(result: DemoResult) -> str:
    crash = result.crash
    if crash is None:
        return "crash         none" + (" [red](one was wanted)[/]" if result.wanted_crash else " (--no-crash)")
    if not crash.happened:
        return f"crash         [red]after {crash.at:.1f} s, and no micro-batch followed[/]"
    return (
        f"crash         SIGKILL after {crash.at:.1f} s and micro-batch {crash.batch_before}; "
        f"went on from the checkpoint with micro-batch {crash.batch_after}"
    )
