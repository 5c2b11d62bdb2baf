"""Rules of the server that the code names by number stand in ``docs/reference/semantics.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "semantics.md"
NUMBER = r"\d+(?:\.\d+)?"
REFERENCE = re.compile(rf"\bsemantics\s+({NUMBER}(?:(?:,\s+|\s+and\s+|-){NUMBER})*)")
HEADING = re.compile(rf"^##+ ({NUMBER})\.? ", re.MULTILINE)
# Notes that only their author had.
PRIVATE = re.compile(r"\bseed " + r"0\d\d\b")


def texts() -> Iterator[tuple[str, str]]:
    for folder in ("src", "tests", "bench", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md") and path != Path(__file__):
                yield str(path.relative_to(ROOT)), path.read_text()


def sections() -> set[str]:
    return set(HEADING.findall(PAGE.read_text()))


def named(text: str) -> list[str]:
    """Every section that a text refers to; the ends of a range stand for the range."""
    return [number for match in REFERENCE.findall(text) for number in re.findall(NUMBER, match)]


def test_every_reference_to_a_rule_names_a_section_of_the_page() -> None:
    known = sections()
    lost = {name: missing for name, text in texts() if (missing := [one for one in named(text) if one not in known])}
    assert lost == {}


def test_the_references_are_found() -> None:
    assert sum(len(named(text)) for name, text in texts() if name.startswith("src/")) > 30
    assert named("see (semantics 1.1, 2.5, 4.3) and semantics 1.3-1.5 or semantics 2 and 4;\n    semantics\n6.3") == [
        *("1.1", "2.5", "4.3"),
        *("1.3", "1.5"),
        *("2", "4"),
        "6.3",
    ]
    assert "2.2" in sections()
    assert "9.9" not in sections()


def test_no_text_refers_to_a_note_that_is_not_here() -> None:
    assert [name for name, text in texts() if PRIVATE.search(text)] == []
