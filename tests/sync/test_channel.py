"""A sync as a whole: who owns it, who may request what, the cut-over and the way back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.act.sync import hand_over, standing
from tailrace.act.sync.ownership import SyncOwnership
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, TailraceError, UsageError
from tailrace.sync import Sync
from tests.lending import Lender
from tests.patience import PATIENCE_S
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held

pytestmark = pytest.mark.mongod

SECONDS = 10**6


@pytest.fixture(scope="module")
def ends(lender: Lender) -> Iterator[tuple[ReplicaSet, ReplicaSet]]:
    with ReplicaSet(parameters={"ttlMonitorSleepSecs": 1}) as source, lender.lent() as target:
        yield source, target


@pytest.fixture
def uris(ends: tuple[ReplicaSet, ReplicaSet]) -> tuple[str, str]:
    """Two empty ends; the source then has a few collections."""
    source, target = ends
    for end in ends:
        with MongoClient[Any](end.uri) as client:
            if client.server_info()["versionArray"][0] >= 6:
                client.admin.command("setUserWriteBlockMode", 1, **{"global": False})
            for name in client.list_database_names():
                if name not in ("admin", "config", "local"):
                    client.drop_database(name)
    with MongoClient[Any](source.uri) as client:
        client.shop.orders.insert_many([{"_id": n, "n": n} for n in range(50)])
        client.shop.orders.create_index("at", expireAfterSeconds=SECONDS)
        client.shop.orders.create_index("n", unique=True)
    return source.uri, target.uri


@contextmanager
def running(sync: Sync) -> Iterator[threading.Thread]:
    """The sync in a thread, until the block ends."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            sync.run()
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        sync.stop()
        thread.join(PATIENCE_S)
    assert not failures, failures


