"""What must not be in the repository: places of one machine, hosts to install from, and large files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZE_MAX = 1 << 20

# Put together here, so that this file does not hold what it looks for.
HOME = "/" + "(?:home|Users)" + r"/[a-z_][\w-]*"
MACHINE_PATH = re.compile(rf"(?<![\w.$}}])(?:{HOME}|/" + r"(?:root|work)/[\w.])")
REGISTRY = re.compile(r"(?i)\b(?:pypi" + r"\.org|files\.pythonhosted" + r"\.org)|://[\w.-]*\b(?:registry|mirrors?)\b")
INDEX_OPTION = re.compile(r"--(?:extra-)?index" + r"-url|--find" + r"-links|--trusted" + r"-host")


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def findings(text: str) -> list[str]:
    return [match[0] for pattern in (MACHINE_PATH, REGISTRY, INDEX_OPTION) for match in pattern.finditer(text)]


def test_no_file_names_a_place_of_one_machine_or_a_registry() -> None:
    found = {}
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # recordings are binary
        if words := findings(text):
            found[str(path.relative_to(ROOT))] = words
    assert found == {}


def test_no_file_is_larger_than_a_megabyte() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked_files()}
    assert {name: size for name, size in sizes.items() if size > SIZE_MAX} == {}


@pytest.mark.parametrize(
    "text",
    ["cd /" + "root/x", "open('/" + "home/anna/x')", "pip install --index" + "-url x", "https://pypi" + ".org/simple"],
)
def test_such_a_place_would_be_found(text: str) -> None:
    assert findings(text) != []


@pytest.mark.parametrize("text", ["/usr/bin/java", "src/work/x", "$HOME/.cache", "data/root/a", "/tmp/x"])
def test_ordinary_paths_are_let_through(text: str) -> None:
    assert findings(text) == []


def test_the_folders_that_are_run_on_other_servers_are_there() -> None:
    (line,) = re.findall(r"^ON_A_SERVER := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for name in line.split() if not (ROOT / "tests" / name).exists()] == []
