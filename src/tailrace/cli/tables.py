"""``tailrace tables``: write tables without Spark, show their status, read earlier states, and maintain them."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.base.health import Health
from tailrace.base.service_manager import notifying
from tailrace.cli.console_beside import ServiceNumbers, add_console_argument, check_console, console_beside
from tailrace.cli.output import say, tell
from tailrace.cli.sampled import add_compare_arguments, check_compare, collectors, sampled
from tailrace.cli.signal_calls import call_aside
from tailrace.cli.stream_arguments import address_of, parse_duration
from tailrace.cli.uri_arguments import is_uri
from tailrace.cli.usage import WrongUsageError
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.local_path import local_path
from tailrace.read.source.uri import URI_VARIABLE, find_uri, is_uri_argument

if TYPE_CHECKING:
    from tailrace.lake.iceberg.settings import IcebergSettings
    from tailrace.lake.store.place import TablePlace
    from tailrace.lake.tables.iceberg_mirror import IcebergMirror
    from tailrace.lake.tables.progress import TablesProgress
    from tailrace.lake.tables.settings import TableSettings
    from tailrace.lake.tables.writer import TablesWriter
    from tailrace.read.source.mask_file import Masks
    from tailrace.read.source.uri import ConnectionString
    from tailrace.watch.compare.deployment import Streams
    from tailrace.watch.compare.sampling import SampledComparison

_DESCRIPTION = """\
Tables that equal their collections: a Delta table for each collection, kept up to date by `tailrace run` (section
tables of its file) or by `write`. DIR is the directory of the tables, or with --state FOLDER, a local folder for what
cannot be in an object store, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX. Keys and
endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL;
AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; GOOGLE_APPLICATION_CREDENTIALS or
GOOGLE_SERVICE_ACCOUNT).

  write URI DIR PATTERN...     copy the collections, then follow them; --once: up to now
  verify URI DIR [NAMESPACE]   compare the tables with their collections, and name what differs (--sample N: a part)
  status DIR [NAMESPACE]       the tables, the cluster time at which they equal their collections, and fields whose
                               columns have other names or types; with NAMESPACE all columns of these tables
  as-of DIR NAMESPACE TIME     what a collection held then: TIME is seconds,increment or 2026-11-21T14:00:00Z
  compact DIR [NAMESPACE]      merge small files (--z-order COLUMN: arrange the rows by columns)
  expire DIR [NAMESPACE]       remove files that were replaced longer ago than --keep (default: 7d)
  rebuild DIR NAMESPACE        let the next run rewrite a table, after another program has changed it
  resync DIR NAMESPACE         let the writer, or the next run, copy one collection again while it follows the others"""
_ACTIONS = ("write", "status", "verify", "as-of", "compact", "expire", "rebuild", "resync")
_URI_STANDS = {
    "write": "comes first: tailrace tables write URI DIR 'shop.*'",
    "verify": "comes first: tailrace tables verify URI DIR",
    "as-of": "is given with --uri",
}
#: How many documents that differ are named for each table.
_NAMED_MAX = 20
#: How often it is printed how far a copy has come.
_COPY_TOLD_S = 5.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "tables",
        help="keep Delta tables that equal their collections, now or as of an earlier time",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    parser.add_argument("words", nargs="*", metavar="...", help="what the action needs, in the order above")
    parser.add_argument("--once", action="store_true", help="with write: end when the tables are up to date")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="in a store: the local folder of the state; the same one each time",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="with write, in a store: write tables whose state is lost; they are rewritten, their writer is stopped",
    )
    _add_forms(parser)
    parser.add_argument(
        "--iceberg",
        metavar="CATALOG",
        help="with write, verify, expire: the tables are Iceberg tables too, in the catalogue with this URI "
        "(sqlite:///FILE, https://HOST) or this name in .pyiceberg.yaml; they may be on a disk or in s3:// (extra: "
        "iceberg)",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="with write: serve statistics to Prometheus, /livez and /readyz (extra: metrics)",
    )
    add_console_argument(parser, "with write: ")
    add_compare_arguments(parser, "with write: ")
    parser.add_argument(
        "--masks",
        metavar="FILE",
        help="with write, verify, as-of: drop, hash or tokenise fields, as this file declares (extra: masks)",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="with verify: compare N documents of each collection")
    parser.add_argument(
        "--archive",
        metavar="DIR",
        help="with as-of: read entries from this archive, a directory, s3://, az:// or gs://",
    )
    parser.add_argument(
        "--uri",
        metavar="URI",
        help="with as-of: read entries from the deployment's oplog; write and verify take it too",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="with as-of: write the rows to this Parquet file")
    parser.add_argument(
        "--z-order",
        action="append",
        default=[],
        metavar="COLUMN",
        help="with compact: arrange the rows by this column; may be repeated",
    )
    parser.add_argument(
        "--keep", default="7d", metavar="7d", help="with expire: how long replaced files are kept (s, m, h, d)"
    )
    parser.set_defaults(run=run)
    return parser


def _add_forms(parser: argparse.ArgumentParser) -> None:
    """What tables are like: the arguments of ``write`` that are given at each start."""
    parser.add_argument(
        "--change-feed",
        metavar="1d",
        help="with write: keep Delta's change feed for this long (s, m, h, d; default: none)",
    )
    parser.add_argument(
        "--grace",
        default="10m",
        metavar="10m",
        help="with write: replaced files stay for this long (s, m, h, d), for queries that have begun. A shorter time "
        "takes less disk. Give it at each start",
    )
    parser.add_argument(
        "--merge-on-read",
        action="store_true",
        help="with write: mark rows as gone in place of rewriting their files, which writes far fewer bytes. Where "
        "many rows are gone, commits are up to 5 seconds apart. Only readers that know Delta's deletion vectors read "
        "such tables. Give it at each start",
    )
    parser.add_argument(
        "--nested",
        action="store_true",
        help="with write: columns of objects and arrays are structs and lists; without it, JSON. Give it at each start",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises TailraceError."""
    words: list[str] = args.words
    if args.action in {"write", "verify"} and words and args.uri is None and is_uri_argument(words[0]):
        args.uri = words.pop(0)
    if any(map(is_uri, words)):
        where = _URI_STANDS.get(args.action)
        raise WrongUsageError(
            f"the connection URI {where}" if where else f"tailrace tables {args.action} takes no connection URI"
        )
    if args.action == "write":
        return _write(args, words)
    if args.take_over:
        raise WrongUsageError(f"tailrace tables {args.action} writes no tables: --take-over belongs to write")
    if args.compare is not None or args.compare_report is not None:
        raise WrongUsageError(f"tailrace tables {args.action} follows no stream: --compare belongs to write")
    if args.console is not None:
        raise WrongUsageError(f"tailrace tables {args.action} is no service: --console belongs to write")
    if args.iceberg is not None and args.action not in {"verify", "expire"}:
        raise WrongUsageError(
            f"tailrace tables {args.action} asks no catalogue: --iceberg belongs to write, verify and expire"
        )
    if args.masks is not None and args.action not in {"verify", "as-of"}:
        raise WrongUsageError(
            f"tailrace tables {args.action} masks nothing: --masks belongs to write, verify and as-of"
        )
    if args.action == "verify":
        return _verify(args, words)
    if not words:
        raise WrongUsageError(f"tailrace tables {args.action} needs the directory of the tables")
    root = _root(words[0], args)
    if args.action == "status":
        return _status(root, words[1:])
    if args.action == "as-of":
        return _as_of(root, words[1:], args)
    if args.action in {"rebuild", "resync"}:
        return _mark(root, words[1:], args.action)
    return _each(root, words[1:], args)


