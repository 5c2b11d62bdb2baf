"""``tailrace lake``: show, check and maintain a lake, without Spark, also while a stream writes it."""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bson.errors import InvalidBSON

from tailrace.cli.lake_shown import named_catalogue, released, shown_in
from tailrace.cli.output import say
from tailrace.cli.stream_arguments import file_text, parse_duration
from tailrace.cli.usage import WrongUsageError
from tailrace.core.plan.profile import for_people
from tailrace.errors import UsageError
from tailrace.lake.store.mirrored import is_mirrored

if TYPE_CHECKING:
    from tailrace.lake.iceberg.settings import IcebergSettings
    from tailrace.lake.store.lake_root import LakeRoot
    from tailrace.lake.store.retention import Release
    from tailrace.lake.store.verification import LakeReport

_DESCRIPTION = """\
Show, check and maintain the lake in DIR, which `tailrace run` or write_stream keeps. No action needs Spark, and a
running stream and its readers need not stop, except for change.

  status DIR     events, files, days, the last micro-batch and its lag
  verify DIR     check log, files, rows and order; exit status 1 if something is wrong
  compact DIR    merge small files, including those of the quarantine
  expire DIR     remove the files that were replaced longer ago than --keep; with --older-than 90d, first
                 take out all days that ended longer ago than that
  erase DIR --match '{"ns.coll": "customers", "documentKey._id": 5}'
                 take out every event that the $match selects, whatever its age; --dry-run shows what would go
  change PIPELINE.yaml
                 make a lake match its pipeline file again: other columns, or a wider stream, whose events are
                 backfilled from the archive and the oplog; stop the stream first. Of a lake in an object store the
                 file names the state directory"""
