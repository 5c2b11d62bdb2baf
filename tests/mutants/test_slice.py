"""A slice of ``make mutants``: of some mutants of each place, drawn by a seed, the tests notice all but a few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.amounts import amount


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_of_a_hundred_mutants_of_a_place_fewer_than_five_survive(tmp_path: Path) -> None:
    arguments = ["--sample", str(amount(25, 100)), "--seed", "33", "--state", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