def _root(word: str, args: argparse.Namespace) -> TablePlace:
    """Where tables are."""
    from tailrace.base.object_place import ObjectPlace  # noqa: PLC0415  as in _place()

    root = _place(word, args)
    if isinstance(root, ObjectPlace):
        if not (root.bucket.beside / "state").is_dir():
            raise UsageError(f"{root.bucket.beside} does not hold the state of tables")
    elif not (root / "_tailrace").is_dir():
        raise UsageError(f"{root} holds no tables of Tailrace")
    return root


def _place(word: str, args: argparse.Namespace) -> TablePlace:
    """Where tables are or are to be."""
    from tailrace.base.object_place import URIS, check_tried, is_object_uri, object_place  # noqa: PLC0415  as above

    check_tried(word)
    if is_object_uri(word):
        if args.state is None:
            raise WrongUsageError(
                "tables in an object store need --state", hint="--state FOLDER: a local folder, the same one each time"
            )
        return object_place(word, beside=args.state)
    if args.state is not None or args.take_over:
        raise WrongUsageError(f"--state and --take-over belong to tables in an object store ({URIS})")
    return local_path(word, "the directory of the tables") if "://" in word else Path(word)


def _masks(args: argparse.Namespace) -> Masks | None:
    """The masks that a file declares. Their key is read now: what is wrong with it is reported first."""
    if args.masks is None:
        return None
    from tailrace.read.source.mask_file import Masks as Declared  # noqa: PLC0415  so that --help loads no PyMongo

    masks = Declared.load(args.masks)
    _ = masks.compiled
    return masks


