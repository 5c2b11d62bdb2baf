"""Memory that is passed to compiled code by address lives until compiled code is done with it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tailrace
from tailrace.core.kernel import entry_columns, runs

SOURCE = Path(tailrace.__file__).parent


def test_what_other_threads_allocate_meanwhile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of three shards crashed here: the list of addresses was freed before compiled code had read it. Tests
    had one thread, in which nothing else allocates in between."""
    taken: list[Any] = []

    def copy_runs(job: int) -> None:
        taken.extend(np.zeros(6, np.int64) for _ in range(100))  # as another thread would
        runs.copy_runs(job)

    monkeypatch.setattr(entry_columns, "copy_runs", copy_runs)
    start, end = np.array([1, 6, 3], np.int64), np.array([3, 9, 3], np.int64)
    data, offsets = entry_columns.gathered(b"0123456789", start, end)
    assert (data.tobytes(), offsets.tolist()) == (b"12678", [0, 2, 5, 5])


def test_nobody_gives_the_address_of_what_has_no_name() -> None:
    """``address(np.array(...))`` frees the array before its address is used. No test can be relied on to notice."""
    wrong = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "address(" in text else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "address":
                continue
            if not isinstance(node.args[0], ast.Name | ast.Attribute | ast.Subscript):
                wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong
