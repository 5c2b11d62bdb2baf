"""The list of heavy tests names tests that exist, and so does the list of those that ``make test`` keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.heavy import A_THIRD, KEPT, LIST, heavy_of, mark_heavy
from tests.left_out import heavy_as_a_whole, is_file_left_out, is_function_left_out

_ROOT = Path(__file__).parents[2]


def test_each_heavy_test_and_each_that_is_kept_exists() -> None:
    named = [*LIST.read_text().splitlines(), *KEPT, *A_THIRD]
    assert named
    missing = [name for name in named if not _is_there(name)]
    assert not missing, "renamed or gone: write the new name, or leave the line out (tests/heavy.py)"


def test_the_list_is_in_order_and_names_nothing_that_is_kept() -> None:
    listed = LIST.read_text().splitlines()
    assert listed == sorted(set(listed))
    assert not KEPT.keys() & set(listed)
    assert not A_THIRD & {*listed, *KEPT}
    assert all(KEPT.values())


def test_a_function_is_heavy_by_what_its_cases_cost_together() -> None:
    measured = [
        "1.70\t9.00\tmongod\ttests/sync/test_a.py::test_that_starts_the_server_for_the_others",
        "0.45\t9.00\tmongod\ttests/sync/test_a.py::test_one[1]",
        "0.45\t9.00\tmongod\ttests/sync/test_a.py::test_one[2]",
        "0.70\t9.00\tmongod\ttests/sync/test_a.py::test_other",
        "1.40\t9.00\t\ttests/unit/test_b.py::test_offline",
        "1.60\t9.00\t\ttests/unit/test_b.py::test_long",
        "9.00\t9.00\t\ttests/tidy/test_c.py::test_a_rule",
    ]
    assert heavy_of(measured) == ["tests/sync/test_a.py::test_one", "tests/unit/test_b.py::test_long"]
    kept = next(name for name in KEPT if "[" not in name)
    assert heavy_of([f"99.00\t99.00\tmongod\t{one}" for one in (kept, next(iter(A_THIRD)))]) == []


class _Item:
    """As much of a collected test as marking looks at."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid = nodeid
        self.marks = list(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_every_third_case_of_those_that_land_stays() -> None:
    function = min(A_THIRD)
    cases = [_Item(f"{function}[{at}]", *(["slow"] if at == 1 else [])) for at in range(8)]
    mark_heavy(cases)  # type: ignore[arg-type]
    assert [at for at, case in enumerate(cases) if "heavy" not in case.marks and "slow" not in case.marks] == [0, 4, 7]


def test_a_case_that_is_kept_stays_and_the_others_go() -> None:
    kept = next(name for name in KEPT if "[" in name and name.partition("[")[0] in LIST.read_text().splitlines())
    cases = [_Item(kept), _Item(f"{kept.partition('[')[0]}[another]")]
    mark_heavy(cases)  # type: ignore[arg-type]
    assert [case.marks for case in cases] == [[], ["heavy"]]


def _is_there(name: str) -> bool:
    file, _, function = name.partition("::")
    path = _ROOT / file
    return (
        path.is_file()
        and re.search(rf"^ *(async )?def {function.partition('[')[0]}\(", path.read_text(), re.M) is not None
    )


def test_only_what_cannot_be_in_the_run_is_not_collected(tmp_path: Path) -> None:
    function = min(one for one in heavy_as_a_whole() if one)
    assert is_function_left_out("not slow and not heavy", function, [])
    assert not is_function_left_out("not slow", function, [])
    assert not is_function_left_out("heavy and not slow", function, ["heavy"])
    assert not is_function_left_out("not slow and not heavy", min(A_THIRD), ["mongod"])
    assert is_function_left_out("not slow", "tests/a/test_b.py::test_c", ["slow"])
    of_cases = {name.partition("[")[0] for name in KEPT}
    assert not any(is_function_left_out("not heavy", name, []) for name in of_cases)
    files = {name.partition("::")[0] for name in [*KEPT, *A_THIRD]}
    assert not [file for file in files if is_file_left_out("not slow and not heavy", _ROOT / file)]
    assert not is_file_left_out("not slow and not heavy", tmp_path / "test_of_another_place.py")