def wait(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def made(uris: tuple[str, str], **options: Any) -> Sync:
    return Sync(*uris, lease_s=4.0, **options)


def unlike(uris: tuple[str, str], *, held_back: bool = True) -> list[str]:
    sides = [held(uri, but=[STATE_DB], selected=is_users) for uri in uris]
    return differences(*sides, known=normal("", "", ages=not held_back))


def write(uri: str, number: int) -> None:
    with MongoClient[Any](uri) as client:
        client.shop.orders.insert_one({"_id": number, "n": number})


def has(uri: str, number: int) -> bool:
    with MongoClient[Any](uri) as client:
        return client.shop.orders.find_one({"_id": number}) is not None


def test_a_run_to_the_present_copies_and_makes_the_target_equal(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        found = sync.run(to_present=True)
    assert (found.phase, found.is_consistent) == ("follow", True)
    assert unlike(uris) == []
    assert unlike(uris, held_back=False) != [], "no document may expire on the target by itself"


def test_it_goes_on_where_it_stopped_and_copies_nothing_again(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
    write(uris[0], 100)
    with made(uris) as sync:
        found = sync.run(to_present=True)
    assert found.changes >= 1
    assert found.time is not None
    assert unlike(uris) == []


def test_another_selection_than_at_the_beginning_is_refused(uris: tuple[str, str]) -> None:
    with made(uris, only=["shop.*"]) as sync:
        sync.run(to_present=True)
    with made(uris, only=["shop.orders"]) as sync, pytest.raises(UsageError, match="other collections or names"):
        sync.run(to_present=True)


def test_what_is_not_there_cannot_be_paused_cut_over_or_reversed(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        for ask in (sync.pause, sync.resume, sync.cutover, sync.reverse):
            with pytest.raises(UsageError, match="there is no sync"):
                ask()
        assert sync.status().phase == "new"


def test_a_paused_sync_writes_nothing_until_it_is_resumed(uris: tuple[str, str]) -> None:
    with made(uris) as sync, made(uris) as other, running(sync):
        wait(lambda: other.status().is_consistent)
        other.pause()
        time.sleep(2.5)  # it looks once a second
        before = other.status().time
        write(uris[0], 100)
        time.sleep(1.5)
        assert not has(uris[1], 100)
        assert other.status().time == before
        assert other.status().paused
        other.resume()
        wait(lambda: has(uris[1], 100))
    with made(uris) as sync:
        sync.run(to_present=True)
    assert unlike(uris) == []


def test_one_of_two_works_and_the_other_goes_on_after_it(uris: tuple[str, str]) -> None:
    with made(uris) as first, made(uris) as second, made(uris) as looking, ExitStack() as stack:
        with running(first):
            wait(lambda: looking.status().is_consistent)
            stack.enter_context(running(second))
            owners = []
            for _ in range(20):
                owners.append(looking.status().owner)
                time.sleep(0.05)
            assert len(set(owners)) == 1
        write(uris[0], 100)
        wait(lambda: has(uris[1], 100))
        assert looking.status().owner not in (owners[0], None)


def test_after_a_cut_over_the_target_is_the_source_s_equal_in_all(uris: tuple[str, str]) -> None:
    with made(uris) as sync, made(uris) as other, running(sync) as thread:
        wait(lambda: other.status().is_consistent)
        done = other.cutover(block=False)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the run ends with the cut-over"
        assert (done.blocked, done.restored) == (False, 1)
        assert done.verified >= 50
        assert other.status().phase == "cutOver"
    assert unlike(uris, held_back=False) == []


def test_a_member_that_is_no_primary_cannot_be_cut_over(
    uris: tuple[str, str], ends: tuple[ReplicaSet, ReplicaSet]
) -> None:
    """A secondary does not know what the primary has acknowledged: with a member that was an hour late, the writes of
    the last hour were missing on the target."""
    with MongoClient[Any](ends[0].members[0].uri) as client, made((ends[0].members[0].uri, uris[1])) as sync:
        sync.run(to_present=True)
        client.admin.command({"replSetStepDown": 600, "force": True})
        try:
            with pytest.raises(UsageError, match=r"127\.0\.0\.1:\d+ is not a primary") as refused:
                sync.cutover(block=False)
        finally:
            client.admin.command({"replSetFreeze": 0})
            ends[0].wait_until_ready()
        assert "Name the replica set in SOURCE" in str(refused.value.hint)
        assert sync.status().phase == "follow"
        # A primary that was replaced by another would not know it, and would have no majority for this:
        proofs = {"op": "n", "o.msg": "linearizable read"}
        before = client.local["oplog.rs"].count_documents(proofs)
        sync.cutover(block=False)
        assert client.local["oplog.rs"].count_documents(proofs) == before + 1


def test_a_cut_over_without_a_process_that_follows_follows_itself(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
        write(uris[0], 100)
    with made(uris) as other:
        other.cutover(block=False)
    assert has(uris[1], 100)
    assert unlike(uris, held_back=False) == []


def test_somebody_who_still_writes_ends_the_cut_over_and_not_the_sync(uris: tuple[str, str]) -> None:
    stop = threading.Event()

    def keep_writing() -> None:
        with MongoClient[Any](uris[0]) as client:
            number = 1000
            while not stop.wait(0.001):
                number += 1
                client.shop.orders.insert_one({"_id": number, "n": number})

    with made(uris) as sync, made(uris) as other, running(sync):
        wait(lambda: other.status().is_consistent)
        writer = threading.Thread(target=keep_writing, daemon=True)
        writer.start()
        with pytest.raises(UsageError, match=r"somebody wrote to the source .*shop\.orders"):
            other.cutover(block=False)
        stop.set()
        writer.join()
        last = 10**6
        write(uris[0], last)
        wait(lambda: has(uris[1], last))
        assert other.status().phase == "follow"


def test_the_source_refuses_writes_for_as_long_as_it_is_cut_over(uris: tuple[str, str]) -> None:
    with MongoClient[Any](uris[0]) as client:
        if client.server_info()["versionArray"][0] < 6:
            pytest.skip("the server cannot refuse its users' writes")
    with made(uris) as sync:
        sync.run(to_present=True)
        assert sync.cutover().blocked
    with pytest.raises(Exception, match="User writes blocked"):
        write(uris[0], 100)
    with made(uris) as sync:
        with pytest.raises(UsageError, match="refuses its users' writes") as raised:
            sync.reverse()
        assert "unblock" in str(raised.value)
        with sync.reverse(unblock=True) as back:
            write(uris[1], 100)
            back.run(to_present=True)
            # A user who bypasses the block needs no unblock, and then nobody could write after the cut-over back:
            with MongoClient[Any](uris[0]) as client:
                client.admin.command("setUserWriteBlockMode", 1, **{"global": True})
            with pytest.raises(UsageError, match="the target refuses its users' writes"):
                back.cutover(block=False)
    assert has(uris[0], 100)


def test_a_cut_over_that_is_given_up_lets_the_source_take_writes_again(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
        with MongoClient[Any](uris[1]) as client:
            client.shop.orders.update_one({"_id": 7}, {"$set": {"planted": True}})
        with pytest.raises(SinkError, match="differs from the source"):
            sync.cutover(sample=None)
        write(uris[0], 100)
        assert sync.status().phase == "follow"


@pytest.mark.parametrize("committed", [True, False])
def test_a_target_that_goes_away_as_the_sync_ends_leaves_the_source_blocked(
    uris: tuple[str, str], committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source accepted writes again although the sync may have ended, and nobody would have brought them to the
    target. No test had an error with an unknown outcome there."""
    run = SyncOwnership.run

    def lost(self: SyncOwnership, *args: Any, **options: Any) -> Any:
        if options.get("what") != "end the sync":
            return run(self, *args, **options)
        if committed:
            run(self, *args, **options)
        patched.setattr(standing, "document_of", away)
        raise SinkError("the target is away")

    def away(*_: Any) -> Any:
        raise SinkError("the target is away")

    with made(uris) as sync:
        sync.run(to_present=True)
        with monkeypatch.context() as patched:
            patched.setattr(SyncOwnership, "run", lost)
            with pytest.raises(SinkError, match="it is not known whether the sync is cut over: the target is away"):
                sync.cutover()
        assert sync.status().phase == ("cutOver" if committed else "follow")
        with MongoClient[Any](uris[0]) as client:
            assert client.admin.command("serverStatus")["repl"]["userWriteBlockMode"] == 2
            sync.cutover()  # the rest, or all of it
            assert sync.status().phase == "cutOver"
            client.admin.command({"setUserWriteBlockMode": 1, "global": False})
    assert unlike(uris, held_back=False) == []


def test_the_way_back_brings_what_was_written_since(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
        sync.cutover(block=False)
        with MongoClient[Any](uris[1]) as client:
            client.shop.orders.update_many({"_id": {"$lt": 10}}, {"$set": {"after": True}})
            client.shop.more.insert_one({"_id": 1})
            client.shop.orders.create_index("after")
        with sync.reverse() as back:
            found = back.run(to_present=True)
            assert found.documents == 0, "nothing is copied"
            assert unlike(uris) == []
            back.cutover(block=False)
            assert unlike(uris, held_back=False) == []


def test_a_way_back_after_foreign_writes_is_refused(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
        with pytest.raises(UsageError, match="only a sync that was cut over"):
            sync.reverse()
        sync.cutover(block=False)
        write(uris[0], 100)
        with pytest.raises(UsageError, match=r"was written to after the cut-over \(shop\.orders\)"):
            sync.reverse()


def test_a_way_back_that_was_stopped_goes_on(uris: tuple[str, str]) -> None:
    """The sync's own writes were taken for foreign ones."""
    with made(uris) as sync:
        sync.run(to_present=True)
        sync.cutover(block=False)
        for number in (100, 101):
            write(uris[1], number)
            with sync.reverse() as back:
                back.run(to_present=True)
            assert has(uris[0], number)
    assert unlike(uris) == []


@pytest.mark.parametrize("died_at", ["_note_back", "set_expiry"])
def test_a_way_back_that_died_at_its_beginning_begins(
    uris: tuple[str, str], died_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state without any collections was taken for a complete one."""

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with made(uris) as sync:
        sync.run(to_present=True)
        sync.cutover(block=False)
        with monkeypatch.context() as patched:
            patched.setattr(hand_over, died_at, die)
            with pytest.raises(KeyboardInterrupt):
                sync.reverse()
        write(uris[1], 100)
        with sync.reverse() as back:
            back.run(to_present=True)
            assert has(uris[0], 100)
            assert unlike(uris) == []
            assert unlike(uris, held_back=False) != [], "no document may expire on the former source by itself"
            back.cutover(block=False)
    assert unlike(uris, held_back=False) == []


def test_foreign_writes_after_a_way_back_died_at_its_beginning_are_refused(
    uris: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with made(uris) as sync:
        sync.run(to_present=True)
        sync.cutover(block=False)
        with monkeypatch.context() as patched:
            patched.setattr(hand_over, "set_expiry", die)
            with pytest.raises(KeyboardInterrupt):
                sync.reverse()
        write(uris[0], 100)
        with pytest.raises(UsageError, match=r"was written to after the cut-over \(shop\.orders\)"):
            sync.reverse()


def test_a_paused_sync_is_not_cut_over(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
        sync.pause()
        write(uris[0], 100)
        with pytest.raises(UsageError, match="paused"):
            sync.cutover(block=False)
        assert not has(uris[1], 100)
        sync.resume()
        sync.cutover(block=False)
    assert unlike(uris, held_back=False) == []


def test_no_document_of_the_former_source_expires_while_it_follows(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
        sync.cutover(block=False)
        with sync.reverse() as back:
            back.run(to_present=True)
    with MongoClient[Any](uris[0]) as client:
        [ages] = [one["expireAfterSeconds"] for one in client.shop.orders.list_indexes() if "expireAfterSeconds" in one]
    assert ages == 2**31 - 1


def test_what_the_progress_says_fits_in_json_and_in_a_line(uris: tuple[str, str]) -> None:
    told: list[Any] = []
    with made(uris) as sync:
        sync.run(told.append, to_present=True)
        sync.verify()
        found = sync.status()
    assert {one.phase for one in told} <= {"copy", "catchUp", "follow"}
    document = found.to_json()
    assert document["verified"]["differences"] == 0
    assert document["verified"]["documents"] == 50
    assert document["isConsistent"] is True
    assert "equal to the source at" in str(found)
    assert "verified at" in str(found)


def test_a_verification_follows_where_nobody_else_does(uris: tuple[str, str]) -> None:
    with made(uris) as sync:
        sync.run(to_present=True)
    write(uris[0], 100)
    with made(uris) as sync:
        found = sync.verify()
        assert found.good
        assert sync.status().owner is None
    assert has(uris[1], 100)


def test_an_index_that_was_hidden_while_its_limit_is_held_is_no_difference(uris: tuple[str, str]) -> None:
    """In that case the server lists its fields in another order, and a cut-over was abandoned."""
    with made(uris) as sync, MongoClient[Any](uris[0]) as source:
        sync.run(to_present=True)
        source.shop.command({"collMod": "orders", "index": {"name": "at_1", "hidden": True}})
        sync.run(to_present=True)
        assert sync.verify().good
        sync.cutover(block=False)
    assert unlike(uris, held_back=False) == []


def test_a_refused_plan_begins_nothing(uris: tuple[str, str]) -> None:
    with MongoClient[Any](uris[1]) as client:
        client.shop.orders.insert_one({"_id": "somebody's"})
    with made(uris) as sync, pytest.raises(TailraceError, match=r"shop\.orders"):
        sync.run(to_present=True)
    with MongoClient[Any](uris[1]) as client:
        assert STATE_DB not in client.list_database_names()
