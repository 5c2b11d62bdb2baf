"""Nothing is defined at the top of a module that nobody uses."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.parsing import parse

ROOT = Path(__file__).parents[2]
WORD = re.compile(r"\w+")
#: What can be the name of a definition in a module.
AT_THE_TOP = re.compile(r"^(?:(?:async )?def |class )?(\w+)", re.MULTILINE)
#: Constants in a numbered list that only makes sense as a whole: slots of a record, kinds, types of a format.
NUMBERED = re.compile(r"^[A-Z][A-Z0-9_]*$")


def mentioned() -> Counter[str]:
    """How often each word occurs in the project's files."""
    words: Counter[str] = Counter()
    for folder in ("src", "tests", "bench", "examples", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".toml", ".yaml") and path != Path(__file__):
                words.update(WORD.findall(path.read_text()))
    return words


def defined(module: ast.Module) -> Iterator[str]:
    """The names that a module defines at its top. Not those with a decorator, which may register them elsewhere, and
    not numbers in a list of them."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list:
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            is_number = isinstance(node.value, ast.Constant) and isinstance(node.value.value, int)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and not (is_number and NUMBERED.match(target.id)):
                    yield target.id


def unasked(text: str, words: Counter[str]) -> list[str]:
    if not any(words[name] == 1 for name in AT_THE_TOP.findall(text)):
        return []  # without parsing it
    return [name for name in defined(parse(text)) if words[name] == 1 and not name.startswith("__")]


def test_every_name_at_the_top_of_a_module_is_asked_for() -> None:
    """Names that had lost their last caller stayed: a linter does not look beyond a module."""
    words = mentioned()
    dead = {str(path.relative_to(ROOT)): unasked(path.read_text(), words) for path in (ROOT / "src").rglob("*.py")}
    assert {path: names for path, names in dead.items() if names} == {}


def test_a_name_that_nobody_asks_for_would_be_found() -> None:
    text = "FIRST = 0\nHELD: str = ''\ndef used(): ...\ndef lost(): ...\n"
    assert unasked(text, Counter(["FIRST", "HELD", "used", "used", "lost"])) == ["HELD", "lost"]
