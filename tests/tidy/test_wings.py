"""Who may import whom: the contracts in ``pyproject.toml``, which import-linter reads, and the page that shows them.

Each contract is also checked on a copy of the source that breaks it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

import tailrace
from tailrace.core.pipeline import router, shard

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = Path(tailrace.__file__).parent
PAGE: Final = ROOT / "docs" / "design" / "architecture.md"
CONTRACTS: Final[dict[str, dict[str, Any]]] = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
#: For each contract a module, and a line in it that breaks the contract. Some of these imports are inside functions, or
#: for type checkers only.
BROKEN: Final = {
    "wings": ("core/oplog/entry.py", "from tailrace.read.source import base"),
    "lake": ("lake/tables/fold.py", "def f():\n    import tailrace.watch.client"),
    "core": ("core/event/image.py", "import tailrace.core.stage.transform"),
    "expression": (
        "core/expression/values/value.py",
        "if TYPE_CHECKING:\n    import tailrace.core.expression.match.test",
    ),
    "read": ("read/archive/layout.py", "import tailrace.read.tail.segment"),
    "watch": ("watch/gateway/line.py", "import tailrace.watch.compare"),
    "act": ("act/consumer/lease.py", "import tailrace.act.testing"),
    "store": ("lake/store/layout.py", "import tailrace.lake.tables.fold"),
    "base": ("base/health.py", "import tailrace.base.metrics_server"),
    "pure": ("act/consumer/rules/lease.py", "def f():\n    import time"),
    "circles": ("core/oplog/namespace.py", "import tailrace.core.oplog.selection"),
}


def linted(directory: Path) -> tuple[int, str]:
    """Exit status and output of ``lint-imports`` over ``directory``/tailrace."""
    program = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "pyproject.toml"), "--no-cache"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_contracts_are_kept() -> None:
    status, told = linted(SOURCE.parent)
    assert status == 0, told
    assert told.count(" KEPT") == len(CONTRACTS)


@pytest.fixture(scope="module")
def told_of_broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("broken")
    shutil.copytree(SOURCE, directory / "tailrace", ignore=shutil.ignore_patterns("__pycache__"))
    for name, line in BROKEN.values():
        with (directory / "tailrace" / name).open("a") as module:
            module.write(f"\n{line}\n")
    status, told = linted(directory)
    assert status == 1, told
    return told


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_that_is_broken_is_named(contract: str, told_of_broken: str) -> None:
    assert f"{CONTRACTS[contract]['name']} BROKEN" in told_of_broken
    name, line = BROKEN[contract]
    module = f"tailrace.{name.removesuffix('.py').replace('/', '.')}"
    imported = re.split(r"import ", line)[-1].strip()
    if contract != "circles":  # this one is reported by packages
        assert re.search(rf"{re.escape(module)} -> \S*{re.escape(imported)}", told_of_broken)


def marked(name: str) -> list[str]:
    """The first column of a marked table of the page, as the names in it."""
    table = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert table is not None, f"{PAGE.name} has no place marked {name}"
    return [found for row in table[1].splitlines()[2:] for found in re.findall(r"`(\w+)`", row.split("|")[1])]


@pytest.mark.parametrize("wing", ["core", "base", "read", "watch", "act", "lake"])
def test_the_page_shows_the_rooms_of_each_wing_from_the_ground_up(wing: str) -> None:
    contract = next(each for each in CONTRACTS.values() if each.get("containers") == [f"tailrace.{wing}"])
    floors = [re.split(r" [|:] ", layer) for layer in reversed(contract["layers"])]
    shown = iter(marked(wing))
    assert [sorted(next(shown) for _ in rooms) for rooms in floors] == [sorted(rooms) for rooms in floors]
    assert list(shown) == []


def test_every_wing_and_every_face_is_in_the_contract() -> None:
    layers = {name for layer in CONTRACTS["wings"]["layers"] for name in re.split(r" [|:] ", layer)}
    here = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {f"tailrace.{name}" for name in here - {"__init__", "__main__"}} == layers


@pytest.mark.parametrize("folder", ["act", "lake/store", "lake/tables", "lake/spark", "watch/compare", "cli", "base"])
def test_a_room_beside_a_face_lists_no_names_of_its_own(folder: str) -> None:
    """What users import is listed once, in the public module; code inside imports from the defining module."""
    listing = [
        str(path.relative_to(SOURCE))
        for path in sorted((SOURCE / folder).rglob("__init__.py"))
        if "__all__" in path.read_text()
    ]
    assert listing == []


def test_the_page_on_the_architecture_shows_the_stages() -> None:
    assert marked("SHARD_STAGES") == [stage.__name__ for stage in shard.SHARD_STAGES]
    assert marked("ROUTER_STAGES") == [stage.__name__ for stage in router.ROUTER_STAGES]
