"""What ``Listener`` and ``AsyncListener`` have in common: the answers to what ``rules.listener`` needs."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

from pymongo.errors import PyMongoError

from tailrace.act.consumer.change import Change, Hands
from tailrace.act.consumer.dead_letters import DeadLetters
from tailrace.act.consumer.fence import FENCE_FIELD, Fence
from tailrace.act.consumer.lanes import Lanes
from tailrace.act.consumer.lease import Lease, LeaseCommit, LeaseStore, commits_together
from tailrace.act.consumer.rules import lease as lease_rules
from tailrace.act.consumer.rules.commit_policy import IDLE_S, CommitPolicy
from tailrace.act.consumer.rules.errors import (
    HandlerCancelled,
    HandlerForked,
    LeaseLost,
    LeaseStoreUnavailable,
)
from tailrace.act.consumer.rules.keeper import keep
from tailrace.act.consumer.rules.lane_key import LaneKeyChoice, lane_keys
from tailrace.act.consumer.rules.lane_turn import BarrierReached
from tailrace.act.consumer.rules.lanes import LanePlan, check_lanes
from tailrace.act.consumer.rules.listener import TRANSIENT_LABEL, ListenerLogic
from tailrace.act.consumer.rules.need import (
    AcquireLease,
    CommitPosition,
    Decision,
    HandleChange,
    HandleChanges,
    Handled,
    JudgeError,
    KeepLease,
    ListenerNeed,
    Outcome,
    Pause,
    RefreshLease,
    ReleaseLease,
    RenewLease,
    SkipChange,
    StartName,
    TellGap,
)
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.retry_schedule import RetrySchedule
from tailrace.act.consumer.rules.settings import (
    ListenerSettings,
    OnHistoryLost,
    OnInvalidate,
    together,
)
from tailrace.act.consumer.rules.unrun import check_runs, refuse_unrun
from tailrace.act.consumer.watching import Watched, Watching
from tailrace.errors import InternalError, TailraceError, UsageError

Handler = Callable[[Change], Any]
OnError = Literal["stop"] | Callable[[Change, Exception, int], Decision]

_log = logging.getLogger("tailrace.consumer")
#: How often a transaction that conflicted with another writer is tried again before the error policy is applied.
_TRANSIENT_TRIES: Final = 100


def cancelled(resource: str) -> HandlerCancelled:
    """The error of a handler that has ended with CancelledError on its own."""
    return HandlerCancelled(
        f"the handler of {resource!r} ended with CancelledError, and nobody has cancelled the listener",
        hint="Something that it awaited was cancelled: if that is intended, catch the error in the handler",
    )


def new_owner() -> str:
    """An owner id that no other listener has: host, process and a random part."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


