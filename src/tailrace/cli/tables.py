"""``tailrace tables``: write tables without Spark, show their status, read earlier states, and maintain them."""

from __future__ import annotations

import argparse
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from tailrace.cli.stream_arguments import parse_duration
from tailrace.cli.usage import WrongUsageError
from tailrace.errors import UsageError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.uri import find_uri

_DESCRIPTION = """\
Tables that equal their collections: a Delta table for each collection, kept up to date by `tailrace run` (section
tables of its file) or by `write`. DIR is the directory of the tables.

  write URI DIR PATTERN...     copy the collections, then follow them; --once: up to now
  status DIR                   the tables, and the cluster time at which they equal their collections
  as-of DIR NAMESPACE TIME     what a collection held then: TIME is seconds,increment or 2026-11-21T14:00:00Z
  compact DIR [NAMESPACE]      merge small files (--z-order COLUMN: arrange the rows by columns)
  expire DIR [NAMESPACE]       remove files that were replaced longer ago than --keep (default: 7d)
  rebuild DIR NAMESPACE        let the next run rewrite a table, after another program has changed it"""
_ACTIONS = ("write", "status", "as-of", "compact", "expire", "rebuild")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "tables",
        help="Delta tables that equal their collections, also as of a time",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    parser.add_argument("words", nargs="*", metavar="...", help="what the action needs, in the order above")
    parser.add_argument("--once", action="store_true", help="with write: end when the tables are up to date")
    parser.add_argument("--archive", type=Path, metavar="DIR", help="with as-of: read entries from this archive")
    parser.add_argument("--uri", metavar="URI", help="with as-of: read entries from the deployment's oplog")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with as-of: write the rows to this Parquet file")
    parser.add_argument("--z-order", action="append", default=[], metavar="COLUMN", help="with compact")
    parser.add_argument("--keep", default="7d", metavar="7d", help="with expire (s, m, h, d)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises TailraceError."""
    words: list[str] = args.words
    if args.action == "write":
        return _write(words, once=args.once)
    if not words:
        raise WrongUsageError(f"tailrace tables {args.action} needs the directory of the tables")
    root = Path(words[0])
    if not (root / "_tailrace").is_dir():
        raise UsageError(f"{root} holds no tables of Tailrace")
    if args.action == "status":
        return _status(root)
    if args.action == "as-of":
        return _as_of(root, words[1:], args)
    if args.action == "rebuild":
        return _rebuild(root, words[1:])
    return _each(root, words[1:], args)


def _write(words: list[str], *, once: bool) -> int:
    from tailrace.tables.settings import TableRule, TableSettings  # noqa: PLC0415  so that --help loads no Arrow
    from tailrace.tables.writer import TablesProgress, TablesWriter  # noqa: PLC0415

    if len(words) < 3:
        raise WrongUsageError(
            "tailrace tables write needs URI, directory and collections", hint="... write URI DIR shop.*"
        )
    settings = TableSettings(Path(words[1]), tuple(TableRule(pattern) for pattern in words[2:]))
    settings.check()  # before anything is opened

    def told(progress: TablesProgress) -> None:
        print(f"{progress.changes:,} changes, {progress.batches:,} micro-batches", file=sys.stderr)

    with TablesWriter(find_uri(words[0]), settings) as writer:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: writer.stop())
        if once:
            writer.run_to_present()
        else:
            writer.run(told)
        print(_stated(writer.progress.time), file=sys.stderr)
    return 0


def _status(root: Path) -> int:
    from tailrace.tables.delta_commit import stated, time_text  # noqa: PLC0415
    from tailrace.tables.delta_table import CollectionTable  # noqa: PLC0415
    from tailrace.tables.names import folder_of  # noqa: PLC0415
    from tailrace.tables.state import TableState  # noqa: PLC0415

    state = TableState(root / "_tailrace" / "state", readonly=True)
    try:
        position, marks = state.position(), state.marks()
    finally:
        state.close()
    print(_stated(None if position is None or not position.stated else position.stated))
    for namespace in sorted(marks):
        table = CollectionTable(root / folder_of(namespace), namespace)
        last = next(stated(table.root), None)
        changed = "never" if last is None else time_text(last.time)
        files = sum(1 for _ in table.files())
        print(f"{namespace}: version {table.version}, {table.rows():,} rows in {files:,} files, last changed {changed}")
    return 0


def _as_of(root: Path, words: list[str], args: argparse.Namespace) -> int:
    from tailrace.tables.as_of import as_of  # noqa: PLC0415

    if len(words) != 2:
        raise WrongUsageError("tailrace tables as-of needs directory, namespace and time")
    uri = None if args.uri is None else find_uri(args.uri)
    found = as_of(root, words[0], _moment(words[1]), archive=args.archive, uri=uri)
    print(
        f"{words[0]} at {found.time.seconds},{found.time.increment}: {found.rows.num_rows:,} rows "
        f"(version {found.version}, and {found.replayed:,} changes of the oplog)",
        file=sys.stderr,
    )
    if args.out is not None:
        import pyarrow.parquet as pq  # noqa: PLC0415

        pq.write_table(found.rows, args.out)
        return 0
    for text in found.rows.column("_json").to_pylist():
        print("null" if text is None else text)  # bytes that are no document for the codec: they are in _bson
    return 0


def _rebuild(root: Path, words: list[str]) -> int:
    from tailrace.tables.writer import mark_for_rebuilding  # noqa: PLC0415

    if len(words) != 1:
        raise WrongUsageError("tailrace tables rebuild needs directory and namespace")
    mark_for_rebuilding(root, words[0])
    print(f"the next run rewrites {words[0]}")
    return 0


def _each(root: Path, words: list[str], args: argparse.Namespace) -> int:
    """``compact`` and ``expire``. No writer may run meanwhile."""
    from tailrace.tables.delta_table import CollectionTable  # noqa: PLC0415
    from tailrace.tables.names import folder_of  # noqa: PLC0415
    from tailrace.tables.writer import held_tables  # noqa: PLC0415

    with held_tables(root) as namespaces:
        for namespace in words or namespaces:
            if namespace not in namespaces:
                raise UsageError(f"{namespace} has no table in {root}")
            table = CollectionTable(root / folder_of(namespace), namespace)
            if args.action == "expire":
                gone = table.expire(parse_duration("--keep", args.keep) / 3600)
                print(f"{namespace}: {len(gone):,} files removed")
                continue
            found = table.compact(z_order=args.z_order)
            print(f"{namespace}: {found.get('numFilesRemoved', 0)} files became {found.get('numFilesAdded', 0)}")
    return 0


def _moment(text: str) -> datetime | ClusterTime:
    from tailrace.tables.delta_commit import time_of  # noqa: PLC0415

    try:
        return time_of(text) if "," in text else datetime.fromisoformat(text)
    except ValueError:
        raise WrongUsageError(
            f"'{text}' is not a time", hint="Give seconds,increment or 2026-11-21T14:00:00Z"
        ) from None


def _stated(time: ClusterTime | None) -> str:
    if time is None:
        return "The tables do not equal their collections yet: a copy has not caught up"
    moment = datetime.fromtimestamp(time.seconds, UTC).isoformat(timespec="seconds")
    return f"The tables equal their collections at cluster time {time.seconds},{time.increment} ({moment})"
