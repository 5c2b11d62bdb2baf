"""What is reported about a listener's health, given the facts; how far a position is behind, given the times seen so
far."""

from __future__ import annotations

import pytest

from tailrace.act.consumer.rules.health import SILENT_AFTER_S, HealthLimits, ListenerFacts, NewestTimes, judge
from tailrace.base.health import Health, whole


def test_an_idle_clock_that_leaps_leaves_nobody_behind() -> None:
    times = NewestTimes()
    assert times.lag(100) is None
    times.saw(100)
    assert times.lag(100) == 0
    times.saw(110)  # the no-op of an idle primary, which a stream gives half a second later
    assert times.lag(100) == 0
    times.saw(115)
    assert times.lag(100) == 5
    assert times.lag(110) == 0
    assert times.lag(115) == times.lag(120) == 0


def test_what_was_there_before_the_first_look_counts_from_the_position() -> None:
    times = NewestTimes()
    times.saw(1_000)
    assert times.lag(400) == 600


def test_no_more_than_a_thousand_times_are_kept_and_a_long_lag_stays_right() -> None:
    times = NewestTimes()
    for seconds in range(0, 50_000, 5):
        times.saw(seconds)
    assert len(times._times) <= 1_000
    for position in (0, 20_000, 49_000):
        lag = times.lag(position)
        assert lag is not None
        assert abs(lag - (49_995 - position)) <= 0.02 * 49_995


LIMITS = HealthLimits(hung_after=60, behind_after=120)


@pytest.mark.parametrize(
    ("facts", "dead", "unready"),
    [
        (ListenerFacts("r"), None, None),
        (ListenerFacts("r", holds=False, lag_s=3), None, None),
        (ListenerFacts("r", busy_s=60.0), None, None),
        (ListenerFacts("r", busy_s=61.0), "at work on one change for 61 s", None),
        (ListenerFacts("r", busy_s=5.0, lease_lost="the lease is lost"), None, "the lease is lost, and its handler"),
        (ListenerFacts("r", lag_s=121), None, "121 s behind, more than 120 s"),
        (ListenerFacts("r", lag_s=120), None, None),
        (ListenerFacts("r", past_oplog=True), None, "older than the oldest entry of the oplog"),
        (ListenerFacts("r", holds=False, past_oplog=True), None, "older than the oldest entry of the oplog"),
        (
            ListenerFacts("r", silence_s=SILENT_AFTER_S + 1, silence="from the lease store"),
            None,
            "from the lease store",
        ),
    ],
)
def test_what_is_wrong_is_said(facts: ListenerFacts, dead: str | None, unready: str | None) -> None:
    found = judge(facts, LIMITS)
    assert (found.dead is None, found.unready is None) == (dead is None, unready is None)
    assert dead is None or dead in str(found.dead)
    assert unready is None or unready in str(found.unready)


def test_one_that_stands_by_is_ready_and_one_that_has_not_begun_is_not() -> None:
    by = judge(ListenerFacts("r", holds=False, lag_s=4), LIMITS)
    assert (by.trouble, by.said) == (None, "the listener on 'r' stands by: it does not hold the lease, 4 s behind")
    assert (
        judge(ListenerFacts("r", begun=False), LIMITS).trouble == "the listener on 'r' has not asked for its lease yet"
    )


def test_a_process_is_as_well_as_the_worst_of_its_parts() -> None:
    found = whole([Health("one"), Health("two", dead="no"), Health("three", unready="later", begun=False)])
    assert found == Health("one; two; three", "no", "later", begun=False)
    assert found.trouble == "no"