class ListenerBase(ABC):
    """What all listeners share, however they are driven: settings, lease, lanes, answers to the needs of their logic.

    ``Listener`` says what the parameters mean. A subclass has ``run()``, ``start()`` and ``join()``.
    """

    def __init__(
        self,
        watchable: Watched,
        handler: Handler,
        *,
        resource: str,
        store: LeaseStore,
        partitions: int = 1,
        lane_key: LaneKeyChoice | Sequence[LaneKeyChoice] = None,
        commit_every: int = 1,
        commit_interval: float | None = None,
        commit_idle: float = IDLE_S,
        start: StartName = "oldest",
        on_history_lost: OnHistoryLost = "fail",
        on_invalidate: OnInvalidate = "fail",
        on_error: OnError = "stop",
        retries: int | RetrySchedule = 0,
        handler_timeout: float | None = None,
        lease_seconds: float = 30.0,
        owner: str | None = None,
        fence_field: str = FENCE_FIELD,
        pipeline: Sequence[Mapping[str, Any]] | None = None,
        full_document: str | None = None,
        **watch: Any,
    ) -> None:
        check_lanes(partitions)
        if on_error != "stop" and not callable(on_error):
            raise UsageError(f'on_error must be "stop" or a function, not {on_error!r}')
        if not callable(handler):
            raise UsageError(f"the handler must be a function of one change, not {type(handler).__name__}")
        self._check_runs(handler)
        self.owner = new_owner() if owner is None else owner
        lease_rules.check_arguments(resource, self.owner, lease_seconds)
        Fence(resource, 0, field=fence_field)  # refuses a field that cannot be
        self.resource = resource
        self._logic = ListenerLogic(
            ListenerSettings(
                resource=resource,
                lease_seconds=lease_seconds,
                start=start,
                on_history_lost=on_history_lost,
                on_invalidate=on_invalidate,
                commits=CommitPolicy(commit_every, commit_interval, commit_idle),
                batch=commit_every if self._takes_batches(handler) else 0,
                retry=RetrySchedule.of(retries),
            )
        )
        watch = {"pipeline": pipeline, "full_document": full_document, **watch}
        self._watching = Watching(watchable, store, **watch)
        self._watch = watch
        self._watchable = watchable
        self._partitions = partitions
        self._lane_keys = lane_keys(getattr(handler, "lane_key", None) if lane_key is None else lane_key)
        self._lanes: Lanes | None = None
        self._lane_logics: list[ListenerLogic] = []
        #: Tokens that targets are marked with in addition to the lease's own version: those of a lane's resource.
        self._fence_above: Mapping[str, int] = {}
        self._handler = handler
        self._store = store
        self._commits_together = commits_together(store)
        self._on_error = on_error
        self._handler_timeout = handler_timeout
        self._lease_seconds = lease_seconds
        self._fence_field = fence_field
        self._hands: Hands | None = None
        self._stopped = threading.Event()
        self._begun = False
        self._process = os.getpid()

    @property
    def statistics(self) -> Any:
        """What was counted so far (``ListenerStatistics``). With partitions: over all lanes that this
        process has worked on; ``position_time`` is the least of them."""
        parts = [logic.statistics for logic in self._lane_logics]
        if not parts:
            return self._logic.statistics
        whole = together(parts)
        whole.paused = self._logic.statistics.paused
        return whole

    @property
    def logics(self) -> Sequence[ListenerLogic]:
        """What this process works on: the whole, or the lanes that it has had."""
        return tuple(self._lane_logics) or (self._logic,)

    @property
    def has_begun(self) -> bool:
        """Whether it has had the lease, or knows that others have it."""
        return self._logic.begun or (self._lanes is not None and self._lanes.plan is not None)

    def _claim_run(self) -> None:
        if self._begun:
            raise UsageError("a listener runs once", hint="Make a new one")
        self._begun = True

    def run_alone(self) -> None:
        """``run()`` for a caller that knows that the resource is not divided, or that this is a part of it."""
        self._drive(self._logic.steps(), self._perform)

    def _has_lanes(self) -> bool:
        try:
            record = self._store.read(self.resource)
        except LeaseStoreUnavailable:
            return False
        return record is not None and LanePlan.is_plan(record.position)

    def _run_lanes(self, lanes: int | None) -> None:
        self._lanes = Lanes(
            self._watchable,
            resource=self.resource,
            store=self._store,
            owner=self.owner,
            lanes=lanes,
            lease_seconds=self._lease_seconds,
            keys=self._lane_keys,
            watch_options=self._watch,
            make_listener=self._lane_listener,
            resumes=self._logic.settings.on_invalidate == "resume",
            note_pause=self._note_pause,
        )
        if not self._stopped.is_set():
            self._lanes.run()

    def _lane_listener(
        self, watchable: Any, *, resource: str, store: Any, plan: LanePlan | None, copies: bool = False
    ) -> ListenerBase:
        """The listener of a lane; without a plan, the one that settles where the first lanes begin."""
        settings = self._logic.settings
        options: dict[str, Any] = {
            **settings.commits.arguments,
            "on_history_lost": settings.on_history_lost,
            "on_invalidate": settings.on_invalidate,
            "on_error": self._on_error,
            "retries": settings.retry,
            "handler_timeout": self._handler_timeout,
            "lease_seconds": self._lease_seconds,
            "owner": self.owner,
            "fence_field": self._fence_field,
        }
        if plan is None:
            start: StartName = "snapshot" if copies else settings.start
            return self._part(watchable, resource=resource, store=store, start=start, **options, **self._watch)
        listener = self._part(watchable, resource=resource, store=store, **options)
        listener._fence_above = {self.resource: plan.fencing_token(0)}
        self._lane_logics.append(listener._logic)
        return listener

    @abstractmethod
    def _part(self, watchable: Any, **options: Any) -> ListenerBase:
        """A listener with the same handler that a thread drives, such as that of one lane."""

    def stop(self) -> None:
        """Ask it to end: the change in hand is finished and committed, the lease released. From any thread, from a
        signal's handler, and from the listener's own handler."""
        self._logic.stopping = True
        self._stopped.set()
        if self._lanes is not None:
            self._lanes.stop()

    def _drive(self, steps: Generator[ListenerNeed, Outcome, Any], perform: Callable[[Any], Any]) -> None:
        """Answer needs until there are none left."""
        try:
            need = next(steps)
            while True:
                asked = time.monotonic()
                value, error = None, None
                try:
                    value = perform(need)
                except BaseException as raised:  # noqa: BLE001  the logic judges, and raises it again
                    error = raised
                need = steps.send(Outcome(asked, time.monotonic(), value, error))
        except StopIteration:
            return

    def _perform(self, need: ListenerNeed) -> Any:
        match need:
            case HandleChange():
                return self._handle(need)
            case HandleChanges():
                return self._handle_batch(need)
            case Pause():
                return self._pause(need)
            case JudgeError():
                return self._judge(need)
            case KeepLease():
                return self._keep(need)
            case AcquireLease():
                return self._acquire()
            case RefreshLease():
                held = self._store.refresh(need.lease, self._lease_seconds)
                self._note_pause(held.paused_at)
                return held
            case RenewLease():
                return self._renew(need)
            case CommitPosition():
                commit = LeaseCommit(need.lease, need.position.to_document(), self._lease_seconds)
                return self._commit_skip(commit) if need.ends_skip else self._commit(commit)
            case SkipChange():
                return self._skip(need)
            case ReleaseLease():
                return self._release(need)
            case TellGap():
                said = (
                    "%s: history is lost: changes from %s to %s were not handled, and are kept on record as a gap: %s"
                )
                return _log.warning(said, self.resource, need.begin, need.end, need.why)
            case _:
                return self._watching.perform(need)

    def _is_barrier(self, need: HandleChange) -> bool:
        """Whether a lane has only reached a barrier: there is nothing to handle, and nothing is counted."""
        if not isinstance(need.event, BarrierReached):
            return False
        self.statistics.handled -= 1
        return True

    def _handle(self, need: HandleChange) -> bool:
        if self._is_barrier(need):
            return False
        change = self._new_change(need)
        try:
            refuse_unrun(self._handler(change), f"the handler of {self.resource!r}")
        except CancelledError as error:
            raise cancelled(self.resource) from error
        finally:
            self._refuse_fork()
        return change.is_committed

    def _check_runs(self, handler: Any) -> None:
        check_runs(handler, "the handler")
        if self._takes_batches(handler):
            check_runs(handler.handle_batch, "handle_batch")

    @staticmethod
    def _takes_batches(handler: Any) -> bool:
        return callable(getattr(handler, "handle_batch", None))

    def _handle_batch(self, need: HandleChanges) -> Handled:
        if self._is_barrier(need.changes[0]):  # which comes alone
            return Handled(1)
        changes = [self._new_change(one) for one in need.changes]
        batch_handler: Any = self._handler
        try:
            count = batch_handler.handle_batch(changes)
        except CancelledError as error:
            raise cancelled(self.resource) from error
        finally:
            self._refuse_fork()
        refuse_unrun(count, f"handle_batch of {self.resource!r}")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(changes):
            of = f"its {len(changes)} changes are done, counted from the first"
            raise UsageError(f"handle_batch must return how many of {of}, not {count!r}")
        return Handled(count, changes[count - 1].is_committed)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise HandlerForked(
                f"the handler of {self.resource!r} forked, and its child process returned into the listener",
                hint="End the child with os._exit(), or start it with subprocess",
            )

    def _pause(self, need: Pause) -> None:
        _log.debug("%s: waiting: %s", self.resource, need.reason)
        seconds = need.seconds * random.uniform(0.75, 1.25)  # listeners must not come all at once
        if need.always:
            time.sleep(seconds)
        else:
            self._stopped.wait(seconds)

    def _judge(self, need: JudgeError) -> Decision:
        if isinstance(need.error, PyMongoError) and need.error.has_error_label(TRANSIENT_LABEL):
            if need.attempt <= _TRANSIENT_TRIES:
                return "retry"
        elif need.attempt <= self._logic.settings.retry.retries:
            return "retry"
        if self._hands is None or not callable(self._on_error):
            return "stop"
        return self._checked_decision(self._on_error(self._new_change(need.change), need.error, need.attempt))

    def _new_change(self, need: HandleChange) -> Change:
        return Change(need.event, need.position, self._hands_now(), need.again)

    def _hands_now(self) -> Hands:
        if self._hands is None:
            raise InternalError("a change without a lease")
        if self._hands.lease is not self._hands.ownership.lease:
            self._hands = self._new_hands(self._hands.ownership)  # with a newer fencing token
        return self._hands

    def _commit(self, commit: LeaseCommit) -> None:
        if not self._commits_together:
            self._store.commit(*commit)
            return
        # A command without what the server records for retryable writes: it costs 0.6 of the other. The logic tries
        # again on its own.
        (error,) = self._commits_together.commit_together([commit])
        if error is not None:
            raise error

    def _acquire(self) -> Lease | None:
        lease = self._store.acquire(self.resource, self.owner, self._lease_seconds)
        read = getattr(self._store, "read", None)  # a lane's has none: the lanes themselves look
        if read is not None and not self._logic.stopping:
            record: Lease | None = read(self.resource) if lease is None else lease
            self._note_pause(None if record is None else record.paused_at)
        return lease

    def _note_pause(self, since: datetime | None) -> None:
        """Log once that an operator holds the resource still, and once that nobody does any more."""
        statistics = self._logic.statistics
        if (since is not None) == bool(statistics.paused):
            return
        statistics.paused = int(since is not None)
        if since is not None:
            said = "%s: an operator paused it at %s: the change in hand is finished, and no other is begun"
            _log.warning(said, self.resource, f"{since:%Y-%m-%d %H:%M:%S} UTC")
        else:
            _log.warning("%s: it is no longer paused", self.resource)

    def _skip(self, need: SkipChange) -> bool:
        """Write down what an operator wants left out: with the other dead letters, or where the operator says."""
        if isinstance(need.change.event, BarrierReached):
            return False
        letters = self._on_error if isinstance(self._on_error, DeadLetters) else self._letters_of(need.skip)
        change = self._new_change(need.change)
        letters.write_skipped(change, need.error)
        _log.warning("%s: the change %s was left out, as an operator had asked", self.resource, change.message_id)
        return True

    def _letters_of(self, skip: Mapping[str, Any]) -> DeadLetters:
        collection, where = getattr(self._store, "collection", None), skip.get("letters")
        if collection is None or not isinstance(where, str) or "." not in where:
            raise UsageError(
                f"an operator wants a change of {self.resource!r} left out, and there is no place for dead letters",
                hint="Give the listener on_error=DeadLetters(...)",
            )
        database, _, name = where.partition(".")
        return DeadLetters(collection((database, name)))

    def _commit_skip(self, commit: LeaseCommit) -> None:
        self._store.commit_skip(*commit)  # type: ignore[attr-defined]  # nobody else has leases with such a change

    def _renew(self, need: RenewLease) -> Lease | None:
        renew = getattr(self._store, "renew", None)  # of a lane
        if renew is None:
            return self._store.acquire(self.resource, self.owner, self._lease_seconds)
        lease: Lease | None = renew(need.lease, self._lease_seconds)
        return lease

    def _checked_decision(self, decision: Any) -> Decision:
        refuse_unrun(decision, "on_error")
        if decision not in ("retry", "skip", "stop"):
            raise UsageError(f'on_error must return "retry", "skip" or "stop", not {decision!r}')
        chosen: Decision = decision
        return chosen

    def _keep(self, need: KeepLease) -> None:
        """A thread that keeps the lease, however long the handler takes."""
        owned = need.ownership
        self._hands = self._new_hands(owned)
        threading.Thread(
            target=self._keep_quietly,
            args=(keep(owned, self._lease_seconds, self._handler_timeout), owned),
            name=f"lease {self.resource}",
            daemon=True,
        ).start()

    def _new_hands(self, owned: Ownership) -> Hands:
        return Hands(
            owned,
            self._store,
            self._lease_seconds,
            fence_field=self._fence_field,
            fence_above=self._fence_above,
            codec_options=self._watching.codec_options,
            is_stopping=lambda: self._logic.leaves,
        )

    def _keep_quietly(self, steps: Generator[ListenerNeed, Outcome, Any], owned: Any) -> None:
        try:
            self._drive(steps, self._perform)
        except Exception as error:  # noqa: BLE001  a lease that is not kept is lost, and the listener hears of it
            said = error.message if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
            owned.lose(LeaseLost(f"the lease on {self.resource!r} cannot be kept: {said}"))

    def _release(self, need: ReleaseLease) -> None:
        try:
            self._store.release(need.lease)
        except TailraceError as error:
            _log.warning("%s: the lease was not released and will run out: %s", self.resource, error.message)
