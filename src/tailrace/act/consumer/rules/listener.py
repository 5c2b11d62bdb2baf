"""A listener's logic: acquire, read the position back, watch, handle, commit, next.

It is a generator of needs (``rules.need``) that is answered with outcomes, so one logic serves a thread, asyncio and
the simulation. Its rule: the commit of a change's position comes after its handling and, where every change is
committed, before the next one is handled; nothing is begun on a lease that is known to be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tailrace.act.consumer.rules.lease_logic import BACKOFF_S, Steps, backoff
from tailrace.act.consumer.rules.need import (
    CloseStream,
    FindStart,
    HandleChange,
    HandleChanges,
    Handled,
    JudgeError,
    OpenStream,
    Pause,
    Pulled,
    RefreshLease,
    ReleaseLease,
)
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.rules.settings import ListenerSettings
from tailrace.act.consumer.rules.skipping import SkippingLogic
from tailrace.core.oplog.cluster_time import ZERO
from tailrace.errors import ChangeStreamHistoryLost, InternalError, SourceError, StreamInvalidated

#: The label of an error of the driver for a transaction that may be tried again as a whole.
TRANSIENT_LABEL: Final = "TransientTransactionError"
#: About how many bytes of changes are handled together.
_BATCH_BYTES: Final = 16 << 20


class ListenerLogic(SkippingLogic):
    """One listener. ``steps()`` is driven by one driver; ``stopping`` may be set by anybody: the change in hand is
    finished, committed, and the lease is released."""

    def __init__(self, settings: ListenerSettings) -> None:
        super().__init__(settings)
        self._again = 0
        #: The change that the stream could not give last, and how often it could not.
        self._refused: tuple[Any, int] = None, 0

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
                yield Pause(BACKOFF_S[0], f"{error.message}")
            except GeneratorExit:
                owned.ended = True
                raise
            except BaseException:
                yield from self._leave(owned)
                raise

    # The lease

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
        """Commit what was handled, give the lease back. A failure here does no harm: the next owner begins at the
        position that is in the store."""
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
                yield from self._pause(backoff(failures), error.message)
            except SourceError as error:
                failures += 1
                yield from self._wait_for_source(error, failures, since)
            else:
                self._moved(StreamPosition(at=time, deployment=deployment, began=began))
                yield from self._commit(owned)

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

    def _quiet(self, owned: Ownership, pulled: Pulled) -> Steps:
        """Nothing to give: commit what is left, and now and then how far the stream has come, so that a quiet one does
        not fall off the oplog."""
        position = self._position
        if position is not None and pulled.token is not None:
            self._came_to(position.move_to(pulled.token))
        if position is None or not self.settings.commits.is_due_when_quiet(
            self._uncommitted, self._committed_at, self._now
        ):
            return
        if pulled.token is not None and self._may_mark:
            further = position.move_to(pulled.token)
            if further.cluster_time > position.cluster_time:
                yield from self._mark(further)
        else:
            yield from self._mark()
        if self._position != self._committed:
            yield from self._commit(owned)
        else:
            self._committed_at = self._now

    def _gather(self, owned: Ownership, first: Pulled) -> Steps:
        """``first`` and, with a handler that takes several changes, those that are ready after it; ``None`` if the
        stream had to be opened again and will give them once more."""
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
            return backoff(attempt)
        return self.settings.retry.wait(attempt)

    def _changes(self, owned: Ownership, batch: Sequence[Pulled]) -> list[HandleChange]:
        position, changes = self._position, []
        for pulled in batch:
            if position is None or pulled.token is None:
                raise InternalError("a change without a token")
            # What several shards log at one time may have one token, and no stream resumes between such changes.
            self._again = self._again + 1 if position.token == pulled.token else 0
            position = pulled.position or position.move_to(pulled.token, start_after=pulled.invalidate)
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
            owned.extend(self._asked + self.settings.lease_seconds)
            self._note_commit(position)
        else:
            self._uncommitted += done.count

    def _doubt(self, owned: Ownership, error: Exception) -> Steps:
        """The handler ended with an error that has nothing to do with its change. Raises."""
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
