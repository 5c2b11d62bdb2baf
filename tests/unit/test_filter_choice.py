"""Whether a stream's filter is sent follows from what it has read."""

from __future__ import annotations

import bson
import pytest

from tailrace.read.source.filter_choice import FilterChoice, Sample, filter_pays


def entries(count: int, size: int) -> bytes:
    return b"".join(bson.encode({"n": number, "text": "x" * size}) for number in range(count))


@pytest.mark.parametrize(
    ("matching", "size", "is_local", "pays"),
    [
        (1.0, 500, False, False),  # everything passes: a filter is useless
        (0.6, 500, False, False),
        (0.3, 500, False, True),  # what Spark's planner found with a bound of one half
        (0.02, 500, False, True),
        (0.02, 500, True, False),  # no network to spare
        (0.02, 20_000, True, True),  # but 20 kB are a price in memory too
        (0.6, 5_000, False, True),
        (0.9, 5_000, False, True),
        (0.99, 5_000, False, False),
    ],
)
def test_what_a_filter_spares_is_weighed_against_what_asking_costs(
    matching: float, size: int, is_local: bool, pays: bool
) -> None:
    count = 10_000
    own = int(count * matching)
    assert filter_pays(Sample(count, count * size, own, own * size), is_local=is_local) is pays


def test_bytes_count_and_not_entries_alone() -> None:
    """Nine of ten match, but the tenth holds nearly all the bytes."""
    small, large = Sample(1000, 1000 * 500, 900, 900 * 500), Sample(1000, 900 * 500 + 100 * 50_000, 900, 900 * 500)
    assert not filter_pays(small, is_local=False)
    assert filter_pays(large, is_local=False)


def test_without_the_kernel_a_filter_pays_sooner() -> None:
    sample = Sample(1000, 500_000, 500, 250_000)
    assert not filter_pays(sample, is_local=True)
    assert filter_pays(sample, is_local=True, compiled=False)


def test_a_thousand_entries_decide_and_fewer_do_not() -> None:
    choice = FilterChoice(is_local=False)
    raw = entries(400, 450)
    for asks in (False, False, True):
        assert not choice.asks
        choice.saw(raw, 4, 2_000, compiled=True)
        assert choice.asks is asks


def test_a_choice_is_made_again_when_the_workload_changes() -> None:
    choice = FilterChoice(is_local=False)
    raw = entries(2000, 450)
    size = len(raw)
    choice.saw(raw, 20, size // 100, compiled=True)
    assert choice.asks
    # Now everything that is read matches: after some time this is checked again, and the filter is dropped.
    batches = 0
    while choice.asks:
        choice.saw(raw, 2000, size, compiled=True)
        batches += 1
    assert batches == 25
    for _ in range(10):
        choice.saw(raw, 2000, size, compiled=True)
        assert not choice.asks
    # And back: little matches again.
    batches = 0
    while not choice.asks:
        choice.saw(raw, 20, size // 100, compiled=True)
        batches += 1
    assert batches < 40
    # The next look comes later than the first.
    batches = 0
    while choice.asks:
        choice.saw(raw, 2000, size, compiled=True)
        batches += 1
    assert batches == 50


def test_empty_replies_decide_nothing() -> None:
    choice = FilterChoice(is_local=False)
    for _ in range(5000):
        choice.saw(b"", 0, 0, compiled=True)
    assert not choice.asks


@pytest.mark.parametrize("is_local", [True, False])
def test_replies_that_hold_nothing_for_the_stream_speak_for_the_filter(is_local: bool) -> None:
    """At the end of the oplog each write causes a reply, including the program's own writes. No test had shown this:
    they counted entries, but not the cost of a reply for each of them."""
    choice = FilterChoice(is_local=is_local)
    backlog, foreign = entries(2000, 450), entries(1, 450)
    for _ in range(40):
        choice.saw(backlog, 2000, len(backlog), compiled=True)
    replies = 0
    while not choice.asks:
        choice.saw(foreign, 0, 0, compiled=True)
        replies += 1
    assert replies < 300


def test_replies_that_hold_events_do_not() -> None:
    choice = FilterChoice(is_local=True)
    own = entries(1, 450)
    for _ in range(3000):
        choice.saw(own, 1, len(own), compiled=True)
        assert not choice.asks
