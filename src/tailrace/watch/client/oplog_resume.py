"""What follows a failure of one stream's read of the oplog: the rules of the drivers, kept by code that also plays the
server's part.

A read of the oplog stands for the server's cursor: opening it is the aggregate, every later reply is a getMore's. The
tail goes on from the last entry that it gave, so a resume misses and repeats nothing.
"""

from __future__ import annotations

import time
from typing import Any

import bson
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.core.plan.request import Answer, OplogBatch
from tailrace.core.stream.stream import Later, Need
from tailrace.errors import RESUMABLE_LABEL, ServerError, SourceError, TailraceError
from tailrace.read.source.drive import AnswerTo, AskAgainError
from tailrace.read.source.driver_error import as_driver_error
from tailrace.read.source.failure import is_transient, source_error
from tailrace.read.source.time_limit import TimeLimitError
from tailrace.watch.client.commands import StreamCommands
from tailrace.watch.client.failure import failure_of_read
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.resume import Next, ResumeProcess, SaidStart


class OplogResume:
    """Belongs to one stream, and does not hold it.

    ``client``    reads the oplog
    ``commands``  notified of the commands that the server's stream would have sent; ``None`` if nobody listens
    """

    def __init__(self, client: MongoClient[Any], request: WatchRequest, commands: StreamCommands | None) -> None:
        self._client = client
        said = (request.resume_after, request.start_after, request.start_at_operation_time)
        self._process = ResumeProcess(SaidStart(*said))
        self._failed: PyMongoError | None = None
        self._follows = Next.RESUME
        #: Whether the read is to be opened: at first, and after a failure.
        self._opening = True
        #: Whether the batch that came last was a resume's first one.
        self.has_resumed = False
        self._resuming = self._reopening = False
        #: The last error that has left the stream open.
        self.kept: BaseException | None = None
        self._commands = commands

    def reads(self, token: bytes, *, has_given: bool) -> None:
        """The stream is about to read; ``token`` is its resume token, ``has_given`` whether it has given an event."""
        commands = self._commands
        if commands is None:
            return
        if not self._opening:
            commands.get_more(token)
            return
        if commands.waits:
            return  # this look's aggregate was reported
        # Rule 28: where the read goes on, as a driver would say it.
        known = bson.decode(token)
        if self._process.token is not None or self._process.was_opened:
            self._process.found_nothing(known)
        if has_given:
            self._process.gives(known, is_last=True, batch_token=known)
        commands.aggregate(self._client.primary or ("", None), self._process.start_options())

    def on_error(self, error: PyMongoError) -> None:
        """A command of the read has failed. Where this returns, the read is opened again after its last entry; the
        end of the stream is raised (rules 24 and 25)."""
        failure = failure_of_read(error, "aggregate" if self._opening else "getMore")
        self._failed, self._follows = error, self._process.failed(failure)
        self._opening = True
        if self._commands is not None:
            self._commands.failed(error)
        if self._follows is Next.END:
            self._failed = None
            raise self._ending(error, failure.labels) from None

    def reads_on(self, batch: OplogBatch) -> bool:
        """After each batch: whether another one is read in the same call. It is if this one is only the sign that the
        read is now opened again (rule 26), and if an earlier call has failed and this one has opened the read again
        and found nothing. Raises the error that leaves the stream open."""
        error, self._failed = self._failed, None
        if error is None:
            self.has_resumed, self._resuming = self._resuming, False
            reopened, self._reopening = self._reopening, False
            if self._opening:
                self._opening = False
                self._process.opened(is_empty=True, batch_token=None, operation_time=None)
            return reopened and not batch.raw
        if self._follows is Next.RESUME:
            self._resuming = True
            return True
        self._reopening = True
        self.kept = source_error(error, self._client)
        raise self.kept

    def answers(self, answer_to: AnswerTo) -> AnswerTo:
        """``answer_to``, but a look-up that fails with an error after which a getMore would be resumed (rule 24) is
        repeated once, as by a resume: the server's stream survives a step-down without an error too. If it fails again,
        or no server was there in time, the stream stays open, and the waiting event comes with a later call."""

        def answered(need: Need) -> Answer | Later:
            begun = time.monotonic()
            try:
                return answer_to(need)
            except SourceError as error:
                _raise_unless_resumable(error)
                if time.monotonic() - begun >= self._client.options.server_selection_timeout:
                    raise self._later(error) from None
            try:
                return answer_to(need)
            except SourceError as error:
                _raise_unless_resumable(error)
                raise self._later(error) from None

        return answered

    def _later(self, error: SourceError) -> AskAgainError:
        self.kept = error
        return AskAgainError(error)

    def _ending(self, error: PyMongoError, labels: frozenset[str]) -> TailraceError:
        if isinstance(error, OperationFailure) and is_transient(error):
            message = str((error.details or {}).get("errmsg") or error)
            return as_driver_error(ServerError(message, code=error.code, labels=labels), error)
        return source_error(error, self._client)


def _raise_unless_resumable(error: SourceError) -> None:
    if isinstance(error, TimeLimitError) or RESUMABLE_LABEL not in error.labels:
        raise error
