"""A short slice of the fuzzing on a sharded cluster: the long version is ``make fuzz-sharded``."""

from __future__ import annotations

import random
from collections.abc import Callable

import bson
import pytest

from tailrace.embedded import ShardedCluster
from tests.amounts import amount
from tests.sharded.fuzz import OurStream, Totals, run_seed, stream_difference
from tests.sharded.random_workload import History, Wrote, history_difference, history_of
from tests.sharded.waiting import wait_for
from tests.sharded.watched_servers import ServerDiedError, WatchedServers


@pytest.mark.mongod
def test_a_random_workload_on_moving_chunks_is_given_whole_in_order_and_resumed_anywhere() -> None:
    totals = Totals()
    ran = run_seed(totals, seed=11, steps=amount(35, 60), resumes=amount(1, 2))
    assert not totals.differences, "\n\n".join(totals.differences[:3])
    assert ran.counts["shards added"] == 1
    assert totals.moves >= 3
    assert totals.writes >= amount(90, 150)
    assert ran.counts["shards removed"] == 1
    assert (totals.streams, totals.events >= 4 * totals.writes) == (5, True)
    assert totals.resumes >= amount(3, 6)


def _events(count: int) -> tuple[list[bytes], History]:
    """Updates of three documents in turn, and the record of them."""
    events, history = [], {}
    for number in range(count):
        key = {"region": "a", "_id": number % 3}
        update = {"updatedFields": {"v": number}}
        namespace = {"db": "fuzz", "coll": "orders"}
        event = {"_id": {"_data": f"{number:04}"}, "operationType": "update", "ns": namespace, "documentKey": key}
        events.append(bson.encode({**event, "updateDescription": update}))
        history.setdefault(("fuzz.orders", number % 3), []).append(Wrote("update", number, "a"))
    return events, history


@pytest.mark.parametrize("seed", range(20))
def test_an_event_lost_given_twice_or_too_early_would_be_seen(seed: int) -> None:
    rng = random.Random(seed)
    events, history = _events(30)
    assert stream_difference(events, OurStream(list(events))) is None
    assert history_difference(history, history_of(events, "fuzz")) is None
    place = rng.randrange(25)
    lost = events[:place] + events[place + 1 :]
    twice = [*events[: place + 1], *events[place:]]
    early = [*events[:place], events[place + 3], *events[place : place + 3], *events[place + 4 :]]
    for wrong in (lost, twice, early, events[:-1]):
        assert stream_difference(events, OurStream(wrong)) is not None
        assert history_difference(history, history_of(wrong, "fuzz")) is not None
    assert stream_difference(events, OurStream(list(events), failure=ValueError("it broke"))) is not None


def test_only_a_transaction_over_shards_may_give_a_document_s_writes_the_other_way_round() -> None:
    deleted, inserted = Wrote("delete", None, "a"), Wrote("insert", 2, "x")
    key = ("fuzz.orders", 1)

    def differs(transaction: object) -> bool:
        both = [deleted._replace(transaction=transaction), inserted._replace(transaction=transaction)]
        return history_difference({key: both}, {key: both[::-1]}) is not None

    assert differs(None)
    assert not differs("one transaction")


@pytest.mark.slow  # an error of the fuzz itself: a run that it spoils says so
@pytest.mark.mongod
def test_a_server_that_dies_by_itself_ends_the_run_with_its_reason_and_runs_again(
    start_sharded_cluster: Callable[..., ShardedCluster],
) -> None:
    cluster = start_sharded_cluster(3)
    told: list[ServerDiedError] = []
    former = cluster.remove_shard("shard2")
    with WatchedServers(cluster, told.append):
        former.kill()  # as the workload does with former shards
    assert not told
    member = cluster.shards["shard1"].members[0]

    def wait_for_an_answer() -> None:
        with WatchedServers(cluster, told.append):
            member.kill()
            wait_for(lambda: bool(told) and member.is_running, "the server was not started again")
            raise ConnectionError("what a writer meets whose server is gone")

    with pytest.raises(ServerDiedError, match=r"^shard1 \(mongod .*\) died") as met:
        wait_for_an_answer()
    assert isinstance(met.value.__cause__, ConnectionError)
    assert told == [met.value]
