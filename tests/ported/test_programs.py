"""Programs of ``examples/ported`` as PyMongo's users write them, run with PyMongo and with one line changed.

The line is the import: ``from pymongo import MongoClient`` becomes ``from tailrace import MongoClient``. What a program
prints is what a user would see of a difference. No program written for PyMongo had been run before.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet

pytestmark = pytest.mark.mongod

EXAMPLES = Path(__file__).parents[2] / "examples" / "ported"
#: What a program needs besides PyMongo, from the extra `dev`.
NEEDS = {"server_sent_events": "fastapi", "celery_task": "celery", "flask_thread": "flask", "notebook": "pandas"}
PROGRAMS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
#: ``from pymongo import A, MongoClient`` with the client's class in it.
_IMPORT = re.compile(r"^from pymongo import (.*)$", re.MULTILINE)
#: The cells of a notebook share a namespace, and may wait for what is asynchronous.
_CELLS = """
import ast, asyncio, inspect, json, sys
names = {"__name__": "__main__"}
async def run():
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            done = eval(code, names)
            if inspect.iscoroutine(done):
                await done
asyncio.run(run())
"""


def moved(text: str) -> str:
    """The program with the client's class taken from tailrace, by the line that imports it."""

    def line(match: re.Match[str]) -> str:
        names = [name.strip() for name in match[1].strip('\\n",').split(",")]
        clients = [name for name in names if name in ("MongoClient", "AsyncMongoClient")]
        rest = [name for name in names if name not in clients]
        return "; ".join(
            f"from {module} import {', '.join(some)}"
            for module, some in (("pymongo", rest), ("tailrace", clients))
            if some
        )

    changed, count = _IMPORT.subn(line, text)
    assert count == 1
    return changed


def moved_notebook(text: str) -> str:
    notebook = json.loads(text)
    sources = [line for cell in notebook["cells"] for line in cell["source"]]
    assert sum(line.startswith("from pymongo import ") for line in sources) == 1
    for cell in notebook["cells"]:
        cell["source"] = [line.replace("from pymongo import", "from tailrace import") for line in cell["source"]]
    return json.dumps(notebook)


def outcome(path: Path, replica_set: ReplicaSet, database: str, **environment: str) -> str:
    """What a program prints. It ends well, and says nothing on standard error."""
    with MongoClient(replica_set.uri) as client:
        client.drop_database(database)
    command = [sys.executable, str(path)] if path.suffix == ".py" else [sys.executable, "-c", _CELLS, str(path)]
    done = subprocess.run(
        command,
        env={**os.environ, "MONGODB_URI": replica_set.uri, "DATABASE": database, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_there_are_ten_programs() -> None:
    assert len(PROGRAMS) == 10
    assert {path.stem for path in PROGRAMS} >= NEEDS.keys()


#: In `make test-landing`; the others have the mark slow.
_ALWAYS = {"cache_invalidation", "queue_worker", "server_sent_events", "resuming_consumer"}


def _marked(path: Path) -> Any:
    return pytest.param(path, id=path.stem, marks=() if path.stem in _ALWAYS else pytest.mark.slow)


@pytest.mark.parametrize("path", [_marked(path) for path in PROGRAMS])
def test_a_program_does_the_same_after_one_line_was_changed(
    path: Path, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    needed = NEEDS.get(path.stem, "pymongo")
    assert importlib.util.find_spec(needed) is not None, f"the program needs {needed}: pip install '.[dev]'"
    text = path.read_text()
    ported = tmp_path / path.name
    ported.write_text(moved(text) if path.suffix == ".py" else moved_notebook(text))
    if path.suffix == ".py":
        ast.parse(ported.read_text())
    before = outcome(path, replica_set, "ported")
    assert before
    assert outcome(ported, replica_set, "ported") == before


def test_the_line_that_is_changed() -> None:
    assert moved("from pymongo import MongoClient, UpdateOne\nx") == (
        "from pymongo import UpdateOne; from tailrace import MongoClient\nx"
    )
    assert moved("from pymongo import AsyncMongoClient\n") == "from tailrace import AsyncMongoClient\n"
