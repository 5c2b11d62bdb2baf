"""Each promise to a listener has a proof beside it, and the proof is a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.tidy.parsing import parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "consumer.md"


def promises() -> list[tuple[str, list[str]]]:
    table = re.search(r"<!-- promises -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
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


def test_every_promise_has_a_proof() -> None:
    found = promises()
    assert len(found) > 8
    assert [promise for promise, proofs in found if not proofs] == []


def test_every_proof_is_a_test() -> None:
    assert [proof for _, proofs in promises() for proof in proofs if not exists(proof)] == []
    assert not exists("tests/tidy/test_promises.py::test_that_is_not_there")
