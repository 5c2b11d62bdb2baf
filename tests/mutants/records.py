"""What is known from earlier runs: which tests reach which statement, and what became of each mutant.

Both are in ``.mutants``, and are valid until the files that they depend on change: for a mutant that was killed its
module, for one that survived the tests too.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.mutants.mutations import Mutant
from tests.mutants.places import ROOT, deciding_files, digest, modules

STATE: Final = ROOT / ".mutants"
_REACH: Final = "reach.json"
_RESULTS: Final = "results.jsonl"


@dataclass
class KnownTest:
    """A test that passes without a mutant."""

    seconds: float
    reached: dict[str, list[int]]
    """Lines of statements by module."""


@dataclass
class Reach:
    """The tests by their names, for as long as their files are the same."""

    tests: dict[str, KnownTest] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Reach:
        path = folder / _REACH
        if not path.exists():
            return cls()
        stored = json.loads(path.read_text())
        if stored["sources"] != _sources():
            return cls()
        current = {file.relative_to(ROOT).as_posix(): digest(file) for file in deciding_files()}
        files = {name: known for name, known in stored["files"].items() if current.get(name) == known}
        tests = {name: KnownTest(**known) for name, known in stored["tests"].items() if name.split("::")[0] in files}
        return cls(tests, files)

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        tests = {name: asdict(known) for name, known in self.tests.items() if name.split("::")[0] in self.files}
        stored = {"sources": _sources(), "files": self.files, "tests": tests}
        (folder / _REACH).write_text(json.dumps(stored))

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that reach the mutant's statement."""
        return [name for name, known in self.tests.items() if mutant.statement in known.reached.get(mutant.module, ())]

    def tests_of_module(self, mutant: Mutant) -> list[str]:
        """Those that reach any of the module's functions, or all if none does."""
        return [name for name, known in self.tests.items() if mutant.module in known.reached] or [*self.tests]

    def ordered(self, names: Iterable[str], killers: Counter[str], seconds: float) -> list[str]:
        """First those that have killed other mutants of the function, then the quick ones, up to so many seconds of
        tests."""
        chosen, left = [], seconds
        for name in sorted(names, key=lambda name: (-killers[name], self.tests[name].seconds)):
            left -= self.tests[name].seconds
            if chosen and left < 0:
                break
            chosen.append(name)
        return chosen


@dataclass(frozen=True)
class Result:
    """What became of a mutant."""

    name: str
    verdict: str
    """``killed``, ``timeout`` or ``survived``."""
    by: str
    """The test that noticed it."""
    tests: int
    """How many were to run."""
    source: str
    tests_digest: str


class Results:
    """The results of all runs. Each is written as it comes, so that a run may be interrupted."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _RESULTS
        self._by_name: dict[str, Result] = {}
        self._tests_digest = hashlib.sha256("".join(digest(file) for file in deciding_files()).encode()).hexdigest()[
            :16
        ]
        self._digests = {module: digest(path) for module, path in modules().items()}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                result = Result(**json.loads(line))
                self._by_name[result.name] = result

    def get(self, mutant: Mutant, *, again: bool = False) -> Result | None:
        """With ``again`` what survived earlier is run again wherever a test has changed meanwhile."""
        result = self._by_name.get(mutant.name)
        if result is None or result.source != self._digests[mutant.module]:
            return None
        if again and result.verdict == "survived" and result.tests_digest != self._tests_digest:
            return None
        return result

    def add(self, mutant: Mutant, verdict: str, by: str, tests: int) -> Result:
        digests = (self._digests[mutant.module], self._tests_digest)
        result = Result(mutant.name, verdict, by, tests, *digests)
        self._by_name[mutant.name] = result
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        return result

    def killers(self) -> dict[str, Counter[str]]:
        """For each function, ``module:function``, how many of its mutants each test has killed."""
        found: dict[str, Counter[str]] = {}
        for result in self._by_name.values():
            if result.by:
                found.setdefault(function_in(result.name), Counter())[result.by] += 1
        return found


def function_in(name: str) -> str:
    """``module:function`` of a mutant's name."""
    return name.split(": ", 1)[0]


def _sources() -> dict[str, Any]:
    return {module: digest(path) for module, path in modules().items()}
