"""The recipes for a first change lead to files, modules and names that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = (ROOT / "docs" / "design" / "recipes.md").read_text()
#: Where a path on the page may begin; a bare file name stands for a file beside another one that is named.
BEGINNINGS = (ROOT, ROOT / "src" / "tailrace")
_PATH = re.compile(r"`([\w/.<>]+(?:/|\.(?:py|md|toml)))`")
#: Constants, and private functions of a module: names that a rename would break without an error.
_NAME = re.compile(r"`(_[a-z_]{3,}|_?[A-Z][A-Z_0-9]{3,})`")
_MODULE = re.compile(r"python -m ([\w.]+)")


def found(path: str) -> list[Path]:
    """The files that a path of the page may mean; of a file that is still to be made, its folder."""
    path = re.sub(r"[^/]*<.*", "", path)
    if "/" not in path:
        near = {one.parent for named in _PATH.findall(RECIPES) if "/" in named for one in found(named)}
        return [place / path for place in {ROOT, *near} if (place / path).exists()]
    return [place / path for place in BEGINNINGS if (place / path).exists()]


def is_module(name: str) -> bool:
    below = name.replace(".", "/")
    return any((root / f"{below}{end}").exists() for root in (ROOT, ROOT / "src") for end in (".py", "/__init__.py"))


@pytest.mark.parametrize("path", sorted(set(_PATH.findall(RECIPES))))
def test_every_file_of_a_recipe_exists(path: str) -> None:
    assert found(path)


def test_every_module_that_a_recipe_runs_exists() -> None:
    named = set(_MODULE.findall(RECIPES)) - {"pytest"}
    assert "tests.golden.record_operators" in named
    assert [name for name in sorted(named) if not is_module(name)] == []


def test_every_name_in_a_recipe_is_in_a_file_that_it_names() -> None:
    files = {one for path in _PATH.findall(RECIPES) for one in found(path) if one.suffix == ".py"}
    words = set(re.findall(r"\w+", "\n".join(one.read_text() for one in files)))
    names = set(_NAME.findall(RECIPES)) - {"PATH"}
    assert {"COLUMNS", "SHARD_STAGES", "_SWITCHES"} <= names
    assert sorted(names - words) == []
