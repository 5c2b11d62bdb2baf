"""What a page promises names its proof, and the proof exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_TEST = re.compile(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`")


def proofs(text: str) -> list[tuple[str, str | None]]:
    return [(found[1], found[2]) for found in _TEST.finditer(text)]


def rows_of_promises(text: str) -> list[str]:
    """The rows of the tables whose first column is headed "promise"."""
    rows: list[str] = []
    inside = False
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("|"):
            inside = False
        elif line.startswith("| promise |") and following.startswith("|---"):
            inside = True
        elif inside and not line.startswith("|---"):
            rows.append(line)
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in proofs(page.read_text()):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
        if name is not None:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_promise_names_its_proof() -> None:
    pages = {page.name: rows_of_promises(page.read_text()) for page in PAGES}
    found = {name: rows for name, rows in pages.items() if rows}
    assert {"consumer.md", "partitions.md", "views.md", "messages.md"} <= found.keys()
    for name, rows in found.items():
        before = ""
        for row in rows:
            if not re.search(r"\| the same( file)?\b", row):
                before = row
            assert proofs(before), f"{name}: {row}"
