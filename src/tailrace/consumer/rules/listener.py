"""A listener's logic: acquire, read the position back, watch, handle, commit, next.

It is a generator of needs (``rules.need``) that is answered with outcomes, so one logic serves a thread, asyncio and
the simulation. It holds to this: the commit of a change's position comes after its handling and, where every change is
committed, before the next one is handled; nothing is begun on a lease that is known to be lost.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bson.timestamp import Timestamp

from tailrace.consumer.rules.commit_policy import CommitPolicy
from tailrace.consumer.rules.errors import (
    Fenced,
    HandlerFailed,
    HandlerForked,
    LeaseLost,
    LeaseStoreUnavailable,
    OwnerNotUnique,
)
from tailrace.consumer.rules.lease import Lease
from tailrace.consumer.rules.need import (
    AcquireLease,
    CloseStream,
    CommitPosition,
    FindStart,
    HandleChange,
    HandleChanges,
    Handled,
    JudgeError,
    KeepLease,
    Need,
    OpenStream,
    Outcome,
    Pause,
    PullChange,
    Pulled,
    RefreshLease,
    ReleaseLease,
    Start,
    TakeSnapshot,
)
from tailrace.consumer.rules.ownership import Ownership
from tailrace.consumer.rules.position import StreamPosition
from tailrace.errors import ChangeStreamHistoryLost, InternalError, SourceError, StreamInvalidated, UsageError

OnHistoryLost = Literal["fail", "snapshot", "gap"]
OnInvalidate = Literal["fail", "resume"]

#: A source that cannot be read is tried again for so long; then the listener ends with its error.
_SOURCE_RETRY_S: Final = 300.0
_BACKOFF_S: Final = (0.05, 5.0)
#: About how many bytes of changes are handled together.
_BATCH_BYTES: Final = 16 << 20

Steps = Generator[Need, Outcome, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """What a listener was asked to do; see ``tailrace.consumer.Listener``."""

    resource: str
    lease_seconds: float = 30.0
    start: Start = "oldest"
    on_history_lost: OnHistoryLost = "fail"
    on_invalidate: OnInvalidate = "fail"
    commits: CommitPolicy = field(default_factory=CommitPolicy)
    #: How many changes the handler is given at a time at most; 0: it takes one.
    batch: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("start", ("oldest", "now", "snapshot")),
            ("on_history_lost", ("fail", "snapshot", "gap")),
            ("on_invalidate", ("fail", "resume")),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")


@dataclass(slots=True)
class ListenerStatistics:
    """Counted since the listener was made.

    ``handled``        changes that the handler has returned from; ``skipped`` those that the error policy passed over
    ``commits``        positions written, those inside transactions included
    ``failures``       times that the handler raised
    ``leases_lost``    times that a lease was lost or given up
    ``lease_version``  the fencing token of the lease that is held; 0 while none is
    ``position_time``  seconds since 1970 of the cluster time up to which everything was handled; 0 while unknown
    ``gaps``           times that lost history was accepted
    """

    handled: int = 0
    skipped: int = 0
    commits: int = 0
    failures: int = 0
    leases_lost: int = 0
    lease_version: int = 0
    position_time: int = 0
    gaps: int = 0


def together(parts: Sequence[ListenerStatistics]) -> ListenerStatistics:
    """The statistics of several listeners as those of one: the least position, the newest lease."""
    whole = ListenerStatistics()
    for name in ("handled", "skipped", "commits", "failures", "leases_lost", "gaps"):
        setattr(whole, name, sum(getattr(part, name) for part in parts))
    whole.lease_version = max(part.lease_version for part in parts)
    whole.position_time = min((part.position_time for part in parts if part.lease_version), default=0)
    return whole


class ListenerLogic:
    """One listener. ``steps()`` is driven by one driver; ``stopping`` may be set by anybody: the change in hand is
    finished, committed, and the lease is released."""

    def __init__(self, settings: ListenerSettings) -> None:
        self.settings = settings
        self.stopping = False
        self.statistics = ListenerStatistics()
        self.ownership: Ownership | None = None
        self._position: StreamPosition | None = None
        self._committed: StreamPosition | None = None
        self._committed_at = 0.0
        self._uncommitted = 0
        #: Pulled, and kept for the next time.
        self._held: Pulled | None = None
        self._now = 0.0
        self._asked = 0.0

    def steps(self) -> Steps:
        """Needs, until the listener is stopped. Raises what ends it."""
        while not self.stopping:
            owned = yield from self._acquire()
            if owned is None:
                return
            try:
                yield from self._work(owned)
                yield from self._leave(owned)
                return
            except (OwnerNotUnique, HandlerForked):
                owned.ended = True  # neither the lease nor the stream is ours
                raise
            except LeaseLost as error:
                owned.lose(error)
                yield from self._forget(owned)
                yield Pause(_BACKOFF_S[0], f"{error.message}")
            except GeneratorExit:
                owned.ended = True
                raise
            except BaseException:
                yield from self._leave(owned)
                raise

    def _ask(self, need: Need) -> Steps:
        outcome = yield need
        self._asked, self._now = outcome.asked, outcome.now
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    # The lease

    def _acquire(self) -> Steps:
        """The Ownership, waited for; ``None`` when the listener is stopped first."""
        failures = 0
        while not self.stopping:
            try:
                lease: Lease | None = yield from self._ask(AcquireLease())
            except LeaseStoreUnavailable as error:
                failures += 1
                yield Pause(_backoff(failures), error.message)
                continue
            if lease is not None:
                owned = Ownership(lease, self._asked + self.settings.lease_seconds)
                self.ownership = owned
                self.statistics.lease_version = lease.version
                yield from self._ask(KeepLease(owned))
                return owned
            failures = 0
            yield Pause(min(self.settings.lease_seconds / 4, _BACKOFF_S[1]), "another listener holds the lease")
        return None

    def _forget(self, owned: Ownership) -> Steps:
        """The lease is gone: nothing that was not committed counts."""
        owned.ended = True
        self.ownership = None
        self.statistics.leases_lost += 1
        self.statistics.lease_version = 0
        self._position = self._committed = self._held = None
        self._uncommitted = 0
        yield CloseStream()

    def _leave(self, owned: Ownership) -> Steps:
        """Commit what was handled, give the lease back. What fails now fails for the next owner to see: it begins at
        the position that stands in the store."""
        try:
            if self._position is not None and self._position != self._committed:
                yield from self._commit(owned)
        except (LeaseLost, LeaseStoreUnavailable):
            pass
        owned.ended = True
        self.ownership = None
        self.statistics.lease_version = 0
        yield ReleaseLease(owned.lease)
        yield CloseStream()

    def _commit(self, owned: Ownership) -> Steps:
        """Write the position, again and again until it is written or the lease is gone. Raises LeaseLost."""
        position, failures = self._position, 0
        if position is None:
            return
        while True:
            owned.check(self._now)
            try:
                yield from self._ask(CommitPosition(owned.lease, position))
            except LeaseStoreUnavailable as error:
                failures += 1
                yield from self._pause(_backoff(failures), error.message, always=True)
                continue
            owned.extended(self._asked + self.settings.lease_seconds)
            self._note_commit(position)
            return

    def _note_commit(self, position: StreamPosition) -> None:
        self._committed, self._committed_at, self._uncommitted = position, self._now, 0
        self.statistics.commits += 1

    def _pause(self, seconds: float, reason: str, *, always: bool = False) -> Steps:
        yield from self._ask(Pause(seconds, reason, always))

    # The position that it begins at

    def _work(self, owned: Ownership) -> Steps:
        stored = owned.lease.position
        position = None if stored is None else StreamPosition.from_document(stored, self.settings.resource)
        self._position = self._committed = position
        self._committed_at, self._uncommitted = self._now, 0
        if position is None:
            yield from self._begin(owned)
        else:
            yield from self._open(owned)
        yield from self._listen(owned)

    def _begin(self, owned: Ownership) -> Steps:
        """No token yet: settle where to begin and write it down before anything is handled, so that a crash between
        here and the first commit loses nothing."""
        start = self.settings.start
        if start == "snapshot":
            yield from self._take_snapshot(owned, None)
            return
        while self._position is None:
            time: Timestamp = yield from self._ask(FindStart(start))
            try:
                yield from self._ask(OpenStream(StreamPosition(at=time)))
            except ChangeStreamHistoryLost:
                continue  # the oldest entry has just gone; there is another one
            self._moved(StreamPosition(at=time))
            yield from self._commit(owned)

    def _take_snapshot(self, owned: Ownership, position: StreamPosition | None) -> Steps:
        self._moved((yield from self._ask(TakeSnapshot(owned.lease, position))))
        yield from self._commit(owned)
        yield from self._open(owned)

    def _open(self, owned: Ownership) -> Steps:
        """Open the stream at the position, in spite of a source that is away, and by the policy on lost history."""
        failures, since = 0, self._now
        self._held = None
        while True:
            owned.check(self._now)
            if self._position is None:
                raise InternalError("a stream is opened without a position")
            try:
                yield from self._ask(OpenStream(self._position))
            except ChangeStreamHistoryLost as error:
                yield from self._history_lost(owned, error)
                return
            except SourceError as error:
                failures += 1
                if self.stopping or self._now - since > _SOURCE_RETRY_S:
                    raise
                yield from self._pause(_backoff(failures), error.message)
                continue
            return

    def _history_lost(self, owned: Ownership, error: ChangeStreamHistoryLost) -> Steps:
        policy = self.settings.on_history_lost
        position = self._position
        if policy == "fail" or position is None:
            hint = 'on_history_lost="snapshot" copies the documents again; "gap" goes on behind the gap and notes it'
            raise ChangeStreamHistoryLost(error.message, hint=f"{error.hint}. {hint}" if error.hint else hint)
        if policy == "snapshot":
            yield from self._take_snapshot(owned, None)
            return
        self.statistics.gaps += 1
        time: Timestamp = yield from self._ask(FindStart("oldest"))
        self._moved(position.jumped_to(time))
        yield from self._commit(owned)
        yield from self._open(owned)

    def _moved(self, position: StreamPosition) -> None:
        self._position = position
        self.statistics.position_time = position.cluster_time.seconds

    # Change after change

    def _listen(self, owned: Ownership) -> Steps:
        commits = self.settings.commits
        while not self.stopping:
            owned.check(self._now)
            pulled: Pulled | None = yield from self._pull(owned)
            if pulled is None:
                continue
            if pulled.event is None:
                if pulled.position is not None:
                    self._moved(pulled.position)  # all is copied: the stream goes on from here
                    yield from self._commit(owned)
                    continue
                yield from self._quiet(owned, pulled)
                continue
            batch = yield from self._gather(owned, pulled)
            if batch is None:
                continue
            if not (yield from self._handle(owned, batch)):
                return
            # Inside a chunk of a snapshot the position stays what it is.
            if commits.is_due(self._uncommitted, self._committed_at, self._now) and self._position != self._committed:
                yield from self._commit(owned)
            if pulled.invalidate:
                yield from self._invalidated(owned)

    def _pull(self, owned: Ownership, *, wait: bool = True) -> Steps:
        """What the stream gives; ``None`` when it had to be opened again, at the position."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        try:
            pulled: Pulled = yield from self._ask(PullChange(wait))
        except ChangeStreamHistoryLost as error:
            yield from self._history_lost(owned, error)
            return None
        except SourceError as error:
            yield from self._pause(_BACKOFF_S[0], error.message)
            yield from self._open(owned)
            return None
        if pulled.event is None and not pulled.alive:
            yield from self._open(owned)
            return None
        return pulled

    def _quiet(self, owned: Ownership, pulled: Pulled) -> Steps:
        """Nothing to give: commit what is left, and now and then how far the stream has come, so that a quiet one does
        not fall off the oplog."""
        position = self._position
        if position is None or not self.settings.commits.is_due_when_quiet(
            self._uncommitted, self._committed_at, self._now
        ):
            return
        if pulled.token is not None:
            further = position.moved_to(pulled.token)
            if further.cluster_time > position.cluster_time:
                self._moved(further)
        if self._position != self._committed:
            yield from self._commit(owned)
        else:
            self._committed_at = self._now

    def _gather(self, owned: Ownership, first: Pulled) -> Steps:
        """``first``, and with a handler that takes several changes what is at hand behind it; ``None`` when the stream
        had to be opened again, and will give them once more."""
        batch, size, room = [first], first.size, self.settings.batch
        if first.position is None:  # inside a chunk of a snapshot nothing can be committed
            room = min(room, self.settings.commits.every - self._uncommitted)
        while not first.alone and len(batch) < room and size < _BATCH_BYTES:
            pulled: Pulled | None = yield from self._pull(owned, wait=False)
            if pulled is None:
                return None
            if pulled.event is None or pulled.alone:
                if pulled.event is not None or pulled.position is not None:
                    self._held = pulled
                break
            batch.append(pulled)
            size += pulled.size
        return batch

    def _handle(self, owned: Ownership, batch: Sequence[Pulled]) -> Steps:
        """Handle changes. False when the listener was stopped and those that are left fall to the next owner."""
        changes, attempt = self._changes(owned, batch), 0
        while changes:
            attempt += 1
            owned.check(self._now)
            owned.busy_since = self._now
            done = Handled(1)
            try:
                done = yield from self._run_handler(changes)
            except (HandlerForked, Fenced, LeaseLost, LeaseStoreUnavailable) as error:
                yield from self._doubt(owned, error)
            except Exception as error:
                owned.busy_since = None
                self.statistics.failures += 1
                decision = yield from self._ask(JudgeError(changes[0], error, attempt))
                if decision == "stop":
                    raise _handler_failed(self.settings.resource, batch[-len(changes)], error) from error
                if decision == "retry":
                    yield from self._pause(_backoff(attempt), f"the handler raised {type(error).__name__}")
                    if self.stopping:
                        return False
                    continue
                self.statistics.skipped += 1
            else:
                self.statistics.handled += done.count
            self._done(owned, changes[done.count - 1].position, done)
            changes, attempt = changes[done.count :], 0
        return True

    def _changes(self, owned: Ownership, batch: Sequence[Pulled]) -> list[HandleChange]:
        position, changes = self._position, []
        for pulled in batch:
            if position is None or pulled.token is None:
                raise InternalError("a change without a token")
            position = pulled.position or position.moved_to(pulled.token, start_after=pulled.invalidate)
            changes.append(HandleChange(owned.lease, pulled.event, position))
        return changes

    def _run_handler(self, changes: Sequence[HandleChange]) -> Steps:
        if not self.settings.batch:
            return Handled(1, (yield from self._ask(changes[0])))
        return (yield from self._ask(HandleChanges(changes)))

    def _done(self, owned: Ownership, position: StreamPosition, done: Handled) -> None:
        owned.busy_since = None
        self._moved(position)
        if done.committed:
            owned.extended(self._asked + self.settings.lease_seconds)
            self._note_commit(position)
        else:
            self._uncommitted += done.count

    def _doubt(self, owned: Ownership, error: Exception) -> Steps:
        """The handler ended with an error that concerns the lease. Raises."""
        owned.busy_since = None
        if isinstance(error, LeaseStoreUnavailable):
            # The transaction may have been committed or not: only the store knows, so the position is read back.
            raise LeaseLost(error.message, hint=error.hint) from error
        if isinstance(error, Fenced):
            try:
                yield from self._ask(RefreshLease(owned.lease))
            except LeaseStoreUnavailable:
                raise error from None  # whose the lease is will be seen when it is acquired again
            raise HandlerFailed(
                f"{error.message}, but the lease on {owned.lease.resource!r} is still held with version "
                f"{owned.lease.version}",
                hint="Was the lease's record deleted, so that versions began again? Raise its version",
            ) from error
        raise error

    def _invalidated(self, owned: Ownership) -> Steps:
        """The stream has ended with an invalidate, which was handled as any other change."""
        if self._position != self._committed:
            yield from self._commit(owned)
        if self.settings.on_invalidate == "fail":
            raise StreamInvalidated(
                f"what the listener on {self.settings.resource!r} watched was dropped or renamed",
                hint='The position is kept behind it: start the listener again to go on, or use on_invalidate="resume"',
            )
        yield from self._open(owned)


def _backoff(failures: int) -> float:
    shortest, longest = _BACKOFF_S
    return min(longest, shortest * 2.0 ** min(failures - 1, 20))


def _handler_failed(resource: str, pulled: Pulled, error: Exception) -> HandlerFailed:
    token = "" if pulled.token is None else str(pulled.token.get("_data", ""))
    return HandlerFailed(
        f"the handler of {resource!r} raised {type(error).__name__}{_where(error)} at the change with token {token}: "
        f"{error}".rstrip(": "),
        hint="The position stands before this change: the next run begins with it",
    )


def _where(error: Exception) -> str:
    """The handler's own line that raised, or called what did."""
    frame, place = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if "site-packages" not in name and "/tailrace/" not in name:
            place = f" in {name.rpartition('/')[2]}, line {frame.tb_lineno},"
        frame = frame.tb_next
    return place
