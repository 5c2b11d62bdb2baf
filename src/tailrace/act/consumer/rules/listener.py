"""A listener's logic: acquire, read the position back, watch, handle, commit, next.

It is a generator of needs (``rules.need``) that is answered with outcomes, so one logic serves a thread, asyncio and
the simulation. It holds to this: the commit of a change's position comes after its handling and, where every change is
committed, before the next one is handled; nothing is begun on a lease that is known to be lost.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.errors import (
    Fenced,
    HandlerFailed,
    HandlerForked,
    HandlerInterrupted,
    HandlerNotRun,
    LeaseLost,
    LeaseStoreUnavailable,
    OwnerNotUnique,
)
from tailrace.act.consumer.rules.handler_failure import handler_failed
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.need import (
    AcquireLease,
    CloseStream,
    CommitPosition,
    FindStart,
    HandleChange,
    HandleChanges,
    Handled,
    JudgeError,
    KeepLease,
    MarkEntries,
    Need,
    OpenStream,
    Outcome,
    Pause,
    PullChange,
    Pulled,
    RefreshLease,
    ReleaseLease,
    RenewLease,
    TakeSnapshot,
    TellGap,
)
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.rules.settings import ListenerSettings, ListenerStatistics
from tailrace.act.consumer.rules.skipping import SkippingLogic
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.errors import (
    ChangeStreamHistoryLost,
    InternalError,
    OtherHistoryError,
    SourceError,
    StreamInvalidated,
)

#: A source that cannot be read is tried again for so long; then the listener ends with its error.
_SOURCE_RETRY_S: Final = 300.0
_BACKOFF_S: Final = (0.05, 5.0)
#: The label of an error of the driver for a transaction that may be tried again as a whole.
TRANSIENT_LABEL: Final = "TransientTransactionError"
#: About how many bytes of changes are handled together.
_BATCH_BYTES: Final = 16 << 20

Steps = Generator[Need, Outcome, Any]


class ListenerLogic(SkippingLogic):
    """One listener. ``steps()`` is driven by one driver; ``stopping`` may be set by anybody: the change in hand is
    finished, committed, and the lease is released."""

    def __init__(self, settings: ListenerSettings) -> None:
        self.settings = settings
        self.stopping = False
        #: The lease was had, or somebody else had it.
        self.begun = False
        self.statistics = ListenerStatistics()
        self.ownership: Ownership | None = None
        self._position: StreamPosition | None = None
        self._again = 0
        self._committed: StreamPosition | None = None
        self._committed_at = 0.0
        self._uncommitted = 0
        #: When entries were marked, and the position's time then.
        self._marked_at = 0.0
        self._marked_to = ZERO
        #: Pulled, and kept for the next time.
        self._held: Pulled | None = None
        #: How often history was lost, and how often and since when the stream could not be read, since it has given
        #: something.
        self._losses = self._failed_pulls = 0
        self._away_since: float | None = None
        #: The change that the stream could not give last, and how often it could not.
        self._refused: tuple[Any, int] = None, 0
        self._now = 0.0
        self._asked = 0.0

    @property
    def leaves(self) -> bool:
        """Whether the change in hand is the last one for now: the listener is stopped, or its lease asked back."""
        return self.stopping or (self.ownership is not None and self.ownership.asked_back)

    def steps(self) -> Steps:
        """Needs, until the listener is stopped. Raises what ends it."""
        while not self.stopping:
            owned = yield from self._acquire()
            if owned is None:
                return
            try:
                yield from self._work(owned)
                yield from self._leave(owned)
                if not owned.asked_back:
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
            self.begun = True
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
        self.statistics.lease_version = self.statistics.position_time = 0
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

    def _commit(self, owned: Ownership, *, ends_skip: bool = False) -> Steps:
        """Write the position, again and again until it is written or the lease is gone. Raises LeaseLost."""
        position, failures = self._position, 0
        if position is None:
            return
        while True:
            owned.check(self._now)
            try:
                yield from self._ask(CommitPosition(owned.lease, position, ends_skip))
            except LeaseStoreUnavailable as error:
                failures += 1
                yield from self._pause(_backoff(failures), error.message, always=True)
                continue
            owned.extended(self._asked + self.settings.lease_seconds)
            self._note_commit(position)
            return

    def _renew(self, owned: Ownership) -> Steps:
        """Go on under a newer fencing token: a change that was left out and is handled later, under the token that it
        had, must not undo what is written from now on. Raises LeaseLost."""
        lease, failures = owned.lease, 0
        owned.renewing = True
        while True:
            owned.check(self._now)
            try:
                renewed: Lease | None = yield from self._ask(RenewLease(lease))
            except LeaseStoreUnavailable as error:
                failures += 1
                yield from self._pause(_backoff(failures), error.message, always=True)
                continue
            break
        if renewed is None or renewed.version != lease.version + 1:
            # Another owner may have been there; the position is read back.
            raise LeaseLost(f"the lease on {lease.resource!r}, version {lease.version}, could not be renewed")
        owned.renewed(renewed, self._asked + self.settings.lease_seconds)
        self.statistics.lease_version = renewed.version

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
        begin = ZERO if position is None else position.cluster_time
        self.statistics.position_time = begin.seconds
        self._marked_at, self._marked_to = self._now, begin
        if position is None:
            yield from self._begin(owned)
        else:
            yield from self._open(owned)
        yield from self._listen(owned)

    def _wait_for_source(self, error: SourceError, failures: int, since: float) -> Steps:
        """Wait before the next try. Raises ``error`` where there is none."""
        if isinstance(error, OtherHistoryError) or self._now - since > _SOURCE_RETRY_S:
            raise error  # the first does not go away by waiting
        yield from self._pause(_backoff(failures), error.message)

    def _begin(self, owned: Ownership) -> Steps:
        """No token yet: settle where to begin and write it down before anything is handled, so that a crash between
        here and the first commit loses nothing."""
        start = self.settings.start
        if start == "snapshot":
            yield from self._take_snapshot(owned, None)
            yield from self._open(owned)
            return
        failures, since = 0, self._now
        while self._position is None and not self.leaves:
            owned.check(self._now)
            try:
                began: Timestamp | None = None
                if start == "oldest":
                    began = yield from self._ask(FindStart("now"))
                time: Timestamp = yield from self._ask(FindStart(start))
                deployment: str | None = yield from self._ask(OpenStream(StreamPosition(at=time)))
            except ChangeStreamHistoryLost as error:  # the oldest entry has just gone; there is another one
                failures += 1
                yield from self._pause(_backoff(failures), error.message)
            except SourceError as error:
                failures += 1
                yield from self._wait_for_source(error, failures, since)
            else:
                self._moved(StreamPosition(at=time, deployment=deployment, began=began))
                yield from self._commit(owned)

    def _take_snapshot(self, owned: Ownership, position: StreamPosition | None) -> Steps:
        self._moved((yield from self._ask(TakeSnapshot(owned.lease, position))))
        yield from self._commit(owned)

    def _open(self, owned: Ownership) -> Steps:
        """Open the stream at the position, in spite of a source or a store that is away, and by the policy on lost
        history. A listener that is stopped meanwhile has none."""
        failures, since = 0, self._now
        self._held = None
        while not self.leaves:
            owned.check(self._now)
            try:
                if (yield from self._is_opened(owned)):
                    return
            except SourceError as error:
                failures += 1
                yield from self._wait_for_source(error, failures, since)
            except LeaseStoreUnavailable as error:  # a lane's stream asks where other lanes are
                yield from self._pause(_backoff(failures := failures + 1), error.message)

    def _is_opened(self, owned: Ownership) -> Steps:
        if self._position is None:
            raise InternalError("a stream is opened without a position")
        try:
            deployment: str | None = yield from self._ask(OpenStream(self._position))
        except ChangeStreamHistoryLost as error:
            yield from self._history_lost(owned, error)
            return False
        if deployment is not None and self._position.deployment is None:
            self._position = replace(self._position, deployment=deployment)
        return True

    def _history_lost(self, owned: Ownership, error: ChangeStreamHistoryLost) -> Steps:
        """Move the position by the policy; the stream is to be opened there. Raises ``error`` with "fail"."""
        policy = self.settings.on_history_lost
        position = self._position
        if policy == "fail" or position is None:
            hint = 'on_history_lost="snapshot" copies the documents again; "gap" goes on after the gap and notes it'
            raise ChangeStreamHistoryLost(error.message, hint=f"{error.hint}. {hint}" if error.hint else hint)
        self._losses += 1
        if self._losses > 1:  # the oplog is being truncated, or another lane's place is lost too
            yield from self._pause(_backoff(self._losses - 1), error.message)
            if self.leaves:
                return
        if policy == "snapshot" or position.snapshot is not None:
            yield from self._take_snapshot(owned, position)
            return
        time: Timestamp = yield from self._ask(FindStart("oldest"))
        if ClusterTime.from_timestamp(time) <= position.cluster_time:
            return  # what is lost is another lane's
        self.statistics.gaps += 1
        self._moved(position.jumped_to(time))
        yield from self._ask(TellGap(position.cluster_time.to_timestamp(), time, error.message))
        yield from self._commit(owned)

    def _moved(self, position: StreamPosition) -> None:
        self._position = position
        self._came_to(position)

    def _came_to(self, position: StreamPosition) -> None:
        """Everything before it is handled, whether it is written down or not."""
        statistics = self.statistics
        statistics.position_time = max(statistics.position_time, position.cluster_time.seconds)

    # Change after change

    def _listen(self, owned: Ownership) -> Steps:
        commits = self.settings.commits
        while not self.leaves:
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
            if owned.skip is not None and (yield from self._skip(owned, pulled, owned.skip)):
                continue
            if pulled.error is not None:
                yield from self._pass_over(owned, pulled, pulled.error)
                continue
            batch = yield from self._gather(owned, pulled)
            if batch is None:
                continue
            if not (yield from self._handle(owned, batch)):
                return
            yield from self._mark()
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
        except (ChangeStreamHistoryLost, SourceError) as error:
            yield from self._pull_failed(owned, error)
            yield from self._open(owned)
            return None
        if pulled.event is not None or pulled.token is not None:
            self._losses, self._failed_pulls, self._away_since = 0, 0, None
        if pulled.event is None and not pulled.alive:
            yield from self._open(owned)
            return None
        return pulled

    def _pull_failed(self, owned: Ownership, error: ChangeStreamHistoryLost | SourceError) -> Steps:
        """Wait, or move by the policy on lost history. A stream that can be opened and not read, as a lane's whose
        reader fails, is not waited for any longer than one that cannot be opened."""
        try:
            if isinstance(error, SourceError):
                raise error
            yield from self._history_lost(owned, error)
        except SourceError as away:
            self._failed_pulls += 1
            self._away_since = self._now if self._away_since is None else self._away_since
            yield from self._wait_for_source(away, self._failed_pulls, self._away_since)

    def _quiet(self, owned: Ownership, pulled: Pulled) -> Steps:
        """Nothing to give: commit what is left, and now and then how far the stream has come, so that a quiet one does
        not fall off the oplog."""
        position = self._position
        if position is not None and pulled.token is not None:
            self._came_to(position.moved_to(pulled.token))
        if position is None or not self.settings.commits.is_due_when_quiet(
            self._uncommitted, self._committed_at, self._now
        ):
            return
        if pulled.token is not None and self._may_mark:
            further = position.moved_to(pulled.token)
            if further.cluster_time > position.cluster_time:
                yield from self._mark(further)
        else:
            yield from self._mark()
        if self._position != self._committed:
            yield from self._commit(owned)
        else:
            self._committed_at = self._now

    @property
    def _may_mark(self) -> bool:
        """Entries are marked as seldom as a quiet stream's position is committed: it costs a read of each oplog."""
        return self._now - self._marked_at >= self.settings.commits.idle_seconds

    def _mark(self, further: StreamPosition | None = None) -> Steps:
        """Let the position, or the one ``further`` on to which it moves then, know the entries that stand there: on a
        deployment that was restored from an older backup they are not there, and it is not gone on with.

        The token of a change names an entry itself, so that its stream finds it or fails; a high-water mark does not.
        So the position moves to one only with its entries, and stays where it is when they cannot be read now.
        """
        position = further or self._position
        if position is None or position.token is None or position.snapshot is not None or not self._may_mark:
            return
        self._marked_at = self._now
        try:
            found: Mapping[str, EntryMark] | None = yield from self._ask(MarkEntries(position, self._marked_to))
        except SourceError:
            return  # the stream will say what is wrong
        self._marked_to = position.cluster_time
        if found:
            position = replace(position, entries={**position.entries, **found})
        self._moved(position)

    def _gather(self, owned: Ownership, first: Pulled) -> Steps:
        """``first``, and with a handler that takes several changes what is at hand after it; ``None`` when the stream
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
            except (HandlerForked, HandlerNotRun, Fenced, LeaseLost, LeaseStoreUnavailable) as error:
                yield from self._doubt(owned, error)
            except HandlerInterrupted as error:
                owned.busy_since = None
                if not self.leaves:
                    raise handler_failed(self.settings.resource, batch[-len(changes)], error) from error
                return False
            except Exception as error:
                owned.busy_since = None
                self.statistics.failures += 1
                decision = yield from self._ask(JudgeError(changes[0], error, attempt))
                if decision == "stop":
                    raise handler_failed(self.settings.resource, batch[-len(changes)], error) from error
                if decision == "retry":
                    wait = self._wait_after(error, attempt)
                    yield from self._pause(wait, f"the handler raised {type(error).__name__}")
                    if self.leaves:
                        return False
                    continue
                self.statistics.skipped += 1
                yield from self._renew(owned)
            else:
                self.statistics.handled += done.count
            self._done(owned, changes[done.count - 1].position, done)
            changes, attempt = [replace(left, lease=owned.lease) for left in changes[done.count :]], 0
        return True

    def _wait_after(self, error: Exception, attempt: int) -> float:
        """By the schedule. A transaction that another writer got in the way of is no fault of its change: it is tried
        again soon."""
        labelled = getattr(error, "has_error_label", None)
        if labelled is not None and labelled(TRANSIENT_LABEL):
            return _backoff(attempt)
        return self.settings.retry.wait(attempt)

    def _changes(self, owned: Ownership, batch: Sequence[Pulled]) -> list[HandleChange]:
        position, changes = self._position, []
        for pulled in batch:
            if position is None or pulled.token is None:
                raise InternalError("a change without a token")
            # What several shards log at one time may have one token, and no stream resumes between such changes.
            self._again = self._again + 1 if position.token == pulled.token else 0
            position = pulled.position or position.moved_to(pulled.token, start_after=pulled.invalidate)
            changes.append(HandleChange(owned.lease, pulled.event, position, self._again))
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
        """The handler ended with an error that is no matter of its change. Raises."""
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
        is_history = self._position is not None and self._position.began is not None
        if self.settings.on_invalidate == "fail" and not is_history:
            raise StreamInvalidated(
                f"what the listener on {self.settings.resource!r} watched was dropped or renamed",
                hint='The position after it is kept: start the listener again to go on, or use on_invalidate="resume"',
            )
        yield from self._open(owned)


def _backoff(failures: int) -> float:
    shortest, longest = _BACKOFF_S
    return min(longest, shortest * 2.0 ** min(failures - 1, 20))
