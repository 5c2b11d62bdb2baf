"""Commits of several lanes in one request: who waits for whom, and who gets which result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tailrace.act.consumer.group_commit import GroupCommit
from tailrace.act.consumer.lease import LeaseCommit
from tailrace.consumer import Lease, LeaseLost, LeaseStoreUnavailable, MemoryLeaseStore
from tailrace.errors import InternalError, TailraceError


class Recording(MemoryLeaseStore):
    """Notes which resources each request was for, and can hold requests back."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[set[str]] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self.fails: Callable[[], Exception] | None = None
        self.takes_s = 0.0

    def commit_together(self, commits: Sequence[LeaseCommit]) -> list[TailraceError | None]:
        self.requests.append({commit.lease.resource for commit in commits})
        self.begun.release()
        assert self.go_on.wait(300)
        time.sleep(self.takes_s)
        if self.fails is not None:
            raise self.fails()
        return super().commit_together(commits)


def leases(store: MemoryLeaseStore, count: int) -> list[Lease]:
    taken = [store.acquire(f"lane {number}", "me", 600) for number in range(count)]
    return [lease for lease in taken if lease is not None]


def position(number: int) -> dict[str, Any]:
    return {"token": {"_data": f"{number:08X}"}}


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_who_comes_while_a_request_is_on_its_way_shares_the_next_one() -> None:
    store = Recording()
    first, *others = leases(store, 4)
    commits = GroupCommit(store, requests_max=1)
    with ThreadPoolExecutor(4) as pool:
        store.go_on.clear()
        done = [pool.submit(commits.commit, first, position(1), 600)]
        assert store.begun.acquire(timeout=300)
        done += [pool.submit(commits.commit, lease, position(1), 600) for lease in others]
        until(lambda: len(commits._waiting) == 3)
        assert not any(future.done() for future in done)
        store.go_on.set()
        for future in done:
            future.result(60)
    assert store.requests == [{"lane 0"}, {"lane 1", "lane 2", "lane 3"}]
    assert all(store.read(f"lane {number}").position == position(1) for number in range(4))  # type: ignore[union-attr]


def test_lanes_wait_for_nobody_while_few_requests_are_on_their_way() -> None:
    """A server handles several commits at a time: waiting for each other made lanes slower."""
    store = Recording()
    several = leases(store, 6)
    commits = GroupCommit(store, requests_max=4)
    with ThreadPoolExecutor(6) as pool:
        store.go_on.clear()
        done = [pool.submit(commits.commit, lease, position(1), 600) for lease in several]
        for _ in range(4):
            assert store.begun.acquire(timeout=300)
        until(lambda: len(commits._waiting) == 2)
        store.go_on.set()
        for future in done:
            future.result(60)
    assert sorted(map(len, store.requests)) == [1, 1, 1, 1, 2]
    assert all(store.read(lease.resource).position == position(1) for lease in several)  # type: ignore[union-attr]


def test_each_hears_of_its_own_lease() -> None:
    store = Recording()
    first, stolen, held = leases(store, 3)
    commits = GroupCommit(store, requests_max=1)
    with ThreadPoolExecutor(3) as pool:
        store.go_on.clear()
        begun = pool.submit(commits.commit, first, position(1), 600)
        assert store.begun.acquire(timeout=300)
        store.revoke(stolen.resource)
        lost, kept = (pool.submit(commits.commit, lease, position(1), 600) for lease in (stolen, held))
        until(lambda: len(commits._waiting) == 2)
        store.go_on.set()
        begun.result(60)
        kept.result(60)
        with pytest.raises(LeaseLost, match="it was released"):
            lost.result(60)
    assert store.read(stolen.resource).position is None  # type: ignore[union-attr]
    assert store.read(held.resource).position == position(1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fails", "heard"),
    [
        (lambda: LeaseStoreUnavailable("away"), (LeaseStoreUnavailable,)),
        (lambda: KeyError("n"), (InternalError, KeyError)),  # whose thread has sent it hears the error itself
    ],
)
def test_a_request_that_fails_fails_for_all_of_it_and_the_next_one_goes_out(
    fails: Callable[[], Exception], heard: tuple[type[Exception], ...]
) -> None:
    store = Recording()
    first, *others = leases(store, 3)
    commits = GroupCommit(store, requests_max=1)
    with ThreadPoolExecutor(3) as pool:
        store.go_on.clear()
        begun = pool.submit(commits.commit, first, position(1), 600)
        assert store.begun.acquire(timeout=300)
        done = [pool.submit(commits.commit, lease, position(1), 600) for lease in others]
        until(lambda: len(commits._waiting) == 2)
        store.fails = fails
        store.go_on.set()
        errors = [future.exception(300) for future in (begun, *done)]
    assert all(isinstance(error, heard) for error in errors)
    assert len({id(error) for error in errors}) == 3
    store.fails = None
    for lease in (first, *others):
        commits.commit(lease, position(2), 600)
    assert all(store.read(lease.resource).position == position(2) for lease in (first, *others))  # type: ignore[union-attr]


