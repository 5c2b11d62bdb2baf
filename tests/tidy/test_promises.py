"""Each promise to a listener, of the gateway and of a sync has a proof beside it, which is a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.parsing import parse

ROOT = Path(__file__).parents[2]
PAGES = tuple(ROOT / "docs" / "design" / name for name in ("consumer.md", "gateway.md", "sync.md"))


def promises(page: Path) -> list[tuple[str, list[str]]]:
    table = re.search(r"<!-- promises -->\n(.*?)<!-- end -->", page.read_text(), re.DOTALL)
    assert table is not None
    rows = [line.strip("|").split("|") for line in table[1].splitlines()[2:]]
    return [(row[0].strip(), re.findall(r"`(tests/[^`]+)`", row[2])) for row in rows]


def exists(proof: str) -> bool:
    name, _, function = proof.partition("::")
    path = ROOT / name
    if not path.exists():
        return False
    names = {node.name for node in parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    return function in names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_promise_has_a_proof(page: Path) -> None:
    found = promises(page)
    assert len(found) > 8
    assert [promise for promise, proofs in found if not proofs] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_proof_is_a_test(page: Path) -> None:
    assert [proof for _, proofs in promises(page) for proof in proofs if not exists(proof)] == []
    assert not exists("tests/tidy/test_promises.py::test_that_is_not_there")
