"""What all commands print for people and for other programs: escaped, and only to streams that are open.

No other module of the commands calls ``print``, of a console either, or writes text to a standard stream;
``tests/tidy/test_output.py`` holds that. Exact bytes (``--format bson``) go to ``sys.stdout.buffer``, and are exact.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TextIO

from tailrace.core.printable import in_a_line, printable

#: How many characters a line of a table has at least.
_TABLE_WIDTH: Final = 100


def say(text: object = "", *, before: str = "", lines: bool = False, flush: bool = False) -> None:
    """Print ``text`` to standard output: a line, in which a newline is escaped too, or ``lines`` (JSON with indents).
    ``before`` is ours and not escaped. Raises OSError."""
    sys.stdout.write(f"{before}{printable(str(text)) if lines else in_a_line(text)}\n")
    if flush:
        sys.stdout.flush()


def tell(text: object = "", *, before: str = "", lines: bool = False, stream: TextIO | None = None) -> None:
    """Print ``text``, as ``say`` does, to standard error, or ``stream`` in its place. Where that is closed or full
    there is nobody to tell, and the work goes on: ``print`` would take standard output for a stream that is not
    there."""
    _write(stream, f"{before}{printable(str(text)) if lines else in_a_line(text)}\n")


def show_progress(text: object, *, stream: TextIO | None = None) -> None:
    """A line of a terminal that the next one overwrites, on standard error or ``stream``."""
    _write(stream, f"\r{in_a_line(text)}\x1b[K")


class ColourTerminal:
    """Standard output as a terminal that shows colours. NO_COLOR takes them, and bold too."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  costs 50 ms that a pipe need not pay

        plain = bool(os.environ.get("NO_COLOR"))
        self._console: Any = Console(soft_wrap=True, no_color=plain, color_system=None if plain else "auto")

    def say(self, text: str, style: str) -> None:
        """A line in a style of rich's; otherwise as ``say``."""
        from rich.text import Text  # noqa: PLC0415

        self._console.print(Text(in_a_line(text), style=style))

    def say_json(self, text: str) -> None:
        """JSON with indents, and an empty line after it."""
        from rich.highlighter import JSONHighlighter  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        # Not rich's JSON, which parses it and rewrites it: escaped characters would be there again.
        self._console.print(JSONHighlighter()(Text(printable(text))))
        self._console.print()


def say_table(columns: Mapping[str, Literal["left", "right"]], rows: Iterable[Iterable[object]]) -> None:
    """A table with these columns, and how each is aligned; a cell is escaped as a line of ``say``."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for name, justify in columns.items():
        table.add_column(name, justify=justify)
    for row in rows:
        table.add_row(*map(in_a_line, row))
    Console(width=max(_TABLE_WIDTH, Console().width), markup=False).print(table)


def _write(stream: TextIO | None, text: str) -> None:
    target = stream if stream is not None else sys.stderr
    if target is not None:
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a signal comes in the middle of a write
            target.write(text)
            target.flush()


class Screen:
    """The whole of a terminal, on which a look takes the place of the one before it. ``size``: columns and lines."""

    def __init__(self, size: Callable[[], tuple[int, ...]]) -> None:
        self._size = size
        self._plain = bool(os.environ.get("NO_COLOR"))
        sys.stdout.write("\x1b[?1049h\x1b[?25l")  # another screen, no cursor

    def show(self, lines: Sequence[str]) -> None:
        """Show as many of the lines as there is room for. The first one, and those in capitals, stand out."""
        width, height = self._size()
        shown = []
        for number, line in enumerate(lines[: height - 1]):
            text = in_a_line(line)[:width]
            stands_out = not self._plain and (number == 0 or text.partition(" ")[0].rstrip(":,").isupper())
            shown.append(f"\x1b[1m{text}\x1b[0m\x1b[K" if stands_out else f"{text}\x1b[K")
        sys.stdout.write("\x1b[H" + "\r\n".join(shown) + "\x1b[J")
        sys.stdout.flush()

    def close(self) -> None:
        """Give the terminal back as it was."""
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more; known without writing."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):
        return False
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))
