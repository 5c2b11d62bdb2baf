"""One stream's resume process: its token, its starting point, and what follows a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tailrace.watch.client.resume.failure import Failure, is_resumable


class Next(Enum):
    """What a stream does after a failure."""

    RESUME = "close the old cursor quietly, and open the stream again in the same call"
    RAISE = "raise; the stream stays open, and its next call opens it again"
    END = "raise; the stream is over"


@dataclass(frozen=True, slots=True)
class SaidStart:
    """Where the caller has said that the stream begins. Two at a time are the server's to refuse (rule 7)."""

    resume_after: Any = None
    start_after: Any = None
    start_at_operation_time: Any = None

    def options(self) -> dict[str, Any]:
        """Those that were said, by the server's names."""
        said = {
            "resumeAfter": self.resume_after,
            "startAfter": self.start_after,
            "startAtOperationTime": self.start_at_operation_time,
        }
        return {name: value for name, value in said.items() if value is not None}


class ResumeProcess:
    """Told of each reply, event and failure of a stream. Tokens and times are opaque: bytes, documents, timestamps."""

    def __init__(self, start: SaidStart) -> None:
        self._start = start
        #: Rules 17 and 21: the cached token, which the user may read and a resume would send.
        self.token = start.start_after if start.start_after is not None else start.resume_after
        #: Rules 23 and 28: where a stream without a token begins again.
        self._time = start.start_at_operation_time
        self._uses_start_after = start.start_after is not None
        self.was_opened = False

    def start_options(self) -> dict[str, Any]:
        """Rule 28: the starting point that the next aggregate sends, by the server's name; the others are left out.
        Before the first reply, and where nothing better is known, what the caller has said."""
        if not self.was_opened:
            return self._start.options()
        if self.token is not None:
            return {"startAfter" if self._uses_start_after else "resumeAfter": self.token}
        if self._time is not None:
            return {"startAtOperationTime": self._time}
        return self._start.options()

    def opened(self, *, is_empty: bool, batch_token: Any, operation_time: Any) -> None:
        """An aggregate has succeeded.

        ``is_empty``        whether its first batch is
        ``batch_token``     the reply's ``postBatchResumeToken``, ``None`` where it has none
        ``operation_time``  the reply's ``operationTime``
        """
        self.was_opened = True
        if is_empty and batch_token is not None:
            self.token = batch_token  # rule 18
        elif is_empty and self.token is None and self._time is None:
            self._time = operation_time  # rule 23

    def found_nothing(self, batch_token: Any) -> None:
        """Rule 18: a batch came without an event, or the last one is used up."""
        if batch_token is not None:
            self.token = batch_token

    def gives(self, token: Any, *, is_last: bool, batch_token: Any) -> None:
        """Rule 19: an event with this ``_id`` is handed to the user; ``is_last`` of its batch."""
        self.token = batch_token if is_last and batch_token is not None else token
        self._uses_start_after = False  # rule 28: from now on with resumeAfter

    def failed(self, failure: Failure) -> Next:
        """Rules 24 to 26, and 31 where the caller's time is over."""
        if failure.out_of_time:
            return Next.RAISE
        if not is_resumable(failure):
            return Next.END
        # One attempt for each failure: that of an aggregate is not followed by another attempt in the same call. It
        # leaves the stream open, as PyMongo's does, so that a caller who waits for a better day may call again.
        return Next.RAISE if failure.command == "aggregate" else Next.RESUME
