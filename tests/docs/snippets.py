"""The fenced snippets of the README, the pages and the examples, and the commands inside them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\s*$")
_INDENTED = re.compile(r"^ {4}\S")
_INLINE = re.compile(r"(?<!`)`((?:tailrace|make) [^`]+)`(?!`)")


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its page (from the root), the line of its first fence, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


@dataclass(frozen=True)
class Command:
    """A command after ``$`` in a ``console`` block, and the output that the page shows below it."""

    text: str
    output: str


def pages() -> list[Path]:
    """Every page that holds snippets."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path) -> list[Snippet]:
    """The fenced blocks of a page, in order."""
    found, lines, number = [], page.read_text().splitlines(), 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        first = number
        while lines[number].strip() != "```":
            number += 1
        text = textwrap.dedent("\n".join(lines[first:number])) + "\n"
        found.append(Snippet(name_of(page), first, opening["language"], text))
        number += 1
    return found


def commands(snippet: Snippet) -> Iterator[Command]:
    """The commands of a ``console`` block, one by one."""
    for part in re.split(r"(?m)^\$ ", snippet.text)[1:]:
        lines = part.splitlines()
        end = 1
        while lines[end - 1].endswith("\\"):
            end += 1
        yield Command("\n".join(lines[:end]), "\n".join(lines[end:]).strip("\n"))


def indented_code(page: Path) -> list[int]:
    """Lines of code that is marked by four spaces alone, which no test would see."""
    found, fenced, before = [], False, ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and _INDENTED.match(line) and not before.strip():
            found.append(number)
        before = line
    return found


def inline_commands(page: Path) -> list[str]:
    """Commands of ours between single backquotes in the running text."""
    outside = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    return [" ".join(match.split()) for match in _INLINE.findall(outside)]
