"""Checks that a store of leases keeps its promises."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from bson.timestamp import Timestamp

from tailrace.act.consumer.lease import CommitsTogether, LeaseCommit, OperatedLeaseStore
from tailrace.act.consumer.rules import instructions
from tailrace.act.consumer.rules.errors import LeaseDocumentError, LeaseLost, OwnerNotUnique
from tailrace.act.consumer.rules.lease import Lease
from tailrace.errors import TailraceError, UsageError

_LONG: Final = 600.0
_SHORT: Final = 0.3
_WAIT_S: Final = 60.0
_POSITION: Final = {"token": {"_data": "8265", "_typeBits": b"\x01\x82"}, "gaps": [{"to": Timestamp(7, 3)}]}
#: A text that a store which builds expressions must not take for one.
_FURTHER: Final = {"token": {"_data": "8266$owner"}, "startAfter": "$owner", "snapshot": {"key": "$$NOW"}}
_RIVALS: Final = 8


def _copy(begun: int, documents: int) -> dict[str, Any]:
    return {"collections": [{"restarts": begun, "documents": 1}, {"restarts": 0, "documents": documents}]}


_AT: Final = [Timestamp(0x65000000 + seconds, 1) for seconds in range(4)]
_TOKENS: Final = [f"82{at.time:08X}000000012B02" for at in _AT]
#: A position, and one that comes after it; each first one is ahead of those before.
_PAIRS: Final[tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]] = (
    ({"at": _AT[1]}, {"at": _AT[0]}),
    ({"at": _AT[1]}, {"token": {"_data": _TOKENS[0]}}),
    ({"token": {"_data": _TOKENS[1]}}, {"at": _AT[1]}),
    ({"token": {"_data": _TOKENS[2]}}, {"token": {"_data": _TOKENS[1]}}),
    ({"at": _AT[3], "snapshot": _copy(0, 5)}, {"token": {"_data": _TOKENS[2]}}),
    ({"at": _AT[3], "snapshot": _copy(0, 7)}, {"at": _AT[3], "snapshot": _copy(0, 6)}),
    ({"at": _AT[3], "snapshot": _copy(1, 2)}, {"at": _AT[3], "snapshot": _copy(0, 7)}),
    ({"at": _AT[3]}, {"at": _AT[3], "snapshot": _copy(1, 2)}),
)
_PLANS: Final[tuple[Mapping[str, Any], Mapping[str, Any]]] = (
    {"lanes": 4, "generation": 3},
    {"lanes": 2, "generation": 2},
)


class LeaseStoreError(AssertionError):
    """A store breaks a promise of ``tailrace.consumer.LeaseStore``; the message says which."""


def check_lease_store(new_store: Callable[[], Any]) -> None:
    """Raises LeaseStoreError if a store breaks a promise of LeaseStore. Takes some seconds.

    Args:
        new_store: called several times: each store that it returns must reach the same records, as several processes
            would (for a store in memory, return the same one). Records are created under new names and stay: use a
            place that can be thrown away.
    """
    for check in CHECKS:
        name = f"check {uuid.uuid4().hex}"
        for end in ("", "/lane 1 of 4", ".with.dots", "$"):
            check(new_store, name + end)
            if check is not _names_are_free:
                break


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise LeaseStoreError(promise)


@contextmanager
def _refused(promise: str, kind: type[TailraceError] = LeaseLost) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise LeaseStoreError(promise)


def _held(store: Any, resource: str, owner: str, seconds: float = _LONG) -> Lease:
    """The lease, waited for while an older one runs out."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        lease: Lease | None = store.acquire(resource, owner, seconds)
        if lease is not None:
            return lease
        time.sleep(0.02)
    raise LeaseStoreError("a lease that has run out can be acquired by others")