_ACTIONS = ("status", "verify", "compact", "expire", "erase", "change")
#: The flags that say nothing to the other actions.
_FLAGS_OF = {
    "format": ("status",),
    "full": ("verify",),
    "target_bytes": ("compact",),
    "accept_lost": ("compact",),
    "keep": ("compact", "expire"),
    "older_than": ("expire",),
    "match": ("erase",),
    "vacuum": ("erase",),
    "dry_run": ("erase", "change"),
    "all": ("erase",),
    "archive": ("change",),
    "from_now": ("change",),
    "iceberg": ("verify", "compact", "expire", "erase"),
    "state": ("status", "verify", "compact", "expire", "erase"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "lake",
        help="show, check and maintain a lake",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    parser.add_argument(
        "lake",
        metavar="DIR",
        help="the lake's directory, or s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX; "
        "with change: a pipeline file",
    )
    parser.add_argument(
        "--state",
        metavar="DIR",
        type=Path,
        help="the local directory of a lake in an object store: compact, expire and erase need it, and verify compares "
        "with the checkpoint in it",
    )
    parser.add_argument("--format", choices=("text", "json"), help="with status (default: text)")
    parser.add_argument(
        "--full", action="store_const", const=True, help="with verify: compare every byte with the hash in the log"
    )
    parser.add_argument(
        "--keep",
        metavar="7d",
        help="with compact and expire: how long replaced files are kept for readers (s, m, h, d; at most 30d)",
    )
    parser.add_argument(
        "--target-bytes", type=int, metavar="N", help="with compact: merge files up to this size (default: 128 MB)"
    )
    parser.add_argument(
        "--accept-lost",
        action="store_const",
        const=True,
        help="with compact: let the quarantine of a lake on a disk go on without its files that are lost for good",
    )
    parser.add_argument(
        "--older-than", metavar="90d", help="with expire: remove the days that ended longer ago than this (s, m, h, d)"
    )
    _add_erasing_and_changing(parser)
    parser.add_argument(
        "--iceberg",
        metavar="CATALOG",
        help="with verify, compact, expire, erase: the lake, on a disk or in s3://, is an Iceberg table too, in the "
        "catalogue with this URI (sqlite:///FILE, https://HOST) or this name in .pyiceberg.yaml (extra: iceberg)",
    )
    parser.set_defaults(run=run)
    return parser


def _add_erasing_and_changing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--match",
        metavar="JSON",
        help="with erase: a $match on the events, as in a change stream's pipeline; Extended JSON, or @FILE",
    )
    parser.add_argument(
        "--vacuum",
        action="store_const",
        const=True,
        help="with erase: remove all replaced files at once, so that no file holds the events any more; readers that "
        "opened the lake earlier then fail",
    )
    parser.add_argument(
        "--dry-run",
        action="store_const",
        const=True,
        help="with erase: print how many events would be erased, from which collections and files; with change: what "
        "would be changed; change nothing",
    )
    parser.add_argument(
        "--all",
        action="store_const",
        const=True,
        help="with erase: allow every event of the lake to be removed; otherwise a $match that selects all is refused",
    )
    parser.add_argument(
        "--archive",
        metavar="DIR",
        help="with change: read from this archive what the oplog no longer has, whatever the file says; a directory, "
        "s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX",
    )
    parser.add_argument(
        "--from-now",
        action="store_const",
        const=True,
        help="with change: backfill nothing; the wider stream begins where the lake's stream stands",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 1 where ``verify`` found a problem; raises TailraceError."""
    for flag, actions in _FLAGS_OF.items():
        if getattr(args, flag) is not None and args.action not in actions:
            raise WrongUsageError(f"--{flag.replace('_', '-')} belongs to tailrace lake {' and '.join(actions)}")
    if args.action == "change":
        from tailrace.cli.lake_change import change  # noqa: PLC0415

        return change(Path(args.lake), args.archive, from_now=bool(args.from_now), dry_run=bool(args.dry_run))
    from tailrace.lake.store.lake_root import given_root  # noqa: PLC0415  so that --help is quick

    args.lake = given_root(args.lake, args.state)
    if args.action == "status":
        return _status(args.lake, args.format)
    iceberg = named_catalogue(args.iceberg)
    if args.action == "verify":
        return print_verification(args.lake, full=bool(args.full), iceberg=iceberg)
    with shown_in(args.lake, None if args.dry_run else iceberg) as mirror:
        return _maintain(args, released(mirror))


def _maintain(args: argparse.Namespace, release: Release | None) -> int:
    if args.action == "erase":
        return _erase(args, release)
    retention = timedelta(seconds=parse_duration("--keep", "7d" if args.keep is None else args.keep))
    if args.action == "compact":
        if args.accept_lost:
            _accept_lost(args.lake)
        target_bytes = 128 << 20 if args.target_bytes is None else args.target_bytes
        return print_compaction(args.lake, target_bytes=target_bytes, retention=retention, release=release)
    from tailrace.lake.store.retention import check_released, expire  # noqa: PLC0415  so that --help loads no Arrow

    check_released(args.lake, release)
    if args.older_than is not None:
        _drop_days(args.lake, parse_duration("--older-than", args.older_than))
    say(f"{_counted(expire(args.lake, retention, release=release), 'replaced file')} removed")
    return 0


def _drop_days(root: LakeRoot, seconds: float) -> None:
    from tailrace.lake.store.erasure import drop_days  # noqa: PLC0415

    try:
        before = (datetime.now(UTC) - timedelta(seconds=seconds)).date()
    except OverflowError:
        raise WrongUsageError("--older-than reaches back to before the first year") from None
    report = drop_days(root, before)
    say(f"{_counted(report.rows, 'event')} of the days before {before} taken out, in {_counted(report.files, 'file')}")


def _erase(args: argparse.Namespace, release: Release | None) -> int:
    from tailrace.lake.store.erasure import erase  # noqa: PLC0415

    if args.match is None:
        raise WrongUsageError("tailrace lake erase needs --match: which events to take out")
    match = _read_match(args.match)
    if args.dry_run:
        return _show_erasure(args.lake, match)
    erasure = erase(args.lake, match, vacuum=bool(args.vacuum), everything=bool(args.all), release=release)
    say(f"{_counted(erasure.rows, 'event')} erased, of {erasure.searched:,}, in {_counted(erasure.files, 'file')}")
    if erasure.rows:
        say(f"  from token {erasure.first_token}")
        say(f"  to token {erasure.last_token}")
    if erasure.quarantined:
        say(f"  {_counted(erasure.quarantined, 'event')} erased from the quarantine")
    if erasure.removed:
        say(f"  {_counted(erasure.removed, 'replaced file')} removed")
    if erasure.replaced:
        size = _counted(erasure.replaced, "replaced file")
        remedy = f"tailrace lake expire {shlex.quote(str(args.lake))} --keep 0s, or --vacuum next time"
        say(f"  {size} may still hold erased events ({remedy})")
    if erasure.rows and release is None and is_mirrored(args.lake):
        say("  Iceberg snapshots name them, or have lost them, until a run or a command with --iceberg")
    return 0


def _show_erasure(root: LakeRoot, match: dict[str, Any]) -> int:
    from tailrace.lake.store.erasure_preview import preview  # noqa: PLC0415

    erasable = preview(root, match)
    files = _counted(len(erasable.files), "file")
    say(f"{_counted(erasable.rows, 'event')} of {erasable.searched:,} would be erased, in {files}; nothing was changed")
    for name, rows in sorted(erasable.collections.items()):
        say(f"  {name}: {_counted(rows, 'event')}")
    for file in erasable.files:
        say(f"  {file.name}: {file.rows:,} of {_counted(file.of, 'event')}")
    if erasable.quarantined:
        say(f"  {_counted(erasable.quarantined, 'event')} would be erased from the quarantine")
    return 0


def _read_match(text: str) -> dict[str, Any]:
    from bson import json_util  # noqa: PLC0415

    if text.startswith("@"):
        try:
            text = file_text("--match", text[1:])
        except UsageError as error:
            raise WrongUsageError(error.message, hint=error.hint) from None
    try:
        value = json_util.loads(text, json_options=json_util.CANONICAL_JSON_OPTIONS)
    except (ValueError, TypeError, RecursionError, InvalidBSON) as error:
        raise WrongUsageError(f"--match is not Extended JSON: {error}") from None
    if not isinstance(value, dict):
        raise WrongUsageError('--match must be a document such as {"documentKey._id": 5}')
    return value


def _status(root: LakeRoot, form: str) -> int:
    from tailrace.lake.store.status import lake_status  # noqa: PLC0415

    status = lake_status(root)
    if form == "json":
        say(json.dumps(status.to_json()))
        return 0
    say(f"{root}: {_counted(status.rows, 'event')} in {_counted(status.files, 'file')}, {status.size:,} bytes")
    for name, value in status.stream.items():
        say(f"  {name}: {_short(value)}")
    if status.first_day is not None:
        say(f"  days: {status.days:,}, from {status.first_day} to {status.last_day}")
    if status.last_commit is not None:
        lag = "" if status.lag_ms is None else f", {status.lag_ms / 1000:.1f} s after its last event was written"
        say(f"  last micro-batch: {status.last_commit:%Y-%m-%d %H:%M:%S} UTC{lag}")
        say(f"  last event: cluster time {status.last_time}, token {status.last_token}")
    for note in status.versions:
        say(f"  events of MongoDB {for_people(note.version)}: after cluster time {note.after}")
    say(f"  commits: {status.commits:,}; {_counted(status.small, 'file')} below 16 MB (tailrace lake compact)")
    if status.quarantined:
        say(f"  {_counted(status.quarantined, 'event')} in quarantine (_quarantine: the reason and the event)")
    if status.replaced:
        size = f"{status.replaced_bytes:,} bytes"
        say(f"  {_counted(status.replaced, 'replaced file')} kept for readers, {size} (tailrace lake expire)")
    for gap in status.gaps:
        say(f"  accepted gap: {gap}")
    for erasure in status.erasures:
        say(f"  erasure: {erasure}")
    for change in status.changes:
        say(f"  change: {change}")
    return 0


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def print_compaction(root: LakeRoot, *, target_bytes: int, retention: timedelta, release: Release | None = None) -> int:
    """Compact a lake and print how many files there were and are."""
    from tailrace.lake.store.compaction import compact  # noqa: PLC0415

    result = compact(root, target_bytes=target_bytes, retention=retention, release=release)
    say(
        f"{result.files_before} files became {result.files_after} "
        f"({result.bytes_before:,} bytes before, {result.bytes_after:,} after)"
    )
    if result.aside_before:
        say(f"  in the quarantine, {_counted(result.aside_before, 'file')} became {result.aside_after:,}")
    return 0


def _accept_lost(root: LakeRoot) -> None:
    from tailrace.lake.store.compaction import accept_lost  # noqa: PLC0415

    lost = accept_lost(root)
    if lost is None:
        say("the quarantine's ledger begins again: what is there counts, and what was lost before is not known")
    else:
        say(f"the quarantine goes on without {_counted(lost, 'lost file')}")


def print_verification(
    root: LakeRoot, *, full: bool, checkpoint: Path | None = None, iceberg: IcebergSettings | None = None
) -> int:
    """Verify a lake against the ``checkpoint`` of its stream and its table in a catalogue, and print what was found.
    Returns 1 where something is wrong."""
    from tailrace.lake.store.verification import verify  # noqa: PLC0415

    report = verify(root, full=full, checkpoint=checkpoint)
    if iceberg is not None:
        _verify_iceberg(root, iceberg, report)
    for problem in report.problems:
        say(problem)
    for gap in report.gaps:
        say(f"accepted gap: {gap}")
    for erasure in report.erasures:
        say(f"erasure: {erasure}")
    for change in report.changes:
        say(f"change: {change}")
    if report.quarantined:
        say(f"{_counted(report.quarantined, 'event')} in quarantine")
    if report.replaced:
        say(f"{_counted(report.replaced, 'replaced file')} kept for readers (compaction.retention)")
    if report.leftovers:
        say(f"{_counted(report.leftovers, 'file')} of running or interrupted work, in no commit")
    state = "sound" if report.sound else _counted(len(report.problems), "problem")
    if report.sound and not full:
        state += " (order, counts and tokens; --full compares every byte)"
    say(
        f"{root}: {_counted(report.rows, 'event')} in {_counted(report.files, 'file')} of "
        f"{_counted(report.days, 'day')}: {state}"
    )
    return 0 if report.sound else 1


def _verify_iceberg(root: LakeRoot, iceberg: IcebergSettings, report: LakeReport) -> None:
    from tailrace.lake.iceberg.lake_mirror import LakeMirror as Mirror  # noqa: PLC0415

    mirror = Mirror(root, iceberg)
    try:
        fault = mirror.fault()
    finally:
        mirror.close()
    if fault is not None:
        report.add(f"the Iceberg table {fault}")
    else:
        say("the Iceberg table has the files of the commit that it states")


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
