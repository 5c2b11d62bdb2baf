"""Mutants that were reviewed and are no faults: nobody can tell them from the program, or nothing depends on the
difference."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutants.mutations import Mutant

FILE: Final = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Reviewed:
    """The reasons, by the mutants' names."""

    reasons: dict[str, str]

    @classmethod
    def load(cls, path: Path = FILE) -> Reviewed:
        """Each table has a ``reason`` and the ``mutants`` that it holds for."""
        tables = tomllib.loads(path.read_text()).get("equivalent", [])
        return cls({name: table["reason"] for table in tables for name in table["mutants"]})

    def reason(self, mutant: Mutant) -> str | None:
        return self.reasons.get(mutant.name)