def _same(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> bool:
    return first is not None and second is not None and dict(first) == dict(second)


def _first_lease(new_store: Callable[[], Any], resource: str) -> None:
    store, other = new_store(), new_store()
    _require(store.read(resource) is None, "read gives None for a resource that nobody has leased yet")
    lease = _held(store, resource, "a")
    _require(lease.owner == "a" and lease.resource == resource, "a lease says whose it is, and on what")
    _require(isinstance(lease.version, int) and lease.version >= 1, "versions are whole numbers from 1 on")
    _require(lease.position is None, "a resource begins without a position")
    _require(other.acquire(resource, "b", _LONG) is None, "a lease that is held is not given to another owner")
    record = other.read(resource)
    _require(record is not None, "a lease can be read through another store object")
    _require((record.owner, record.version) == ("a", lease.version), "an attempt to acquire changes nothing")
    _require(resource in [one.resource for one in other.leases()], "leases() names every resource")
    again = store.refresh(lease, _LONG)
    _require(again.version == lease.version, "a refresh keeps the version")


def _names_are_free(new_store: Callable[[], Any], resource: str) -> None:
    lease = _held(new_store(), resource, "$owner.a")
    new_store().commit(lease, _POSITION, _LONG)
    record = new_store().read(resource)
    _require(record is not None and record.owner == "$owner.a", "names may hold any characters")


def _commits(new_store: Callable[[], Any], resource: str) -> None:
    store, other = new_store(), new_store()
    lease = _held(store, resource, "a")
    for position in (_POSITION, _FURTHER):
        after = store.commit(lease, position, _LONG)
        _require(after.version == lease.version, "a commit keeps the version")
        record = other.read(resource)
        _require(_same(record.position, position), "a position is read back as it was committed, type for type")
        _require(record.committed_at is not None, "a commit notes when it was")
    _require(store.release(lease) is True, "release says that the lease was held")
    taken = other.acquire(resource, "b", _LONG)
    _require(taken is not None, "a released lease can be acquired at once")
    _require(taken.version == lease.version + 1, "the version grows by one with each change of owner")
    _require(_same(taken.position, _FURTHER), "the position is read back with the lease")
    _stale(store, lease, other)


def _forward_alone(new_store: Callable[[], Any], resource: str) -> None:
    """A commit that its sender has given up, and that is carried out later, must not undo newer ones."""
    store, other = new_store(), new_store()
    lease = _held(store, resource, "a")
    for number, (later, earlier) in enumerate((*_PAIRS, _PLANS)):
        store.commit(lease, later, _LONG)
        before = other.read(resource)
        with _refused(f"a commit does not set the position back ({number})", LeaseDocumentError):
            store.commit(lease, earlier, _LONG)
        with _refused(f"a transaction does not set the position back ({number})", LeaseDocumentError):
            try:
                with store.transaction(lease, earlier, _LONG):
                    pass
            except LeaseDocumentError:
                raise
            except UsageError as error:  # a store without transactions
                raise LeaseDocumentError(error.message) from None
        if isinstance(store, CommitsTogether):
            answers = list(store.commit_together([LeaseCommit(lease, earlier, _LONG)]))
            _require(len(answers) == 1, "several commits together are answered one by one")
            _require(
                isinstance(answers[0], LeaseDocumentError), "of several commits together, none sets the position back"
            )
        _require(other.read(resource) == before, "a commit that would set the position back changes nothing")
        _require(_same(store.commit(lease, later, _LONG).position, later), "a commit may be sent again")


def _commits_together(new_store: Callable[[], Any], resource: str) -> None:
    store, other = new_store(), new_store()
    if not isinstance(store, CommitsTogether):
        return
    first, second = _held(store, resource, "a"), _held(store, f"{resource}/2", "a")

    def committed(one: Mapping[str, Any], another: Mapping[str, Any]) -> list[Any]:
        return list(store.commit_together([LeaseCommit(first, one, _LONG), LeaseCommit(second, another, _LONG)]))

    def are(one: Mapping[str, Any], another: Mapping[str, Any]) -> bool:
        return _same(other.read(first.resource).position, one) and _same(other.read(second.resource).position, another)

    early = {"token": {"_data": "8264"}}
    _require(committed(early, _POSITION) == [None, None], "several commits together are answered one by one")
    _require(are(early, _POSITION), "several commits together are all done")
    other.revoke(first.resource)
    lost, done = committed(_POSITION, _FURTHER)
    _require(isinstance(lost, LeaseLost), "of several commits together, an owner that has lost its lease is told so")
    _require(done is None, "of several commits together, one that is refused does not hinder the others")
    _require(are(early, _FURTHER), "of several commits together, what is refused changes nothing")


def _stale(store: Any, lease: Lease, other: Any) -> None:
    before = other.read(lease.resource)
    with _refused("an owner that has lost its lease cannot commit"):
        store.commit(lease, {"token": {"_data": "stale"}}, _LONG)
    with _refused("an owner that has lost its lease cannot refresh it"):
        store.refresh(lease, _LONG)
    _require(store.release(lease) is False, "an owner that has lost its lease cannot release it")
    _require(other.read(lease.resource) == before, "what is refused changes nothing")


def _same_owner(new_store: Callable[[], Any], resource: str) -> None:
    store = new_store()
    first = _held(store, resource, "a")
    store.commit(first, _POSITION, _LONG)
    second = new_store().acquire(resource, "a", _LONG)
    _require(second is not None, "the owner of a lease can acquire it again")
    _require(second.version == first.version + 1, "a lease that is acquired again has a new version")
    _require(_same(second.position, _POSITION), "the position survives that")
    with _refused("two listeners with one owner id are told apart by the version: refresh", OwnerNotUnique):
        store.refresh(first, _LONG)
    with _refused("two listeners with one owner id are told apart by the version: commit", OwnerNotUnique):
        store.commit(first, _FURTHER, _LONG)
    _require(store.release(first) is False, "two listeners with one owner id are told apart by the version: release")


def _expiry(new_store: Callable[[], Any], resource: str) -> None:
    store, other = new_store(), new_store()
    first = _held(store, resource, "a", _SHORT)
    second = _held(other, resource, "b", _SHORT)
    _require(second.version == first.version + 1, "a lease that ran out is taken with the next version")
    _stale(store, first, other)
    time.sleep(_SHORT * 2)
    other.commit(second, _POSITION, _LONG)  # nobody has taken it: it is still the newest version
    _require(store.acquire(resource, "a", _LONG) is None, "a commit holds the lease for the time that it says")
    other.refresh(second, _SHORT)
    third = _held(store, resource, "a", _SHORT)
    store.refresh(third, _LONG)
    time.sleep(_SHORT * 2)
    _require(other.acquire(resource, "b", _LONG) is None, "a refresh holds the lease for the time that it says")


def _revoked(new_store: Callable[[], Any], resource: str) -> None:
    store, other = new_store(), new_store()
    _require(other.revoke(resource) is None, "revoke gives None where there is no record")
    lease = _held(store, resource, "a")
    store.commit(lease, _POSITION, _LONG)
    before = other.revoke(resource)
    _require(before is not None and before.owner == "a", "revoke gives the record as it was")
    _stale(store, lease, other)
    after = _held(other, resource, "b")
    _require(after.version == lease.version + 1, "versions go on after a revocation")
    _require(_same(after.position, _POSITION), "the position survives a revocation")


def _one_wins(new_store: Callable[[], Any], resource: str) -> None:
    """Rivals ask at the same moment, each through a store object of its own, again and again."""
    stores = [new_store() for _ in range(_RIVALS)]
    versions: list[int] = []
    for round_number in range(6):
        ready = threading.Barrier(_RIVALS)

        def ask(number: int, ready: threading.Barrier = ready) -> Lease | None:
            ready.wait()
            lease: Lease | None = stores[number].acquire(resource, f"rival {number}", _LONG)
            return lease

        with ThreadPoolExecutor(_RIVALS) as pool:
            won = [lease for lease in pool.map(ask, range(_RIVALS)) if lease is not None]
        _require(len(won) == 1, f"one of several who ask at once gets the lease: {len(won)} did")
        versions.append(won[0].version)
        if round_number % 2:
            stores[0].revoke(resource)
        else:
            stores[0].release(won[0])
    _require(versions == list(range(versions[0], versions[0] + 6)), f"versions grow by one: {versions}")


def _transactions(new_store: Callable[[], Any], resource: str) -> None:
    store = new_store()
    lease = _held(store, resource, "a")
    store.commit(lease, _POSITION, _LONG)
    try:
        with store.transaction(lease, _FURTHER, _LONG):
            raise InterruptedError
    except InterruptedError:
        pass
    except UsageError:
        return  # a store without transactions says so
    _require(_same(store.read(resource).position, _POSITION), "a transaction that is left by an error commits nothing")
    with store.transaction(lease, _FURTHER, _LONG):
        pass
    _require(_same(store.read(resource).position, _FURTHER), "a transaction commits the position")
    store.revoke(resource)
    entered = False
    with (
        _refused("an owner that has lost its lease cannot commit in a transaction"),
        store.transaction(lease, _POSITION, _LONG),
    ):
        entered = True
    _require(not entered, "a transaction does not begin on a lease that is lost")
    _require(_same(store.read(resource).position, _FURTHER), "what is refused changes nothing")


def _operated(new_store: Callable[[], Any], resource: str) -> None:
    """What an operator writes holds for every owner. It is written while the record is what the operator saw."""
    store, other = new_store(), new_store()
    if not isinstance(store, OperatedLeaseStore):
        return  # a store whose leases no operator can act on
    nobody = Lease(resource, None, 0)
    _require(store.amend(None, instructions.pause(nobody, store.now())), "a record can be made by an operator")
    _require(not other.amend(None, nobody), "a record that is there is not made again")
    _require(store.acquire(resource, "a", _LONG) is None, "a lease that is paused is given to nobody")
    _amended(store, resource, instructions.resume)
    lease = _held(store, resource, "a")
    _require(lease.version == 1, "what an operator writes is not an acquisition")
    _amended(other, resource, lambda record: instructions.pause(record, store.now()))
    _require(
        store.refresh(lease, _LONG).paused_at is not None, "an owner learns of a pause when it refreshes the lease"
    )
    store.commit(lease, _POSITION, _LONG)
    _require(store.acquire(resource, "a", _LONG) is not None, "an owner may renew a lease that is paused")
    _stale(store, lease, other)
    _amended(other, resource, lambda record: replace(record, expires_at=record.acquired_at))
    _require(store.acquire(resource, "a", _LONG) is None, "once it has run out, nobody takes a lease that is paused")
    _handed_over(store, other, resource)
    _moved_by_an_operator(store, other, resource)


def _handed_over(store: Any, other: Any, resource: str) -> None:
    _amended(
        other, resource, lambda one: instructions.hand_over(instructions.resume(one), "host$b", _LONG, store.now())
    )
    for owner in ("a", "host$", "host$b2", "host$b2-1"):
        _require(
            store.acquire(resource, owner, _LONG) is None,
            f"a lease that is reserved for host$b is not given to {owner}",
        )
    lease = store.acquire(resource, "host$b-7-abc", _LONG)
    _require(lease is not None, "a reserved lease is given to the owner that it is reserved for")
    store.release(lease)
    _require(
        store.acquire(resource, "a", _LONG) is None, "a lease is reserved for its next owner until the time is over"
    )
    _amended(other, resource, lambda one: instructions.hand_over(one, "absent", _SHORT, store.now()))
    lease = _held(store, resource, "c")
    _require(other.read(resource).reserved_for is None, "a reservation whose time is over is gone with the next owner")
    _require(_same(lease.position, _POSITION), "the position survives all of that")


def _moved_by_an_operator(store: Any, other: Any, resource: str) -> None:
    before = store.read(resource)
    held_by_c = store.acquire(resource, "c", _LONG)
    _require(not other.amend(before, instructions.disown(before)), "a record that has changed its owner is not amended")
    _require(not other.remove(before), "nor removed")
    seized = instructions.seize(held_by_c, "$operator", _LONG, store.now())
    _require(other.amend(held_by_c, seized), "an operator takes a lease that is held")
    _stale(store, held_by_c, other)
    back = {"token": {"_data": "8200"}, "why": "$$NOW"}
    _require(other.amend(seized, instructions.place(seized, back, store.now())), "an operator sets a position back")
    _amended(other, resource, lambda one: instructions.mark_skip(one, {"letters": "$db.coll"}))
    other.release(seized)
    lease = _held(store, resource, "d")
    _require(_same(lease.position, back), "a position is what an operator has made it")
    _require(_same(lease.skip, {"letters": "$db.coll"}), "an owner is told which change it is to leave out")
    _require(store.refresh(lease, _LONG).skip is not None, "a change stays marked to be left out until it has been")
    with _refused("what ends a skip does not set the position back", LeaseDocumentError):
        store.commit_skip(lease, {"token": {"_data": "81"}}, _LONG)
    store.commit_skip(lease, _POSITION, _LONG)
    record = other.read(resource)
    _require(
        record.skip is None and _same(record.position, _POSITION), "a skip ends with the position after the change"
    )
    with _refused("an owner that has lost its lease cannot end a skip"):
        store.commit_skip(seized, _POSITION, _LONG)
    store.refresh(lease, _LONG * 2)
    _require(not other.remove(record), "a lease that was refreshed since is not removed")
    record = other.read(resource)
    _require(other.remove(record) and store.read(resource) is None, "a record can be removed")


def _amended(store: Any, resource: str, change: Callable[[Lease], Lease]) -> None:
    record = store.read(resource)
    after = change(record)
    _require(store.amend(record, after), "what an operator writes is written while the record is the same")
    _require(store.read(resource) == after, "what an operator writes is read back")


CHECKS: Final = (
    _first_lease,
    _names_are_free,
    _commits,
    _forward_alone,
    _commits_together,
    _same_owner,
    _expiry,
    _revoked,
    _one_wins,
    _transactions,
    _operated,
)
