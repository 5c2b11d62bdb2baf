"""``make simulate-consumers``: it ends with status 1 and names each seed that breaks a promise, which plays again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.simulation import __main__ as command
from tests.simulation.mutants import MUTANTS
from tests.simulation.servers import BrokenPromiseError
from tests.simulation.simulation import Simulation, simulate


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Its status and output for some arguments. It uses threads, since processes would not have a test's planted
    fault."""
    monkeypatch.setattr(command, "ProcessPoolExecutor", ThreadPoolExecutor)

    def ran(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["tests.simulation", *arguments])
        return command.main(), capsys.readouterr().out.splitlines()

    return ran


def test_a_run_without_failures_says_so_and_a_seed_can_be_played_alone(run: Any) -> None:
    status, (line,) = run("--seeds", "3-5")
    assert status == 0
    assert line.startswith("3 seeds, 0 failed, ")
    assert run("--seed", "5") == (0, ["seed 5: every promise holds"])


def test_a_failing_seed_is_printed_and_plays_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests look for planted faults without the command, so nothing showed that it reports what it has found."""

    def broken(seed: int) -> Simulation:
        options: dict[str, Any] = MUTANTS["the commit before the work"]
        return simulate(seed, **options)

    monkeypatch.setattr(command, "simulate", broken)
    status, (*found, last) = run("--seeds", "0-3")
    assert status == 1
    assert last.startswith(f"4 seeds, {len(found)} failed, ")
    seeds = [re.match(r"seed (\d): ", line)[1] for line in found]  # type: ignore[index]
    assert seeds == sorted(seeds)
    with pytest.raises(BrokenPromiseError) as again:
        run("--seed", seeds[0])
    assert str(again.value) == found[0]
