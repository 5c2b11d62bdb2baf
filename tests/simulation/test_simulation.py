"""Listeners keep their promises under pauses, crashes, lost answers, wrong clocks and stolen leases, and the simulation
notices listeners that do not. ``make simulate-consumers`` runs 10,000 seeds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.consumer.rules.retry_schedule import RetrySchedule
from tests.amounts import amount
from tests.simulation.mutants import MUTANTS
from tests.simulation.process import Process
from tests.simulation.servers import BrokenPromiseError
from tests.simulation.simulation import Simulation, simulate

SLICE = amount(100, 250)
#: The search for a planted fault begins shortly before a seed that found it, if hundreds come before that one. If that
#: seed's run has changed, the search finds another one.
FIRST = {
    "a commit past a partial batch": 69,
    "a commit that does not look at the owner": 66,
    "an earlier drop ends it": 218,
    "gaps that push out others": 50,
}


def test_every_promise_holds_whatever_goes_wrong() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SLICE):
        run = simulate(seed)
        seen["transactional runs"] += run.is_transactional
        seen["runs from now"] += run.settings.start == "now"
        seen["several listeners"] += len(run.processes) > 1
        seen["restarts"] += sum(process.incarnation - 1 for process in run.processes)
        seen["changes of owner"] += sum(record.version - 1 for record in run.servers.records.values())
        seen["effects twice"] += sum(count > 1 for count in run.servers.handled.values())
        seen["fenced writes"] += run.servers.fenced_writes
        seen["retries with waits of their own"] += run.retries if run.settings.retry != RetrySchedule() else 0
        seen["late requests"] += run.servers.late
        seen["dead letters replayed"] += run.servers.replayed
        seen["dead letters that came too late"] += run.servers.fenced_letters
        seen["entries lost"] += run.history.lost
        for name, count in run.failing.counts.items():
            seen[name] += count
    # A simulation in which nothing goes wrong shows nothing.
    assert min(seen.values()) > 10, seen


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_within_a_thousand_seeds(name: str) -> None:
    for seed in range(FIRST.get(name, 0), FIRST.get(name, 0) + 1000):
        try:
            simulate(seed, **MUTANTS[name])
        except BrokenPromiseError as error:
            assert str(error).startswith(f"seed {seed}: ")  # noqa: PT017  whichever seed it is
            break
    else:
        pytest.fail(f"1000 seeds have not noticed {name}")
    with pytest.raises(BrokenPromiseError, match=f"seed {seed}: "):
        simulate(seed, **MUTANTS[name])  # the seed plays the same run again
    simulate(seed)


@pytest.mark.parametrize("seed", [1016, 1131, 2177])
def test_a_process_that_is_killed_between_two_changes_of_a_batch_handles_no_more_of_it(seed: int) -> None:
    """The simulated process went on with them after its restart. The slice above does not include these seeds."""
    simulate(seed, fails=False)


def test_a_seed_plays_the_same_run_again() -> None:
    def trace(seed: int) -> list[Any]:
        run = simulate(seed)
        return [run.schedule.now, run.servers.handled, run.servers.records]

    assert [trace(seed) for seed in range(5)] == [trace(seed) for seed in range(5)]


def test_an_owner_that_sleeps_past_its_lease_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 3, step by step: it wakes between its check of the lease and its write, after the next owner's write."""
    found: list[int] = []
    check = Process.check

    def counted(self: Process) -> LeaseLost | None:
        error = check(self)
        found.append(error is not None)
        return error

    monkeypatch.setattr(Process, "check", counted)
    fenced = sum(Simulation(seed).played().servers.fenced_writes for seed in range(40))
    assert fenced > 0
    assert any(found)  # those that check after waking need not get this far
