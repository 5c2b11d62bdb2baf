"""Parsing Python where other threads may parse too."""

from __future__ import annotations

import ast
from typing import Final

_TRIES: Final = 20


def parse(text: str) -> ast.Module:
    """``ast.parse``, again if another thread has parsed meanwhile: Python 3.11 counts the depth of all of them in one
    place, and then raises a SystemError. Threads of earlier tests do so when they print a traceback."""
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(text)
        except SystemError:
            pass
    return ast.parse(text)
