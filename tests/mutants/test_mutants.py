"""What ``make mutants`` alters and what it leaves, and how a mutant is planted, ended and remembered."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.children import Task, run
from tests.mutants.mutations import MutatedModule, mutated_module
from tests.mutants.places import PLACES, modules
from tests.mutants.planting import MutantFinder, NotPlantableError, living_functions, plant, probe, restore
from tests.mutants.records import KnownTest, Reach, Results
from tests.mutants.reviewed import FILE, Reviewed

TEXT = '''
"""A module."""
from __future__ import annotations

LIMIT = 10

def within(number: int) -> bool:
    """Whether it is."""
    assert number != 3
    if number < 0:
        raise ValueError("it is below nothing")
    return number <= LIMIT and number not in (7,)

class Counted:
    step: int = 2

    def add(self, number: int) -> int:
        for _ in range(number):
            if not number:
                continue
            self.step += 1
        return self.step
'''


@pytest.fixture
def module(tmp_path: Path) -> Iterator[MutatedModule]:
    """One that is imported, as the core's modules are."""
    path = tmp_path / "altered.py"
    path.write_text(TEXT)
    name = "tailrace.altered"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    sys.modules[name] = imported
    spec.loader.exec_module(imported)
    yield mutated_module("altered", path)
    sys.modules.pop(name, None)


def texts(module: MutatedModule) -> set[str]:
    return {mutant.name.removeprefix("altered:") for mutant in module.mutants}


def test_operators_bounds_conditions_and_statements_are_altered(module: MutatedModule) -> None:
    assert texts(module) == {
        ": LIMIT = 10 -> LIMIT = 11",
        "within: number < 0 -> number <= 0",
        "within: number < 0 -> number < 1",
        "within: raise ValueError('it is below nothing') -> pass",
        "within: return number <= LIMIT and number not in (7,) -> return None",
        "within: return number <= LIMIT and number not in (7,) -> return number <= LIMIT or number not in (7,)",
        "within: return number <= LIMIT and number not in (7,) -> return number < LIMIT and number not in (7,)",
        "within: return number <= LIMIT and number not in (7,) -> return number <= LIMIT and number in (7,)",
        "within: return number <= LIMIT and number not in (7,) -> return number <= LIMIT and number not in (8,)",
        "Counted: step: int = 2 -> step: int = 3",
        "Counted.add: not number -> number",
        "Counted.add: continue -> break",
        "Counted.add: self.step += 1 -> self.step -= 1",
        "Counted.add: self.step += 1 -> self.step += 2",
        "Counted.add: return self.step -> return None",
    }


def test_a_mutant_s_name_stays_when_lines_move(module: MutatedModule) -> None:
    before = texts(module)
    module.path.write_text(TEXT.replace("LIMIT = 10", "# ten of them\n\nLIMIT = 10"))
    assert texts(mutated_module("altered", module.path)) == before


def test_mutants_of_the_places_are_told_apart_by_their_names() -> None:
    names = Counter(name for name, _ in named())
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) > 5000
    assert {place.replace("/", ".") for place in PLACES} == {
        ".".join(name.split(":")[0].split(".")[:-1]) for name in names
    }


def named() -> Iterator[tuple[str, str]]:
    for name, path in modules().items():
        for mutant in mutated_module(name, path).mutants:
            yield mutant.name, mutant.module


def test_each_reviewed_mutant_is_there_and_has_a_reason() -> None:
    """An entry that no longer exists was reviewed for a text that has since changed: review it again, or remove it."""
    reasons = Reviewed.load().reasons
    assert sorted(set(reasons) - {name for name, _ in named()}) == []
    assert all(len(reason) > 20 for reason in reasons.values())
    listed = [line.strip() for line in FILE.read_text().splitlines() if line.startswith(("  '", '  "'))]
    assert len(listed) == len(set(listed)) == len(reasons)


def test_a_mutant_is_planted_in_living_functions_and_taken_out_again(module: MutatedModule) -> None:
    within = sys.modules["tailrace.altered"].within
    living = living_functions()[str(module.path)]
    boundary = next(mutant for mutant in module.mutants if mutant.after == "number <= 0")
    assert within(0)
    plant(module, boundary, living)
    with pytest.raises(ValueError, match="below nothing"):
        within(0)
    restore(living, module.path)
    assert within(0)


def test_what_stands_outside_of_functions_is_planted_by_an_import(module: MutatedModule) -> None:
    limit = next(mutant for mutant in module.mutants if mutant.after == "LIMIT = 11")
    assert not limit.is_inside
    with pytest.raises(NotPlantableError):
        plant(module, limit, living_functions()[str(module.path)])
    del sys.modules["tailrace.altered"]
    finder = MutantFinder(module, limit)
    sys.meta_path.insert(0, finder)
    try:
        assert importlib.import_module("tailrace.altered").within(11)
    finally:
        sys.meta_path.remove(finder)


def test_the_statements_that_a_test_reaches_are_noted(module: MutatedModule) -> None:
    living = living_functions()[str(module.path)]
    reached: set[int] = set()
    probe(module, living, reached.add)
    sys.modules["tailrace.altered"].within(5)
    restore(living, module.path)
    below, answer = (TEXT.splitlines().index(line) + 1 for line in ("    if number < 0:", TEXT.splitlines()[11]))
    assert below in reached
    assert answer in reached
    assert below + 1 not in reached  # what it raises
    reached.clear()
    sys.modules["tailrace.altered"].within(5)
    assert reached == set()


def test_a_process_says_how_it_went_and_is_ended_when_its_time_is_over() -> None:
    def fails() -> str:
        raise ValueError

    def computes() -> str:
        while True:
            pass

    def waits() -> str:
        time.sleep(3600)
        return "survived"

    tasks = [
        Task("well", lambda: "survived", 10, 600),
        Task("fails", fails, 10, 600),
        Task("computes", computes, 1, 600),
        Task("waits", waits, 10, 1),
    ]
    said = {task.name: text for task, text in run(iter(tasks), 2)}
    assert said == {"well": "survived", "fails": "killed ValueError", "computes": "", "waits": ""}


def test_results_are_kept_until_what_they_are_about_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = next(iter(modules().items()))
    first, second = mutated_module(name, path).mutants[:2]
    results = Results(tmp_path)
    results.add(first, "survived", "", 3)
    results.add(second, "killed", "tests/unit/test_a.py::test_b", 3)
    again = Results(tmp_path)
    assert [result and result.verdict for result in map(again.get, (first, second))] == ["survived", "killed"]
    assert {*again.killers()} == {f"{second.module}:{second.function}"}
    monkeypatch.setattr("tests.mutants.records.deciding_files", lambda: [Path(__file__)])  # other tests than before
    later = Results(tmp_path)
    assert later.get(first, again=True) is None
    assert later.get(second, again=True) is not None
    monkeypatch.setattr("tests.mutants.records.modules", lambda: {name: Path(__file__)})  # the module is another
    assert [Results(tmp_path).get(mutant) for mutant in (first, second)] == [None, None]


def test_tests_that_killed_others_of_a_function_come_first_and_then_the_quick_ones() -> None:
    tests = {name: KnownTest(seconds, {}) for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 9.0))}
    assert Reach(tests).ordered(tests, Counter({"c": 2}), 6.5) == ["c", "b", "a"]
    assert Reach(tests).ordered(["d"], Counter(), 6.5) == ["d"]  # one at least
