"""What a run leaves out by its marks is not even collected: each of six processes collects all tests, and half of that
time went to tests that were then deselected.

``-m "not slow and not heavy"``: a function that is marked so, or that ``tests/heavy.txt`` names as a whole, gets no
cases, and a file that has no other test is not imported. Any other expression is left to pytest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from tests.heavy import A_THIRD, KEPT, LIST

_ROOT: Final = Path(__file__).parents[1]
_NONE: Final[frozenset[str]] = frozenset()
_FUNCTION: Final = re.compile(r"^((?:[@ )\]].*\n)*)( *)(?:async )?def (test_\w+)\(", re.M)
_WHOLE_FILE: Final = re.compile(r"^pytestmark = .*\bmark\.(\w+)\b", re.M)


@cache
def marks_left_out(expression: str) -> frozenset[str]:
    """The marks of an expression that is nothing but ``not one and not other``."""
    if re.fullmatch(r"not \w+( and not \w+)*", expression) is None:
        return _NONE
    return frozenset(re.findall(r"not (\w+)", expression))


@cache
def heavy_as_a_whole() -> frozenset[str]:
    """The functions all of whose cases are heavy."""
    return frozenset(LIST.read_text().split("\n")) - {name.partition("[")[0] for name in KEPT} - A_THIRD


def is_function_left_out(expression: str, function: str, marks: Iterable[str]) -> bool:
    """Whether no case of the function, which has these marks as a whole, can be in the run."""
    out = marks_left_out(expression)
    return not out.isdisjoint(marks) or ("heavy" in out and function in heavy_as_a_whole())


def is_file_left_out(expression: str, path: Path) -> bool:
    """Whether no test of the file can be in the run, by its text."""
    out = marks_left_out(expression)
    if not out or not path.is_relative_to(_ROOT):
        return False
    text, name = path.read_text(), path.relative_to(_ROOT).as_posix()
    if not out.isdisjoint(_WHOLE_FILE.findall(text)):
        return True
    functions = _FUNCTION.findall(text)
    if not functions or re.search(r"^test_\w+ *=|^class Test|^from .* import .*\btest_", text, re.M):
        return False
    return all(
        not indented
        and is_function_left_out(expression, f"{name}::{function}", re.findall(r"@pytest\.mark\.(\w+)", decorators))
        for decorators, indented, function in functions
    )
