"""The one hierarchy of errors. The class says who acts next; the server's codes, names and labels are kept.

A message has up to three parts: what happened (the server's own text where it has one), where (a position in an
oplog, a pipeline, a file) and a hint: what to do about it. The command line prints them without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = [
    "ChangeStreamFatal",
    "ChangeStreamHistoryLost",
    "InternalError",
    "InvalidResumeToken",
    "LaterEntryError",
    "NonResumableError",
    "OplogFormatError",
    "OtherHistoryError",
    "OtherVersionError",
    "ServerError",
    "SinkError",
    "SourceError",
    "StreamInvalidated",
    "TailraceError",
    "UnknownEntryError",
    "UsageError",
]

NON_RESUMABLE_LABEL = "NonResumableChangeStreamError"
RESUMABLE_LABEL = "ResumableChangeStreamError"

#: The server's name for each code that Tailrace raises or fail points ask for (error_codes of mongod 6.0). Codes
#: without a name of their own are called ``Location<code>`` by the server.
CODE_NAMES: dict[int, str] = {
    2: "BadValue",
    6: "HostUnreachable",
    7: "HostNotFound",
    8: "UnknownError",
    9: "FailedToParse",
    13: "Unauthorized",
    14: "TypeMismatch",
    15: "Overflow",
    18: "AuthenticationFailed",
    20: "IllegalOperation",
    22: "InvalidBSON",
    43: "CursorNotFound",
    47: "NoMatchingDocument",
    50: "MaxTimeMSExpired",
    59: "CommandNotFound",
    63: "OBSOLETE_StaleShardVersion",
    72: "InvalidOptions",
    73: "InvalidNamespace",
    89: "NetworkTimeout",
    91: "ShutdownInProgress",
    115: "CommandNotSupported",
    133: "FailedToSatisfyReadPreference",
    134: "ReadConcernMajorityNotAvailableYet",
    136: "CappedPositionLost",
    143: "CursorInUse",
    146: "ExceededMemoryLimit",
    148: "ReadConcernMajorityNotEnabled",
    150: "StaleEpoch",
    159: "DurationOverflow",
    166: "CommandNotSupportedOnView",
    168: "InvalidPipelineOperator",
    189: "PrimarySteppedDown",
    234: "RetryChangeStream",
    237: "CursorKilled",
    241: "ConversionFailure",
    260: "InvalidResumeToken",
    262: "ExceededTimeLimit",
    263: "OperationNotSupportedInTransaction",
    280: "ChangeStreamFatalError",
    286: "ChangeStreamHistoryLost",
    346: "ChangeStreamInvalidated",
    347: "APIMismatchError",
    384: "ConnectionError",
    9001: "SocketException",
    10107: "NotWritablePrimary",
    10334: "BSONObjectTooLarge",
    11600: "InterruptedAtShutdown",
    11601: "Interrupted",
    11602: "InterruptedDueToReplStateChange",
    13388: "StaleConfig",
    13435: "NotPrimaryNoSecondaryOk",
    13436: "NotPrimaryOrSecondary",
    40414: "IDLFailedToParse",
    40415: "IDLUnknownField",
}


def code_name(code: int) -> str:
    """The server's name for ``code``: ``CODE_NAMES`` or ``Location<code>``."""
    return CODE_NAMES.get(code, f"Location{code}")


#: The server's code for what has none of its own: it tells a reader nothing.
_UNKNOWN_ERROR = 8