def _iceberg(args: argparse.Namespace) -> IcebergSettings | None:
    """The catalogue that shows the tables as Iceberg's."""
    if args.iceberg is None:
        return None
    from tailrace.lake.iceberg.settings import IcebergSettings as Named  # noqa: PLC0415  as in _place()

    return Named.of(args.iceberg, "--iceberg")


@contextmanager
def _mirror(root: TablePlace, args: argparse.Namespace) -> Iterator[IcebergMirror]:
    """The tables in that catalogue."""
    from tailrace.lake.tables.iceberg_mirror import mirror_of  # noqa: PLC0415

    mirror = mirror_of(root, _iceberg(args))
    try:
        yield mirror
    finally:
        mirror.close()


def _write(args: argparse.Namespace, words: list[str]) -> int:
    from tailrace.cli.one_shard import warn_of_one_shard  # noqa: PLC0415  so that --help loads no PyMongo
    from tailrace.lake.tables.schema import TableSchema  # noqa: PLC0415  so that --help loads no Arrow
    from tailrace.lake.tables.settings import TableRule, TableSettings  # noqa: PLC0415
    from tailrace.read.source.connection import open_client  # noqa: PLC0415
    from tailrace.read.source.topology import Cluster  # noqa: PLC0415

    if len(words) < 2:
        raise WrongUsageError(
            "tailrace tables write needs URI, directory and collections",
            hint=f"... write URI DIR 'shop.*', or without URI where {URI_VARIABLE} is set",
        )
    rules = tuple(TableRule(pattern, TableSchema(nested=args.nested)) for pattern in words[1:])
    feed_h = 0.0 if args.change_feed is None else parse_duration("--change-feed", args.change_feed) / 3600
    grace_h = parse_duration("--grace", args.grace) / 3600
    settings = TableSettings(
        _place(words[0], args),
        rules,
        take_over=args.take_over,
        feed_h=feed_h,
        grace_h=grace_h,
        merge_on_read=args.merge_on_read,
        masks=_masks(args),
        iceberg=_iceberg(args),
    )
    settings.check()  # before anything is opened
    check_compare(args)
    check_console(args)
    if args.metrics is not None:
        address_of(args.metrics, "--metrics")

    def told(progress: TablesProgress) -> None:
        tell(f"{progress.changes:,} changes, {progress.batches:,} micro-batches")

    uri = find_uri(args.uri)
    with open_client(uri) as client:
        if Cluster.discover(client, uri, {}) is None:
            warn_of_one_shard(client)
    tell(f"tailrace: writing tables of {', '.join(words[1:])} into {words[0]}")
    from tailrace.lake.tables.writer import TablesWriter  # noqa: PLC0415  it may have to be compiled: after the first errors

    with (
        sampled(args, uri, _compared_scope(settings), _comparable) as comparison,
        TablesWriter(uri, settings) as writer,
        _served(writer, args.metrics, comparison),
        _console(args, uri, writer, settings.root),
        _told_of_copy(lambda: writer.progress),
    ):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: call_aside(writer.stop))
        if args.once:
            writer.run_to_present()
        else:
            writer.run(told)
        tell(_told(writer.progress, writer.unmatched, writer.resyncing))
    return 0


