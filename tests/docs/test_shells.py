"""Printed commands mean the same in bash and in zsh. zsh ends a command whose unquoted ``?``, ``*`` or ``[`` matches no
file: the first command of the README failed in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, commands, snippets

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?.*?^\1$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\\.")
_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_GLOB = re.compile(r"[?*\[\]]|^=")


def globs(text: str) -> list[str]:
    """The words of a command that a shell would take for patterns of files."""
    bare = _COMMENT.sub("", _QUOTED.sub("", _HERE_DOCUMENT.sub("", text)))
    return [word for word in bare.split() if _GLOB.search(word)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_printed_command_has_an_unquoted_pattern(page: Path) -> None:
    printed = [snippet for snippet in snippets(page) if snippet.language in ("console", "sh")]
    texts = [text for each in printed for text in [command.text for command in commands(each)] or [each.text]]
    assert [found for text in texts for found in globs(text)] == []


def test_such_a_word_would_be_found() -> None:
    assert globs("tailrace watch mongodb://localhost/?replicaSet=rs0 shop") == ["mongodb://localhost/?replicaSet=rs0"]
    assert globs("pip install .[spark]  # or '.[tables]'") == [".[spark]"]
    assert globs("tailrace tables write 'mongodb://h/?a=b' tables 'shop.*'") == []
