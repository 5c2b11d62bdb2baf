"""The page of benchmarks, made by one command: each question is asked of its own program, in a process of its own.

    make bench-page                        an hour: what docs/reference/benchmarks.md holds
    python bench/page.py --quick           a few minutes: small amounts, to see that all of it works
    python bench/page.py --only watch      some of them; the others are left out of the page
    python bench/page.py --out page.md     somewhere else
    python bench/page.py --keep DIR        keeps what each program prints; one that was cut off goes on where it was

A table's figures are cut out of what the program prints; the site draws them as bars. If a program prints no such table
or ends with an error other than a missed bar, no page is written. Both sides of each table are from the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.embedded.binary import DEFAULT_VERSION

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parent / "docs" / "reference" / "benchmarks.md"
_TIMEOUT_S: Final = 3600.0
#: What a program says of a bar of its own.
_VERDICTS: Final = ("met", "MISSED")


@dataclass(frozen=True)
class Column:
    """A column of a printed table: what the page calls it, and the characters of the line that hold it."""

    name: str
    first: int
    end: int


@dataclass(frozen=True)
class Question:
    """One section of the page.

    ``header`` begins the line before the rows; ``skip`` further lines belong to it. ``bars`` is what the site draws: a
    title, and columns by their number. ``has``: only rows with these words.
    """

    program: str
    title: str
    words: str
    columns: tuple[Column, ...]
    header: str
    bars: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    skip: int = 0
    has: str = ""

    def arguments(self, *, quick: bool) -> tuple[str, ...]:
        return self.quick if quick else self.full


QUESTIONS: Final = (
    Question(
        "transform",
        "What an event costs",
        "Microseconds of CPU for one event. mongod makes the events of its own change stream; the plain stages are the "
        "reference in Python, and the kernel is what runs.",
        (Column("stream", 0, 44), Column("mongod", 44, 53), Column("plain stages", 53, 62), Column("kernel", 62, 71)),
        header="stream, CPU us an event",
        bars="CPU for one event, µs; 2 mongod; 4 kernel",
        quick=("--entries", "12000", "--rounds", "1"),
    ),
    Question(
        "watch",
        "How fast `watch()` is",
        "Events a second in one process, with PyMongo's stream beside ours, over the same entries.",
        (Column("read as", 0, 36), Column("native", 36, 46), Column("ours", 46, 56), Column("ratio", 56, 63)),
        header=" " * 36 + "            events/s",
        skip=1,
        bars="events a second; 2 native; 3 ours",
        full=("--no-cluster", "--no-latency"),
        quick=("--no-cluster", "--no-latency", "--entries", "20000", "--rounds", "1"),
    ),
    Question(
        "streams",
        "What many streams cost the server",
        "Seconds of mongod's CPU that streams add while others write, each stream on a collection of its own, and the "
        "milliseconds from a write to its event.",
        (
            Column("streams", 0, 17),
            Column("mongod, s", 17, 27),
            Column("p50, ms", 50, 58),
            Column("p99, ms", 58, 66),
        ),
        header=" streams side",
        bars="seconds of CPU that streams add to mongod; 2 mongod",
        quick=("--streams", "1", "10", "--native-max", "10", "--writes", "600"),
    ),
    Question(
        "latency",
        "How long an event takes through the gateway",
        "Milliseconds from an acknowledged write to its event in a PyMongo client.",
        (Column("side", 0, 10), Column("p50, ms", 10, 18), Column("p99, ms", 18, 26)),
        header="side",
        bars="ms from the write to the event, median; 2 p50",
        quick=("--writes", "300"),
    ),
    Question(
        "tables",
        "How fast changes become a table",
        "Documents and changes a second into Delta tables that equal their collections, beside a loop of the kind that "
        "people write by hand.",
        (Column("what", 0, 14), Column("a second", 14, 26)),
        header="",
        has="/s",
        bars="a second; 2 rate",
        quick=("--changes", "20000", "--documents", "5000", "--loop", "2000"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small amounts: minutes in place of an hour")
    parser.add_argument("--only", nargs="+", choices=[one.program for one in QUESTIONS], help="some of them")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep each program's output; take what is kept there")
    parser.add_argument("--out", type=Path, default=PAGE, help="default: docs/reference/benchmarks.md")
    args = parser.parse_args()
    asked = [one for one in QUESTIONS if args.only is None or one.program in args.only]
    begun, load, took = time.time(), os.getloadavg()[0], 0.0
    sections = []
    for question in asked:
        words = question.arguments(quick=args.quick)
        print(f"{command_of(question, words)} ...", file=sys.stderr, flush=True)
        kept = None if args.keep is None else args.keep / f"{question.program}.json"
        text, seconds = kept_or_printed(question, words, kept)
        sections.append(section(question, words, text))
        took += seconds
    head = introduction(begun, load, took, quick=args.quick)
    args.out.write_text("\n".join([head, *sections]), encoding="utf-8")
    print(f"written: {args.out}", file=sys.stderr)
    return 0


def command_of(question: Question, words: Sequence[str]) -> str:
    return " ".join(["python", f"bench/{question.program}.py", *words])


def kept_or_printed(question: Question, words: Sequence[str], kept: Path | None) -> tuple[str, float]:
    """What the program has printed, with these words, and the seconds that it took."""
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["command"] == command_of(question, words):
            return str(found["printed"]), float(found["seconds"])
    begun = time.monotonic()
    text = printed(question, words)
    seconds = time.monotonic() - begun
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = {"command": command_of(question, words), "seconds": seconds, "printed": text}
        kept.write_text(json.dumps(found), encoding="utf-8")
    return text, seconds


def printed(question: Question, words: Sequence[str]) -> str:
    """What the program prints. 1 is the exit status for a bar that is missed."""
    done = subprocess.run(
        [sys.executable, str(HERE / f"{question.program}.py"), *words],
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"bench/{question.program}.py ended with {done.returncode}")
    return done.stdout


def introduction(begun: float, load: float, took: float, *, quick: bool) -> str:
    date = time.strftime("%Y-%m-%d", time.gmtime(begun))
    minutes = took / 60
    busy = f"load {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end"
    small = "**A quick run, of small amounts: it shows that the programs work, and the figures only roughly.**\n\n"
    return (
        "# Benchmarks\n\n"
        f"Written by `make bench-page{' ARGS=--quick' if quick else ''}` on {date}, in {minutes:.0f} minutes,\n"
        f"on {os.cpu_count()} shared cores ({busy}), with Python {platform.python_version()}\n"
        f"and MongoDB {DEFAULT_VERSION}. The same command writes this page on your machine. Both sides of a table\n"
        "are from the same run, so the ratios depend less on the machine than the figures do.\n"
        "[Measurements](measurements.md) has more questions, larger amounts and quieter machines, and says what\n"
        "the figures mean.\n\n" + (small if quick else "")
    )


def section(question: Question, words: Sequence[str], text: str) -> str:
    """A section in Markdown. Raises SystemExit if the program has printed no row."""
    found = list(rows(question, text))
    if not found:
        raise SystemExit(f"bench/{question.program}.py has printed no table that begins with {question.header!r}")
    names = [column.name for column in question.columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *found)]
    verdicts = [line.strip() for line in text.splitlines() if line.rstrip(" )").endswith(_VERDICTS) and ":" in line]
    told = "".join(f"\n* {line}" for line in verdicts)
    return "\n".join(
        [
            f"## {question.title}\n",
            f"{question.words}\n\n`{command_of(question, words)}`\n",
            *lines,
            f"\n<!-- bars: {question.bars} -->",
            *([f"\nBars of this run:\n{told}"] if told else []),
            "",
        ]
    )


def rows(question: Question, text: str) -> Iterator[list[str]]:
    """The cells of the lines after the header, as long as a figure stands in one of the columns of figures."""
    lines = iter(text.splitlines())
    if question.header:
        for line in lines:
            if line.startswith(question.header):
                break
        for _ in range(question.skip):
            next(lines, "")
    for line in lines:
        cells = [line[column.first : column.end].strip() for column in question.columns]
        figures = [cell.replace(",", "") for cell in cells[1:]]
        if question.has in line and cells[0] and any(_is_number(each) for each in figures):
            yield [" ".join(cells[0].split()), *cells[1:]]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