@contextmanager
def _told_of_copy(progress: Callable[[], TablesProgress]) -> Iterator[None]:
    """Tell how many documents have been copied, every few seconds, for as long as the tables equal nothing yet."""
    ended = threading.Event()

    def tell_on() -> None:
        before = 0
        while not ended.wait(_COPY_TOLD_S) and (now := progress()).time is None:
            if now.copied != before:
                before = now.copied
                tell(f"{now.copied:,} documents copied")

    teller = threading.Thread(target=tell_on, name="tailrace-copy", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _compared_scope(settings: TableSettings) -> Scope:
    """What all tables are in: a collection, a database, or the deployment."""
    scopes = settings.selection.scopes
    if len(scopes) == 1:
        return scopes[0]
    databases = {scope.database for scope in scopes if scope.database is not None}
    return Scope.cluster() if len(databases) > 1 else Scope.of_database(databases.pop())


def _comparable() -> tuple[Streams, list[str]]:
    """What tables follow: documents and definitions."""
    from tailrace.watch.compare.deployment import Streams  # noqa: PLC0415  as in _write()

    return Streams(show_expanded_events=True), []


@contextmanager
def _console(args: argparse.Namespace, uri: ConnectionString, writer: TablesWriter, root: TablePlace) -> Iterator[None]:
    if args.console is None:
        yield
        return
    from tailrace.lake.tables.metrics import TablesCollector  # noqa: PLC0415

    with console_beside(args, uri, ServiceNumbers(TablesCollector(writer)), tables=[root]):
        yield


@contextmanager
def _served(writer: TablesWriter, metrics: str | None, comparison: SampledComparison | None) -> Iterator[None]:
    with ExitStack() as stack:
        if metrics is not None:
            from tailrace.base.metrics_server import serve_metrics  # noqa: PLC0415
            from tailrace.lake.tables.metrics import TablesCollector  # noqa: PLC0415

            address = address_of(metrics, "--metrics")
            served = serve_metrics(
                TablesCollector(writer), *address, beside=collectors(comparison), health=lambda: _health(writer)
            )
            tell(f"tailrace: statistics at {stack.enter_context(served)}")
        stack.enter_context(notifying(lambda: _health(writer)))
        yield


def _health(writer: TablesWriter) -> Health:
    """Ready once the tables equal their collections at some time, all of them."""
    time, again = writer.progress.time, writer.resyncing
    unready = None if time is not None else _stated(None)
    if unready is None and again:
        unready = f"collections that are being copied again: {len(again):,}"
    return Health(_stated(time), unready=unready)


def _told(progress: TablesProgress, unmatched: list[str], resyncing: list[str]) -> str:
    """What a run ends with. ``unmatched``: the patterns that no collection matches."""
    if progress.time is not None and not progress.tables:
        return f"No collection matches {', '.join(unmatched)}: there is no table yet"
    text = _stated(progress.time) + (f", except {', '.join(resyncing)}, to be copied again" if resyncing else "")
    return text + (f". No collection matches {', '.join(unmatched)}" if unmatched else "")


def _verify(args: argparse.Namespace, words: list[str]) -> int:
    from tailrace.lake.tables.verification import verify  # noqa: PLC0415

    sample: int | None = args.sample
    if not words or (sample is not None and sample < 1):
        raise WrongUsageError("tailrace tables verify needs URI and directory", hint="... verify URI DIR [NAMESPACE]")
    wrong, compared = 0, False
    root, masks = _root(words[0], args), _masks(args)
    for report in verify(root, find_uri(args.uri), words[1:], sample=sample, masks=masks):
        compared = True
        time = f"{report.time.seconds},{report.time.increment}"
        aside = f", {report.quarantined:,} of them in quarantine" if report.quarantined else ""
        if report.good:
            say(f"{report.namespace}: equal at {time}, {report.documents:,} documents compared{aside}")
            continue
        wrong += 1
        for fault in report.faults:
            say(f"{report.namespace}: {fault}")
        for one in report.differences[:_NAMED_MAX]:
            say(f"{report.namespace}: _id {one.id} {one.how}")
        if report.differences:
            count = len(report.differences)
            say(f"{report.namespace}: {count:,} of {report.documents:,} documents differ at {time}{aside}")
    wrong += _verify_iceberg(root, words[1:], args)
    if not compared:
        say("There are no tables: no collection matches")
    if wrong:
        raise SinkError(
            f"{wrong:,} {'table differs' if wrong == 1 else 'tables differ'} from what MongoDB holds",
            hint="`tailrace tables resync` lets the writer copy a collection again",
        )
    return 0


def _verify_iceberg(root: TablePlace, words: list[str], args: argparse.Namespace) -> int:
    """Compare what the catalogue has with the tables. Returns how many differ."""
    from tailrace.lake.tables.delta_table import CollectionTable, tables_in  # noqa: PLC0415
    from tailrace.lake.tables.names import place_of  # noqa: PLC0415

    wrong = 0
    with _mirror(root, args) as mirror:
        for namespace in words or sorted(tables_in(root)) if args.iceberg is not None else ():
            fault = mirror.fault(CollectionTable(place_of(root, namespace), namespace))
            say(f"{namespace}: the Iceberg table {fault or 'has the files of the version that it states'}")
            wrong += fault is not None
    return wrong


def _status(root: TablePlace, words: list[str]) -> int:
    from tailrace.lake.tables.report import report  # noqa: PLC0415  so that --help loads no Arrow

    tables_report = report(root, words, columns=True)
    if tables_report.is_empty:
        say("There are no tables: no collection matches")
        return 0
    say(_stated(tables_report.time))
    for table in tables_report.tables:
        changed, name = table.changed or "never", table.namespace
        say(f"{name}: version {table.version}, {table.rows:,} rows in {table.files:,} files, last changed {changed}")
        if table.trouble is not None:
            say(f"{name}: {table.trouble}")
        say(
            f"  {table.bytes:,} bytes; with older versions {table.bytes_on_disk:,} bytes in {table.files_on_disk:,} "
            f"files, and {table.log_files:,} files of the log"
        )
        for line in table.columns:
            say(f"  {line}")
    return 0


def _as_of(root: TablePlace, words: list[str], args: argparse.Namespace) -> int:
    from tailrace.lake.tables.as_of import as_of  # noqa: PLC0415

    if len(words) != 2:
        raise WrongUsageError("tailrace tables as-of needs directory, namespace and time")
    uri = None if args.uri is None else find_uri(args.uri)
    found = as_of(root, words[0], _moment(words[1]), archive=args.archive, uri=uri, masks=_masks(args))
    tell(
        f"{words[0]} at {found.time.seconds},{found.time.increment}: {found.rows.num_rows:,} rows "
        f"(version {found.version}, and {found.replayed:,} changes of the oplog)"
    )
    if args.out is not None:
        import pyarrow.parquet as pq  # noqa: PLC0415

        pq.write_table(found.rows, args.out)
        return 0
    for text in found.rows.column("_json").to_pylist():
        say("null" if text is None else text)  # bytes that are no document for the codec: they are in _bson
    return 0


def _mark(root: TablePlace, words: list[str], action: str) -> int:
    """``rebuild`` and ``resync``: what the next run does."""
    from tailrace.lake.tables.holding import mark_for_rebuilding  # noqa: PLC0415
    from tailrace.lake.tables.resync import request_resync  # noqa: PLC0415

    if len(words) != 1:
        raise WrongUsageError(f"tailrace tables {action} needs directory and namespace")
    if action == "rebuild":
        mark_for_rebuilding(root, words[0])
        say(f"the next run rewrites {words[0]}")
    else:
        request_resync(root, words[0])
        say(f"the writer, or the next run, copies {words[0]} again")
    return 0


def _each(root: TablePlace, words: list[str], args: argparse.Namespace) -> int:
    """``compact`` and ``expire``. No writer may run meanwhile."""
    from tailrace.lake.store.mirrored import is_mirrored  # noqa: PLC0415
    from tailrace.lake.tables.delta_table import CollectionTable  # noqa: PLC0415
    from tailrace.lake.tables.holding import held_tables  # noqa: PLC0415
    from tailrace.lake.tables.names import place_of  # noqa: PLC0415
    from tailrace.lake.tables.versions import Keeping  # noqa: PLC0415

    with held_tables(root) as namespaces, _mirror(root, args) as mirror:
        for namespace in words or namespaces:
            if namespace not in namespaces:
                raise UsageError(f"{namespace} has no table in {root}")
            table = CollectionTable(place_of(root, namespace), namespace)
            if args.action == "expire":
                keep_s, now_ms = parse_duration("--keep", args.keep), time.time_ns() // 1_000_000
                mirror.follow([table])  # `compact` has made a version that the catalogue has not seen
                mirror.release(table, now_ms - int(keep_s * 1000), patient=True)
                if args.iceberg is None and is_mirrored(table.root):
                    raise UsageError(
                        f"the table of {namespace} has Iceberg snapshots, which would lose their files",
                        hint="Name their catalogue with --iceberg",
                    )
                gone = table.expire(Keeping(keep_s / 3600), now_ms)
                say(f"{namespace}: {len(gone):,} files removed")
                continue
            found = table.compact(z_order=args.z_order, everything=True)
            say(f"{namespace}: {found['numFilesRemoved']} files became {found['numFilesAdded']}")
    return 0


def _moment(text: str) -> datetime | ClusterTime:
    from tailrace.lake.tables.delta_commit import time_of  # noqa: PLC0415

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
