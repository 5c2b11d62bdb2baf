"""What all commands print for people and for other programs: escaped, and only to streams that are there.

No other module of the commands calls ``print`` or writes text to a standard stream; ``tests/tidy/test_output.py`` holds
that. Exact bytes (``--format bson``) go to ``sys.stdout.buffer``, and are exact.
"""

from __future__ import annotations

import select
import sys
from contextlib import suppress
from typing import TextIO

from tailrace.printable import in_a_line, printable


def say(text: object = "", *, before: str = "", lines: bool = False, flush: bool = False) -> None:
    """Print ``text`` to standard output: a line, in which a newline is escaped too, or ``lines`` (JSON with indents).
    ``before`` is ours and not escaped. Raises OSError."""
    sys.stdout.write(f"{before}{printable(str(text)) if lines else in_a_line(text)}\n")
    if flush:
        sys.stdout.flush()


def tell(text: object = "", *, before: str = "", lines: bool = False, stream: TextIO | None = None) -> None:
    """Print ``text``, as ``say`` does, to standard error, or ``stream`` in its place. Where that is closed or full
    nobody can be told, and the work goes on: ``print`` would take standard output for a stream that is not there."""
    _write(stream, f"{before}{printable(str(text)) if lines else in_a_line(text)}\n")


def show_progress(text: object, *, stream: TextIO | None = None) -> None:
    """A line of a terminal that the next one overwrites, on standard error or ``stream``."""
    _write(stream, f"\r{in_a_line(text)}\x1b[K")


def _write(stream: TextIO | None, text: str) -> None:
    target = stream if stream is not None else sys.stderr
    if target is not None:
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a signal comes in the middle of a write
            target.write(text)
            target.flush()


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more; known without writing."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):
        return False
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))
