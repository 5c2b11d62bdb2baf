"""Change events on standard output: readable, a line of JSON each, or their exact bytes."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from bson.json_util import RELAXED_JSON_OPTIONS, dumps
from bson.timestamp import Timestamp

from tailrace.cli.output import ColourTerminal, reader_is_gone, say, tell
from tailrace.errors import UsageError

if TYPE_CHECKING:
    from tailrace.read.source.mask_file import Masks

FORMATS: Final = ("pretty", "json", "bson")

#: Decodes whatever a server may store: dates outside Python's years stay numbers, text that is not UTF-8 is mended.
_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)
_COLOURS: Final = {
    "insert": "green",
    "update": "yellow",
    "replace": "yellow",
    "delete": "red",
    "drop": "bold red",
    "dropDatabase": "bold red",
    "rename": "magenta",
    "invalidate": "bold red",
}


class EventWriter(ABC):
    """Writes events to standard output. ``flush`` before waiting, so that a reader sees what there is."""

    @abstractmethod
    def write(self, event: bytes) -> None: ...

    def flush(self) -> None:
        sys.stdout.flush()

    @staticmethod
    def reader_is_gone() -> bool:
        """Whether standard output is a pipe that nobody reads any more; known without writing."""
        return reader_is_gone()


class _BsonWriter(EventWriter):
    def write(self, event: bytes) -> None:
        sys.stdout.buffer.write(event)

    def flush(self) -> None:
        sys.stdout.buffer.flush()


class MaskingWriter(EventWriter):
    """Masks every event before ``writer`` writes it."""

    def __init__(self, writer: EventWriter, masks: Masks) -> None:
        self._writer = writer
        self._masks = masks.compiled

    def write(self, event: bytes) -> None:
        self._writer.write(self._masks.event(event))

    def flush(self) -> None:
        self._writer.flush()


class _JsonWriter(EventWriter):
    def __init__(self) -> None:
        # Other encodings miss characters; JSON has its own way to write those.
        self._ascii = "utf" not in (sys.stdout.encoding or "").lower()

    def write(self, event: bytes) -> None:
        say(dumps(_decoded(event), json_options=RELAXED_JSON_OPTIONS, ensure_ascii=self._ascii))


class _PrettyWriter(EventWriter):
    """A line that says when, what and where, and the event below it; in colour on a terminal."""

    def __init__(self) -> None:
        self._terminal = ColourTerminal() if sys.stdout.isatty() else None

    def write(self, event: bytes) -> None:
        document = _decoded(event)
        kind = str(document.get("operationType", "event"))
        title = f"{_when(document):<23} {kind:<10} {_where(document)}"
        body = dumps(document, json_options=RELAXED_JSON_OPTIONS, ensure_ascii=False, indent=2)
        if self._terminal is None:
            say(title)
            say(f"{body}\n", lines=True)
        else:
            self._terminal.say(title, _COLOURS.get(kind, "cyan"))
            self._terminal.say_json(body)


def new_writer(form: str | None) -> EventWriter:
    """The writer of a ``--format``; by default pretty on a terminal and JSON elsewhere."""
    chosen = form or ("pretty" if sys.stdout.isatty() else "json")
    if chosen == "bson":
        return _BsonWriter()
    return _PrettyWriter() if chosen == "pretty" else _JsonWriter()


def _decoded(event: bytes) -> dict[str, Any]:
    try:
        return bson.decode(event, codec_options=_ANY_VALUE)
    except (BSONError, ValueError, TypeError) as error:
        raise UsageError(f"an event cannot be shown: {error}", hint="Use --format bson") from None


def _when(document: dict[str, Any]) -> str:
    wall = document.get("wallTime")
    if wall is not None and hasattr(wall, "isoformat"):
        return str(wall.isoformat(sep=" ", timespec="milliseconds"))
    time = document.get("clusterTime")
    return str(time.as_datetime().replace(tzinfo=None)) if isinstance(time, Timestamp) else ""


def _where(document: dict[str, Any]) -> str:
    namespace = document.get("ns")
    if not isinstance(namespace, dict):
        return ""
    name = ".".join(str(namespace[part]) for part in ("db", "coll") if part in namespace)
    key = document.get("documentKey")
    return f"{name} {dumps(key, json_options=RELAXED_JSON_OPTIONS)}" if key is not None else name


def say_skipped(unknown_operations: Mapping[str, int]) -> None:
    """Say which entries gave no events because this version does not know their kinds; silent where there are none."""
    if unknown_operations and sys.stderr is not None:
        named = ", ".join(f"'{kind}' ({count})" for kind, count in sorted(unknown_operations.items()))
        tell(f"tailrace: skipped oplog entries of kinds that this version does not know: {named}")