class TailraceError(Exception):
    """Root of every error that Tailrace raises on purpose.

    Attributes:
        message: the server's text, unchanged, where it has one
        code: the server's code, or ``None`` where the server has none
        labels: the server's error labels
        hint: what the reader can do
    """

    default_code: int | None = None
    #: The change event that the error is about, where a stream without it could go on. Not sent between processes.
    event: object | None = None

    def __init__(
        self,
        message: str,
        *,
        code: int | None = None,
        labels: Iterable[str] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.labels = frozenset(labels)
        self.hint = hint

    @property
    def code_name(self) -> str | None:
        return None if self.code is None else code_name(self.code)

    def __str__(self) -> str:
        text = self.message
        if self.code not in (None, _UNKNOWN_ERROR):
            text = f"{text} ({self.code} {self.code_name})"
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        # Spark sends errors between processes by pickle; keyword-only arguments would be lost by the default.
        return (_rebuild, (type(self), self.message, self.code, tuple(self.labels), self.hint))


def _rebuild(
    cls: type[TailraceError], message: str, code: int | None, labels: tuple[str, ...], hint: str | None
) -> TailraceError:
    error = cls.__new__(cls)
    TailraceError.__init__(error, message, code=code, labels=labels, hint=hint)
    return error


Raised = TypeVar("Raised", bound=TailraceError)


def at_event(error: Raised, event: object) -> Raised:
    """The error, together with the one event that it is about."""
    error.event = event
    return error


def on_shard(error: TailraceError, shard: str) -> TailraceError:
    """The same error, its message preceded by the shard that it comes from, in the server's words."""
    named = _rebuild(
        type(error), f"Error on remote shard {shard} :: caused by :: {error.message}", error.code, (), error.hint
    )
    named.__dict__.update({name: value for name, value in error.__dict__.items() if name != "message"})
    named.__cause__ = error
    return named


class UsageError(TailraceError):
    """The caller fixes the call: a wrong option, a pipeline that does not parse, a path that does not exist."""


class InvalidResumeToken(UsageError):
    """The token does not parse, or does not belong to this stream (260 and the parse codes)."""

    default_code = 260


class NonResumableError(TailraceError):
    """The operator starts a new stream: 280 and 286 carry the server's label that says so."""

    def __init__(self, message: str, *, code: int, hint: str | None = None) -> None:
        super().__init__(message, code=code, labels=(NON_RESUMABLE_LABEL,), hint=hint)


class ChangeStreamFatal(NonResumableError):
    """280: the resume token is not in the stream, or the pipeline changed ``_id``."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, code=280, hint=hint)


class ChangeStreamHistoryLost(NonResumableError):
    """286: the oplog no longer reaches back to the requested point."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, code=286, hint=hint)


class StreamInvalidated(TailraceError):
    """The operator starts a new stream: what this one watched was dropped or renamed. Raised only if the caller asked
    for it."""


class ServerError(TailraceError):
    """The server's stream would end with this code too, and no label tells the client to resume (47, 166, 10334)."""


class SourceError(TailraceError):
    """The place that entries come from cannot be read: unreachable, not permitted, not a replica set, damaged."""


class OtherHistoryError(SourceError):
    """What should be continued was read from another deployment, or from a history that this deployment no longer has:
    it was restored from an older backup, or a rollback removed majority-committed entries."""


class OtherVersionError(SourceError):
    """What is read was written by another server version than the one whose events are made, as happens while a
    deployment is upgraded. It carries the label that allows resuming: a stream that is opened again makes the events of
    the version that it then reads, unless its user named one."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, labels=(RESUMABLE_LABEL,), hint=hint)


class LaterEntryError(OtherVersionError):
    """An entry that only a later server version writes was read to make the events of an earlier one, which would lose
    it or show it differently."""


class UnknownEntryError(SourceError):
    """An entry of a kind that this version of Tailrace does not know was read for a store of data (tables, exact
    images). Without the entry's effect the store would be wrong."""


class SinkError(TailraceError):
    """The place that events go to cannot be written to, or should not be: it is full, damaged, not permitted, or
    belongs to another stream."""


class OplogFormatError(TailraceError):
    """An oplog entry breaks its format.

    Nothing is skipped: the code that catches the error decides, and everything before the position has been delivered.

    Attributes:
        position: the entry's cluster time or byte offset, as text
    """

    default_code = 8

    def __init__(self, message: str, *, position: str | None = None, code: int | None = None) -> None:
        super().__init__(message, code=code, hint=None if position is None else f"At {position}")
        self.position = position


class InternalError(TailraceError):
    """Our own bug; the state can no longer be trusted. Please report it."""


def invariant(condition: bool, message: str) -> None:
    """Raise ``InternalError`` unless ``condition`` holds (a plain assert vanishes under ``python -O``)."""
    if not condition:
        raise InternalError(message)
