"""Every name that a package exports has a docstring, and the documentation's links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import tailrace
from tests.tidy.parsing import parse

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def packages() -> list[str]:
    """All packages, and the faces that are single modules."""
    walked = pkgutil.walk_packages(tailrace.__path__, "tailrace.")
    faces = re.compile(r"tailrace\.(?!__main__)(?:consumer\.\w+(?:\.\w+)?|\w+)")
    return ["tailrace", *sorted(module.name for module in walked if module.ispkg or faces.fullmatch(module.name))]


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", packages())
def test_every_exported_name_is_documented(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__doc__, f"{name} says nothing about itself"
    bare = []
    for exported in getattr(package, "__all__", ()):
        value = getattr(package, exported)
        if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
            bare.append(exported)
    assert bare == []


def says_what_it_is_for(text: str) -> bool:
    # Nearly all files begin with one; parsing only the others takes a tenth of the time.
    return re.match(r'"""[^"\s]', text) is not None or bool(ast.get_docstring(parse(text)))


def test_every_module_says_what_it_is_for() -> None:
    sources = sorted((ROOT / "src").rglob("*.py"))
    bare = [str(path.relative_to(ROOT)) for path in sources if not says_what_it_is_for(path.read_text())]
    assert bare == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_to_a_file(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_every_document_is_reachable_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [(ROOT / "docs" / "index.md").resolve()]
    while waiting:
        path = waiting.pop()
        if path in seen or path.suffix != ".md" or not path.exists():
            continue
        seen.add(path)
        waiting += [
            (path.parent / target).resolve() for target in LINK.findall(path.read_text()) if "://" not in target
        ]
    lost = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.resolve() not in seen]
    assert [str(path.relative_to(ROOT)) for path in lost] == []
