"""The arguments that ``watch`` and ``replay`` share: the server's options as flags, the user's stages, where to end."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import bson
from bson.codec_options import DatetimeConversion
from bson.errors import BSONError
from bson.json_util import CANONICAL_JSON_OPTIONS, JSONOptions, dumps, loads

from tailrace.cli.event_writer import FORMATS
from tailrace.cli.token import parse_time, parse_timestamp, read_token
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.options import BEFORE_CHANGE_MODES, FULL_DOCUMENT_MODES
from tailrace.core.user_text import seconds
from tailrace.errors import UsageError

_PORT_MAX: Final = 65535
#: Flags of the stage that are there or not: the flag, the server's name, the help.
_SWITCHES: Final = (
    ("--show-expanded-events", "showExpandedEvents", "DDL events too: create, createIndexes, modify, ..."),
    ("--show-system-events", "showSystemEvents", "events of system collections too"),
    ("--show-migration-events", "showMigrationEvents", "events of chunk migrations too"),
    ("--show-raw-update-description", "showRawUpdateDescription", "the oplog's own form of updates"),
    (
        "--match-collection-uuid-for-update-lookup",
        "matchCollectionUUIDForUpdateLookup",
        "look up current documents only in the same collection, not in a new one with its name",
    ),
    (
        "--ignore-removed-shards",
        "ignoreRemovedShards",
        "on a cluster: leave out the events of shards that were removed after the stream's start",
    ),
)

#: No command of a driver is longer.
_FILE_BYTES_MAX: Final = 48 << 20
_COUNT_DIGITS_MAX: Final = 18
#: Dates outside Python's years stay numbers.
_ANY_DATE: Final = JSONOptions(datetime_conversion=DatetimeConversion.DATETIME_AUTO)


def add_uri_argument(parser: argparse.ArgumentParser) -> None:
    """Add the connection URI, which ``tailrace.read.source.uri.find_uri`` reads, to a command."""
    parser.add_argument(
        "uri",
        nargs="?",
        metavar="URI",
        help="mongodb://... of a replica set, or of a cluster's config server or mongos; @FILE reads it from a file, "
        "so that no password appears in the list of processes (default: the environment variable TAILRACE_URI)",
    )


def add_stream_arguments(parser: argparse.ArgumentParser, *, more_modes: tuple[str, ...] = ()) -> None:
    """Add the arguments of a change stream to a command. ``more_modes``: modes of images that the server lacks."""
    parser.add_argument(
        "namespace", nargs="?", metavar="db[.coll]", help="a database or a collection (default: the whole cluster)"
    )
    parser.add_argument("--format", choices=FORMATS, help="default: pretty on a terminal, json elsewhere")
    parser.add_argument(
        "--pipeline", metavar="JSON", help="stages after $changeStream, as an array in extended JSON, or @FILE with it"
    )
    parser.add_argument(
        "--collation",
        metavar="JSON",
        help="""how the stages compare strings, such as '{"locale": "en", "strength": 2}'""",
    )
    parser.add_argument(
        "--until",
        metavar="now|TIME|5m|N",
        help="where to end: now, at a time, after a duration (s, m, h, d), or after N events",
    )
    parser.add_argument(
        "--explain", action="store_true", help="instead of events, print the stream's plan and what it has to read"
    )
    group = parser.add_argument_group("options of the change stream")
    add_image_arguments(group, more_modes)
    for flag in ("--resume-after", "--start-after"):
        group.add_argument(flag, metavar="TOKEN", help="a resume token: its _data, or the whole document as JSON")
    group.add_argument("--start-at-operation-time", metavar="TIME", help="T,I (a BSON timestamp) or an ISO date")
    add_switches(group)


def add_image_arguments(group: argparse._ArgumentGroup, more_modes: tuple[str, ...] = ()) -> None:
    """Add what decides which documents an event holds."""
    group.add_argument(
        "--full-document",
        choices=(*FULL_DOCUMENT_MODES, *more_modes),
        help="the document after an update: looked up (updateLookup), or an image (default: none)",
    )
    group.add_argument(
        "--full-document-before-change",
        choices=(*BEFORE_CHANGE_MODES, *more_modes),
        help="the document before the change, as an image (default: none)",
    )


def add_lease_seconds(parser: argparse.ArgumentParser) -> None:
    """Add ``--lease-seconds``, of whatever works under a lease."""
    parser.add_argument(
        "--lease-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="after S seconds without a sign of life, another process may take over (default: 30)",
    )


def add_switches(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the stage that are there or not."""
    for flag, name, help_text in _SWITCHES:
        group.add_argument(flag, dest=name, action="store_true", help=help_text)


def switches_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, by the server's names."""
    return {name: True for _, name, _ in _SWITCHES if getattr(args, name)}