def used_to_share(store: Recording, several: Sequence[Lease]) -> GroupCommit:
    """Lanes that have committed quickly one after the other, and so wait for each other."""
    commits = GroupCommit(store)
    store.takes_s = 0.02

    def work(lease: Lease) -> None:
        for number in range(20):
            commits.commit(lease, position(number), 600)

    with ThreadPoolExecutor(len(several)) as pool:
        for future in [pool.submit(work, lease) for lease in several]:
            future.result(120)
    store.takes_s = 0.0
    return commits


def test_a_lane_that_others_leave_goes_on_alone() -> None:
    """It waits a moment for them, and nothing wakes it."""
    store = Recording()
    several = leases(store, 3)
    commits = used_to_share(store, several)
    for number in range(20, 30):
        commits.commit(several[0], position(number), 600)
    assert store.requests[-1] == {several[0].resource}
    assert store.read(several[0].resource).position == position(29)  # type: ignore[union-attr]


def test_a_request_without_an_answer_holds_up_no_other_lane() -> None:
    """Lanes with a request on its way are waited for too: that wait must end before the request does."""
    store = Recording()
    several = leases(store, 3)
    commits = used_to_share(store, several)
    before = len(store.requests)
    store.go_on.clear()
    with ThreadPoolExecutor(3) as pool:
        done = []
        for count, lease in enumerate(several, start=1):
            done.append(pool.submit(commits.commit, lease, position(20), 600))
            until(lambda count=count: len(store.requests) == before + count)  # type: ignore[misc]
        store.go_on.set()
        for future in done:
            future.result(60)
    assert [len(request) for request in store.requests[before:]] == [1, 1, 1]


def test_a_store_that_cannot_commit_together_commits_each_for_itself() -> None:
    class Plain:
        def __init__(self) -> None:
            self.commits: list[Any] = []

        def commit(self, *arguments: Any) -> None:
            self.commits.append(arguments)

    plain = Plain()
    lease = Lease("orders", "me", 1)
    GroupCommit(plain).commit(lease, position(1), 5.0)  # type: ignore[arg-type]
    assert plain.commits == [(lease, position(1), 5.0)]


@pytest.mark.parametrize("requests_max", [1, 2, 4])
def test_threads_that_commit_again_and_again_write_every_position_in_its_order(requests_max: int) -> None:
    """Whatever the interleaving: nobody waits for ever, and after each call the position is there."""
    store = Recording()
    store.takes_s = 0.0005
    commits = GroupCommit(store, requests_max=requests_max)

    def work(lease: Lease) -> None:
        for number in range(300):
            commits.commit(lease, position(number), 600)
            assert store.read(lease.resource).position == position(number)  # type: ignore[union-attr]
            if number % 7 == hash(lease.resource) % 7:
                time.sleep(0.0005)

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, lease) for lease in leases(store, 6)]:
            future.result(120)
    assert sum(map(len, store.requests)) == 6 * 300
    assert any(len(request) > 1 for request in store.requests)  # some went together
