"""The list of heavy tests names tests that exist, and so does the list of those that ``make test`` keeps."""

from __future__ import annotations

import re
from pathlib import Path

from tests.heavy import KEPT, LIST, heavy_of

_ROOT = Path(__file__).parents[2]


def test_each_heavy_test_and_each_that_is_kept_exists() -> None:
    named = [*LIST.read_text().splitlines(), *KEPT]
    assert named
    missing = [name for name in named if not _is_there(name)]
    assert not missing, "renamed or gone: write the new name, or leave the line out (tests/heavy.py)"


def test_the_list_is_in_order_and_names_nothing_that_is_kept() -> None:
    listed = LIST.read_text().splitlines()
    assert listed == sorted(set(listed))
    assert not KEPT.keys() & set(listed)
    assert all(KEPT.values())


def test_a_function_is_heavy_by_what_its_cases_cost_together() -> None:
    measured = [
        "0.80\t9.00\tmongod\ttests/sync/test_a.py::test_one[1]",
        "0.75\t9.00\tmongod\ttests/sync/test_a.py::test_one[2]",
        "1.40\t9.00\tmongod\ttests/sync/test_a.py::test_other",
        "9.00\t9.00\t\ttests/unit/test_b.py::test_of_make_quick",
        "9.00\t9.00\tlong\ttests/unit/test_b.py::test_long",
    ]
    assert heavy_of(measured) == ["tests/sync/test_a.py::test_one", "tests/unit/test_b.py::test_long"]
    kept = next(name for name in KEPT if "[" not in name)
    assert heavy_of([f"99.00\t99.00\tmongod\t{kept}"]) == []


def _is_there(name: str) -> bool:
    file, _, function = name.partition("::")
    path = _ROOT / file
    return (
        path.is_file()
        and re.search(rf"^ *(async )?def {function.partition('[')[0]}\(", path.read_text(), re.M) is not None
    )
