"""Each publisher can be named in a pipeline file, and is public: one that was neither passed all other tests."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any, Final

import pytest

from tailrace.act.consumer.messages import publisher
from tailrace.cli import run_messages
from tailrace.lake.spark.store.message_settings import SCHEMES

ROOM: Final = Path(publisher.__file__).parent
FACES: Final = ROOM.parents[2] / "consumer" / "messages"


def publishers() -> dict[str, ast.FunctionDef]:
    """The ``publish`` of each class for a broker, by the class and its module."""
    return {
        f"{path.stem}.{node.name}": method
        for path in sorted(ROOM.glob("*.py"))
        if path.name != "publisher.py"  # the contract, and one in memory for tests
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "publish"
    }


def test_each_broker_of_the_pipeline_files_has_a_publisher() -> None:
    assert len(publishers()) == len(set(SCHEMES.values())) >= 3


@pytest.mark.parametrize("name", sorted(publishers()))
def test_a_publisher_is_made_for_its_scheme_and_is_public(name: str) -> None:
    module, _, cls = name.partition(".")
    assert f"import {cls} " in inspect.getsource(run_messages.publisher_of)
    assert f'"{cls}"' in (FACES / f"{module}.py").read_text()
    returned: Any = publishers()[name].returns
    assert ast.unparse(returned) == "int", "how many are stored"
