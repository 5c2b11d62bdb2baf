"""What goes wrong between a listener, its lease and its handler."""

from __future__ import annotations

from tailrace.errors import SinkError, TailraceError, UsageError


class LeaseLost(TailraceError):
    """The lease belongs to somebody else, or to nobody: what this owner wanted to do was not done. Raised by a store
    for an owner that has lost its lease, and by ``change.fence`` and ``change.transaction()`` inside a handler that
    still runs without it. A handler lets the error pass: the listener acquires the lease again and reads the position
    again."""


class OwnerNotUnique(LeaseLost):
    """Another listener has taken the lease under the same owner id. Two listeners must not share an id."""


class LeaseDocumentError(UsageError):
    """A lease document does not have the form that a store writes. Restore its form, or choose another resource;
    nothing was changed."""


class LaneHistoryLost(TailraceError):
    """A lane's history is lost, and everything must be copied again (``on_history_lost="snapshot"``): all lanes stop
    for it. It ends a lane, never a listener."""


class LeaseStoreUnavailable(SinkError):
    """The store did not answer, or not in time: it is not known whether it has done what it was asked to do."""


class Fenced(LeaseLost):
    """A target carries the fencing token of a newer owner: the write changed nothing."""


class SkippedByOperator(TailraceError):
    """Never raised: a dead letter names it as its error if an operator asked for the change to be left out."""


class HandlerFailed(TailraceError):
    """The handler raised, and the error policy says stop. The position is before the change in question, so that the
    next run begins with that change; ``__cause__`` is the handler's error."""


class HandlerNotRun(UsageError):
    """A handler, or another function that a listener was given, has returned a coroutine, a generator or a future: what
    it should do has not been done. The listener ends with nothing of that change committed, whatever the error policy:
    the same would happen at every change."""


class HandlerInterrupted(TailraceError):
    """A handler that waited for something has stopped waiting because the listener is stopping. Its change is not
    handled: the listener ends, and the next one begins with that change. No error policy is asked."""


class HandlerCancelled(TailraceError):
    """The handler ended with CancelledError, though neither the listener nor its lease was the cause: something that it
    waited for was cancelled. It is treated like any other error of the handler."""


class HandlerForked(UsageError):
    """A child process that the handler forked returned into the listener, which it must not do."""