def stage_of(args: argparse.Namespace) -> dict[str, Any]:
    """The document inside ``$changeStream``, by the server's names, with only those options that were given."""
    said: dict[str, Any] = {
        "fullDocument": args.full_document,
        "fullDocumentBeforeChange": args.full_document_before_change,
        "resumeAfter": _token_document(args.resume_after),
        "startAfter": _token_document(args.start_after),
        "startAtOperationTime": (
            None if args.start_at_operation_time is None else read_time(args.start_at_operation_time).to_timestamp()
        ),
    }
    stage = {name: value for name, value in said.items() if value is not None}
    return stage | switches_of(args)


def _token_document(text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    if text.lstrip().startswith('{"snapshot":'):  # from the middle of a copy; the stream checks what is in it
        token: Mapping[str, Any] = _from_json("the resume token", text, "Copy the whole token, in quotes")
        return token
    return bson.decode(read_token(text).to_bson())


def pipeline_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The user's stages."""
    if args.pipeline is None:
        return []
    stages = _from_json("--pipeline", args.pipeline, """Example: '[{"$match": {"ns.coll": "orders"}}]'""")
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise UsageError("--pipeline must be an array of stages", hint="""Example: '[{"$match": {}}]'""")
    return stages


def collation_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """How the stages compare strings, ``None`` where it was not given."""
    if args.collation is None:
        return None
    hint = """Example: '{"locale": "en", "strength": 2}'"""
    collation = _from_json("--collation", args.collation, hint)
    if not isinstance(collation, dict):
        raise UsageError("--collation must be a document", hint=hint)
    return collation


def token_argument(token: bytes) -> str:
    """A token as an argument of ``--resume-after``: its ``_data``, or quoted JSON where there is more in it."""
    parsed = ResumeToken.parse(token)
    if parsed.type_bits is None:
        return parsed.data
    return shlex.quote(dumps(parsed.to_document(), json_options=CANONICAL_JSON_OPTIONS))


def _from_json(flag: str, text: str, hint: str) -> Any:
    if text.startswith("@"):
        text = file_text(flag, text[1:])
    try:
        return loads(text, json_options=_ANY_DATE)
    except (ValueError, TypeError, ArithmeticError, BSONError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON: {error}", hint=hint) from None


def file_text(flag: str, name: str) -> str:
    """The text of the file that ``@name`` stands for. Raises UsageError."""
    where = f"{flag} cannot be read from the file {name!r}"
    if not name or "\0" in name:
        raise UsageError(f"{where}: that is not the name of a file", hint="Write @ and the path of the file")
    try:
        with Path(name).open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
        text = raw.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{where}: {reason}") from None
    if len(raw) > _FILE_BYTES_MAX:
        raise UsageError(f"{where}: it is longer than a command may be, {_FILE_BYTES_MAX >> 20} MB")
    return text


def read_time(text: str) -> ClusterTime:
    """``T,I`` or an ISO 8601 date and time."""
    head = text.partition(",")[0]
    return parse_timestamp(text) if head.strip().isdigit() and "," in text else parse_time(text)


def _seconds(text: str) -> int | None:
    duration_s = seconds(text)
    return None if duration_s is None or not duration_s.is_integer() else int(duration_s)


def parse_duration(flag: str, text: str) -> int:
    """The seconds that a duration such as 30s, 5m, 12h or 7d means."""
    duration_s = _seconds(text)
    if duration_s is None:
        raise UsageError(f"{flag} {text} is not a duration", hint="Such as 30s, 5m, 12h or 7d")
    return duration_s


@dataclass
class Until:
    """Where to end: after ``events`` more events, or when everything up to ``time`` was given."""

    time: ClusterTime | None = None
    events: int | None = None

    @classmethod
    def parse(cls, text: str | None, now: ClusterTime | None) -> Until:
        """``now`` is the time that the word stands for; ``None`` where the source itself ends there."""
        if text is None:
            return cls()
        if text == "now":
            return cls(time=now)
        if text.isascii() and text.isdigit():
            if len(text) > _COUNT_DIGITS_MAX:
                raise UsageError(f"--until: {len(text)} digits are too many for a number of events")
            return cls(events=int(text))
        seconds = _seconds(text)
        if seconds is not None:
            return cls(time=ClusterTime.of(min(int(time.time()) + seconds, 0xFFFFFFFF), 0))
        try:
            return cls(time=read_time(text))
        except UsageError as error:
            raise UsageError(
                f"--until: {error.message}",
                hint="Give now, a number of events, a time, or a duration such as 30s or 5m",
            ) from None

    def is_before(self, event_token: bytes) -> bool:
        """Whether the event with this token lies after the end."""
        return self.time is not None and ResumeToken.parse(event_token).cluster_time > self.time

    def count(self) -> None:
        if self.events is not None:
            self.events -= 1

    @property
    def all_counted(self) -> bool:
        return self.events is not None and self.events <= 0


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > _PORT_MAX:
        raise UsageError(f"{option}: {text!r} is not an address", hint="Write it as HOST:PORT, such as 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)
