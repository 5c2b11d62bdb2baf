"""pytest, taken over once it has collected the tests: what each of them reaches, and a forked process a mutant."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import pytest

from tests.mutants.children import Task, run, say_and_end
from tests.mutants.mutations import Mutant, MutatedModule
from tests.mutants.places import DESELECTED, ROOT, deciding_files, digest, modules
from tests.mutants.planting import Key, MutantFinder, NotPlantableError, living_functions, plant, probe, restore
from tests.mutants.records import KnownTest, Reach, Results, function_in

_OPTIONS: Final = [
    "--assert=plain",
    "--tb=no",
    "-p", "no:cacheprovider",
    "-o", "timeout=0",
    "-m", "not slow and not mongod and not spark",
    "-k", " and ".join(f"not {part}" for part in DESELECTED),
]  # fmt: skip
_NOT_PLANTABLE: Final = "not plantable"
_SURVIVED: Final = "survived"
#: A mutant that loops for ever is ended after this multiple of the time that its tests take without it, plus this many
#: seconds.
_TIMES, _MORE_SECONDS = 4, 10


class _Steady:
    """Hypothesis with the same examples every time, which are not made smaller when they fail."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants", derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("mutants")


class _EndsAtFailure(_Steady):
    """In a mutant's process: says which test has failed, and ends there."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and not call.excinfo.errisinstance((pytest.skip.Exception, pytest.xfail.Exception)):
            say_and_end(f"killed {item.nodeid}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            say_and_end(f"killed {report.nodeid}")


class Warm(_Steady):
    """Has imported everything, and plants mutants in processes forked from it."""

    def __init__(self, mutants: list[tuple[MutatedModule, Mutant]], results: Results, options: Options) -> None:
        self.mutants = mutants
        self.results = results
        self.options = options
        self.reach = Reach.load(options.state)
        self._items: dict[str, pytest.Item] = {}
        self._living: dict[str, dict[Key, list[FunctionType]]] = {}
        self._in_child = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is None:
            return
        if call.excinfo.errisinstance((pytest.skip.Exception, pytest.xfail.Exception)):
            self._undecided.add(item.nodeid)
        elif self._in_child:
            say_and_end(f"killed {item.nodeid}")
        else:
            self._failed.add(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._living = living_functions()
        keep_recordings()
        self._failed: set[str] = set()
        self._undecided: set[str] = set()
        self._measure()
        killers: dict[str, Counter[str]] = defaultdict(Counter, self.results.killers())
        tests: dict[str, list[str]] = {}
        by_name = {mutant.name: (module, mutant) for module, mutant in self.mutants}
        for task, said in run(self._tasks(killers, tests), self.options.processes):
            _, mutant = by_name[task.name]
            if said.startswith(_NOT_PLANTABLE):
                self.options.say(f"  to be imported anew: {mutant.name}")
                continue
            record(self.results, mutant, said, tests[task.name], self.options)
            if said.startswith("killed "):
                killers[function_in(mutant.name)][said.removeprefix("killed ")] += 1
        return True

    def _tasks(self, killers: dict[str, Counter[str]], tests: dict[str, list[str]]) -> Iterator[Task]:
        for module, mutant in self.mutants:
            reaching = [name for name in self.reach.tests_of(mutant) if name in self._items]
            if not mutant.is_inside or not reaching:
                continue
            chosen = self.reach.ordered(reaching, killers[function_in(mutant.name)], self.options.seconds)
            tests[mutant.name] = chosen
            yield self._task(module, mutant, chosen)

    def _task(self, module: MutatedModule, mutant: Mutant, chosen: list[str]) -> Task:
        def work() -> str:
            self._in_child = True
            try:
                plant(module, mutant, self._living[str(module.path)])
            except NotPlantableError:
                return _NOT_PLANTABLE
            self._run([self._items[name] for name in chosen])
            return _SURVIVED

        return timed_task(mutant, work, sum(self.reach.tests[name].seconds for name in chosen))

    def _run(self, items: list[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _measure(self) -> None:
        """Run the tests whose files have changed since they were last run, and note what each of them reaches."""
        items = [item for item in self._items.values() if item.nodeid.split("::")[0] not in self.reach.files]
        if not items:
            return
        reached: dict[str, set[int]] = {name: set() for name in modules()}
        for name, module in _parsed().items():
            probe(module, self._living.get(str(module.path), {}), reached[name].add)
        for number, item in enumerate(items):
            for lines in reached.values():
                lines.clear()
            following = items[number + 1] if number + 1 < len(items) else None
            begun = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            took = time.process_time() - begun
            if item.nodeid not in self._failed | self._undecided:
                of_modules = {name: sorted(lines) for name, lines in reached.items() if lines}
                self.reach.tests[item.nodeid] = KnownTest(round(took, 4), of_modules)
            if following is None or following.path != item.path:
                self.reach.files[item.nodeid.split("::")[0]] = digest(item.path)
                self.reach.save(self.options.state)
            if number % 200 == 0:
                self.options.say(f"  what tests reach: {number} of {len(items)}")
        for name in sorted(self._undecided):
            self.options.say(f"  skips, or is known to fail, and decides nothing: {name}")
        for name in sorted(self._failed):
            self.options.say(f"  does not pass without a mutant, and decides nothing: {name}")
        for path in modules().values():
            restore(self._living.get(str(path), {}), path)
        self.reach.save(self.options.state)


class Options:
    """Options of a run: how many processes, how many seconds of tests for one mutant, and where results are kept."""

    def __init__(self, processes: int, seconds: float, state: Path) -> None:
        self.processes = processes
        self.seconds = seconds
        self.state = state
        #: Only some of the tests are run: if none of them notices a mutant, the others still may.
        self.only_kills = False
        self._out = os.dup(1)
        self.done = 0
        self.all = 0

    def say(self, text: str) -> None:
        """Also from inside pytest, which keeps what is written meanwhile."""
        os.write(self._out, f"{text}\n".encode())


def run_warm(mutants: list[tuple[MutatedModule, Mutant]], results: Results, options: Options) -> None:
    """Those inside of functions that a test reaches."""
    files = [file.relative_to(ROOT).as_posix() for file in deciding_files()]
    options.state.mkdir(exist_ok=True)
    log = options.state / "pytest.log"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    status = pytest.main([*_OPTIONS, *files], plugins=[Warm(mutants, results, options)])
    if status not in (0, 1):
        raise RuntimeError(f"pytest has ended with {status!r}; {log} says why")


def run_cold(mutants: list[tuple[MutatedModule, Mutant]], results: Results, options: Options) -> None:
    """The others, in processes that import Tailrace with the mutant in it."""
    reach = Reach.load(options.state)
    killers: dict[str, Counter[str]] = defaultdict(Counter, results.killers())
    by_name = {mutant.name: mutant for _, mutant in mutants}
    tests: dict[str, list[str]] = {}

    def tasks() -> Iterator[Task]:
        for module, mutant in mutants:
            reaching = reach.tests_of(mutant) if mutant.is_inside else []
            names = reaching or reach.tests_of_module(mutant)
            chosen = reach.ordered(names, killers[function_in(mutant.name)], options.seconds)
            tests[mutant.name] = chosen
            seconds = sum(reach.tests[name].seconds for name in chosen)
            yield timed_task(mutant, partial(_cold, [MutantFinder(module, mutant)], chosen), seconds + 20)

    nearest = next(iter(reach.tests))
    control = Task("", lambda: _cold([], [nearest]), 60, 600)
    (said,) = (said for _, said in run(iter([control]), 1))
    if said != _SURVIVED:
        raise RuntimeError(f"{nearest} does not pass in a process of its own, without a mutant: {said}")
    for task, said in run(tasks(), options.processes):
        record(results, by_name[task.name], said, tests[task.name], options)


def _cold(finders: list[MutantFinder], chosen: list[str]) -> str:
    sys.meta_path[:0] = finders
    status = pytest.main([*_OPTIONS, *chosen], plugins=[_EndsAtFailure()])
    return _SURVIVED if status == 0 else f"killed status {int(status)}"


def timed_task(mutant: Mutant, work: Any, seconds: float) -> Task:
    limit = int(_MORE_SECONDS + _TIMES * seconds)
    return Task(mutant.name, work, limit, 120 + 20 * limit)


def record(results: Results, mutant: Mutant, said: str, tests: list[str], options: Options) -> None:
    options.done += 1
    if said == _SURVIVED:
        verdict, by = _SURVIVED, ""
    elif said.startswith("killed "):
        verdict, by = "killed", said.removeprefix("killed ")
    else:
        verdict, by = "timeout", ""
    if verdict != _SURVIVED or not options.only_kills:
        results.add(mutant, verdict, by, len(tests))
    count = f"[{options.done}/{options.all}]"
    if verdict == _SURVIVED:
        options.say(f"{count} survived {len(tests)} tests: {mutant.module}:{mutant.line} {mutant.function}\n"
                    f"    - {mutant.before}\n    + {mutant.after}")  # fmt: skip
    elif options.done % 25 == 0:
        options.say(count)


@cache
def _parsed() -> dict[str, MutatedModule]:
    from tests.mutants.mutations import mutated_module

    return {name: mutated_module(name, path) for name, path in modules().items()}


def keep_recordings() -> None:
    """All recordings, unpacked once: the tests keep two of them at a time."""
    from tests.golden import recording, sharded_recording

    for module in (recording, sharded_recording):
        module.load = cache(module.load.__wrapped__)  # type: ignore[attr-defined]
    for name in recording.names():
        recording.load(name)
    for name in sharded_recording.names():
        sharded_recording.load(name)
