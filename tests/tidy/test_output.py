"""All that the commands print goes through ``tailrace.cli.output``, which escapes what would steer a terminal."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tailrace
from tests.tidy.parsing import parse

CLI = Path(tailrace.__file__).parent / "cli"


def prints(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        if text in ("print", "sys.stdout.write", "sys.stderr.write") or text.endswith(".print"):
            yield path.name, node.lineno


def test_commands_print_through_one_module_alone() -> None:
    """``print`` was called in ninety places, with names printed as they came, and a console's ``print`` in eight
    more."""
    places = [place for path in sorted(CLI.glob("*.py")) for place in prints(path) if path.name != "output.py"]
    assert places == []


def test_a_print_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "new.py"
    module.write_text(
        "import sys\nprint('x')\nsys.stdout.write('x')\nsys.stdout.buffer.write(b'x')\nconsole.print('x')\n"
    )
    assert [line for _, line in prints(module)] == [2, 3, 5]
