"""Functions fit a screen, classes have one concern, and modules stay small. What is longer stands in ``too_long.txt``,
and that list only shrinks: a line is removed as soon as it is no longer needed, and none is added."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.parsing import parse

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
CLASS_LINES_MAX = 300
MODULE_LINES_MAX = 600
ALLOWED = Path(__file__).with_name("too_long.txt")


def too_long_in(path: Path, text: str) -> Iterator[tuple[str, int]]:
    """The functions and classes above their bounds, with their lines."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                size = (child.end_lineno or child.lineno) - child.lineno + 1
                if size > (CLASS_LINES_MAX if isinstance(child, ast.ClassDef) else FUNCTION_LINES_MAX):
                    yield f"{path}::{name}", size
                yield from walk(child, f"{name}.")
            elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # nothing is defined in expressions
                yield from walk(child, prefix)

    return walk(parse(text), "")


def may_be_too_long(text: str) -> bool:
    """Whether a definition might be above a bound: whether the next one at its depth or further out, or the end of the
    file, is far away. This spares parsing all modules, which takes seconds."""
    open_ones: list[tuple[int, int, int]] = []
    for at, line in enumerate([*text.split("\n"), "def"]):
        found = _DEFINITION.match(line)
        if found is None:
            continue
        depth = len(found[1])
        while open_ones and open_ones[-1][0] >= depth:
            _, begin, bound = open_ones.pop()
            if at - begin > bound:
                return True
        open_ones.append((depth, at, CLASS_LINES_MAX if found[2] == "class" else FUNCTION_LINES_MAX))
    return False


_DEFINITION = re.compile(r"( *)(?:async )?(def|class)\b")


@functools.cache
def too_long() -> dict[str, int]:
    found = {}
    for folder in ("src", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            name = path.relative_to(ROOT)
            lines = text.count("\n")
            if lines > MODULE_LINES_MAX:
                found[str(name)] = lines
            if may_be_too_long(text):
                found |= dict(too_long_in(name, text))
    return found


def allowed() -> dict[str, int]:
    """``path[::name] lines``, a line each; the lines are a bound as well."""
    lines = ALLOWED.read_text().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: int(size) for name, size in pairs}


def test_no_function_no_class_and_no_module_is_longer_than_agreed() -> None:
    bounds = allowed()
    assert {name: size for name, size in too_long().items() if size > bounds.get(name, 0)} == {}


def test_the_list_of_exceptions_has_no_line_that_is_no_longer_needed() -> None:
    assert sorted(set(allowed()) - set(too_long())) == []


def test_a_long_function_and_a_long_class_would_be_found() -> None:
    text = "class A:\n    def long(self):\n" + "        pass\n" * 80
    assert may_be_too_long(text)
    assert dict(too_long_in(Path("a.py"), text)) == {"a.py::A.long": 81}
    text = "class A:\n" + "    def short(self):\n        pass\n" * 150
    assert may_be_too_long(text)
    assert dict(too_long_in(Path("a.py"), text)) == {"a.py::A": 301}
    assert not may_be_too_long("def short():\n    pass\n\n\n" * 40)
    assert may_be_too_long("def a():\n    def b():\n        pass\n" + "    pass\n" * 70)
