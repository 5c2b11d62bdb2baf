"""The core does no I/O: what its modules import says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace
from tests.tidy.parsing import parse

SOURCE = Path(tailrace.__file__).parent
PURE_PACKAGES = ("oplog", "event", "plan", "stage", "expression", "pipeline", "kernel", "cursor")
#: The pure parts of the rooms above.
PURE_PACKAGES += ("client/resume", "consumer/rules")
PURE_ABOVE = ("tailrace.client.resume", "tailrace.consumer.rules", "tailrace.gateway.frame")
ABOVE = tuple(
    f"tailrace.{name}"
    for name in ("source", "tail", "client", "snapshot", "consumer", "testing", "spark", "embedded", "cli", "gateway")
)
PURE_MODULES = ("errors.py", "raw_bson.py", "gateway/frame.py", "gateway/compression.py", "images/delta.py")
FORBIDDEN = frozenset({"os", "socket", "time", "random", "threading", "asyncio", "pymongo", "pyspark", "subprocess"})
#: What does the same by another name.
FORBIDDEN_TOO = frozenset({"_thread", "concurrent", "io", "multiprocessing", "pathlib"})
FORBIDDEN_TOO |= {"secrets", "select", "selectors", "shutil", "signal", "ssl", "tempfile", "urllib", "http"}


def pure_modules() -> list[Path]:
    found = [SOURCE / name for name in PURE_MODULES]
    for package in PURE_PACKAGES:
        found += sorted((SOURCE / package).rglob("*.py"))
    return found


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def offences(text: str) -> list[tuple[int, str]]:
    found = []
    for line, name in imported(parse(text)):
        top = name.partition(".")[0]
        is_above = name.startswith(ABOVE) and not name.startswith(PURE_ABOVE)
        if top in FORBIDDEN | FORBIDDEN_TOO or is_above or name == "tailrace.cache":
            found.append((line, name))
    return found


@pytest.mark.parametrize("path", pure_modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_core_module_imports_nothing_that_does_input_or_output(path: Path) -> None:
    assert offences(path.read_text()) == []


def test_an_import_of_a_socket_would_be_found() -> None:
    assert offences("def f():\n    import socket\n") == [(2, "socket")]
    assert offences("from os.path import join") == [(1, "os.path"), (1, "os.path.join")]
    assert offences("from tailrace.source.drive import drive") != []
    assert offences("from tailrace.consumer.listener import Listener") != []
    assert offences("from tailrace.consumer.rules.lease import Lease") == []
    assert offences("import bson\nimport numpy\nfrom tailrace.errors import TailraceError\n") == []


def test_the_core_s_packages_are_where_this_test_looks() -> None:
    assert {path.parent.name for path in pure_modules()} >= {"oplog", "event", "pipeline"}
