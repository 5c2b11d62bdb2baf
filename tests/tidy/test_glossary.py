"""The glossary names what exists, and one name means one thing."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "glossary.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*?) ?\|$", re.MULTILINE)
#: Found by its line, which takes a tenth of the time of parsing all modules.
CLASS = re.compile(r"^ *class (\w+)\b.*:$", re.MULTILINE)
#: A name for a type: an assignment to a name in capitals and small letters at the left margin.
ALIAS = re.compile(r"^(_?[A-Z]\w*[a-z]\w*)(?:: TypeAlias)? = (?!.*\bTypeVar\()", re.MULTILINE)
#: Words of daily use that the page has to explain.
WORDS = {"entry", "event", "block", "batch", "micro-batch", "slice", "participant", "promise", "high water", "need"}
WORDS |= {"answer", "token", "post-batch resume token", "high-water mark", "pushdown", "image", "scope", "stage"}


def rows() -> list[tuple[str, str, str]]:
    return [row for row in ROW.findall(PAGE.read_text()) if row[0] != "word" and not row[0].startswith("-")]


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), attribute)
    return True


def test_what_the_glossary_points_to_exists() -> None:
    named = [name for _, _, code in rows() for name in re.findall(r"`([^`]+)`", code)]
    assert len(named) > 30
    assert [name for name in named if not exists(name)] == []


def test_a_name_that_is_gone_would_be_found() -> None:
    assert exists("tailrace.core.plan.plan.Plan")
    assert not exists("tailrace.core.plan.plan.NoPlan")


def test_the_words_of_daily_use_are_explained_once() -> None:
    words = [word.strip() for row in rows() for word in row[0].split(",")]
    assert WORDS - set(words) == set()
    assert sorted({word for word in words if words.count(word) > 1}) == []


def meanings(sources: dict[str, str]) -> dict[str, list[str]]:
    """The names that more than one module gives to a class or a type, with the modules."""
    places = defaultdict(set)
    for path, text in sources.items():
        for name in [*CLASS.findall(text), *ALIAS.findall(text)]:
            places[name].add(path)
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def test_no_two_classes_or_types_have_the_same_name() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
    assert meanings(sources) == {}


def test_a_name_with_two_meanings_would_be_found() -> None:
    sources = {
        "a.py": "class Need:\n    pass\nPart: TypeAlias = int\nT = TypeVar('T')\nMAX = 1\n",
        "b.py": "Need = int | str\nPart = Literal['a']\nT = TypeVar('T')\nMAX = 2\n_Part = str\n",
    }
    assert meanings(sources) == {"Need": ["a.py", "b.py"], "Part": ["a.py", "b.py"]}
