"""The gateway's log: each line is an event with its fields, as text or as JSON.

The caller gives the event's name as the message, and the fields as ``extra={"fields": {...}}``. The log may contain
users' names and namespaces, but never documents, tokens, commands or passwords.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
from datetime import UTC, datetime
from typing import Any, Final

from tailrace.core.printable import in_a_line, printable

LOGGER: Final = "tailrace.gateway"
_NEEDS_QUOTES: Final = re.compile(r'[\s="\\]|^$')

_log = logging.getLogger(LOGGER)


def log_to_standard_error(form: str) -> None:
    """Log what the gateway does to standard error, from INFO on. ``form``: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    _log.handlers[:] = [handler]
    _log.setLevel(logging.INFO)
    _log.propagate = False


def note(event: str, **fields: Any) -> None:
    """Log an event, if anything listens."""
    if _log.isEnabledFor(logging.INFO):
        _log.info(event, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """``{"time": ..., "level": ..., "event": ..., fields}``; the time is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["fault"] = self.formatException(record.exc_info)
        return in_a_line(json.dumps(line, ensure_ascii=False, default=str))


class TextLines(logging.Formatter):
    """``time level event name=value ...``; the time is UTC. A value is quoted where it could be taken for another
    field, and no value makes a second line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_value(value)}" for name, value in getattr(record, "fields", {}).items())
        text = in_a_line(f"{_time(record)} {record.levelname.lower()} {record.getMessage()}{fields}")
        if not record.exc_info:
            return text
        # Indented: no line of it can be taken for one of the log.
        return f"{text}\n{textwrap.indent(printable(self.formatException(record.exc_info)), '  ')}"


def _value(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if _NEEDS_QUOTES.search(text) else text


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
