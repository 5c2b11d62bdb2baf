"""The target's answers: which errors are worth another try, and one sentence for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from pymongo import WriteConcern
from pymongo.errors import (
    ConnectionFailure,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WTimeoutError,
)

from tailrace.errors import SinkError
from tailrace.read.source.connection import RETRY_SECONDS
from tailrace.read.source.failure import Backoff, is_transient

MAJORITY: Final = WriteConcern("majority")
TRANSIENT: Final = "TransientTransactionError"
UNKNOWN_COMMIT: Final = "UnknownTransactionCommitResult"
#: Of replies: an error's holds values of documents (``keyValue``), which may be any.
REPLIES: Final[CodecOptions[Any]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)
_UNAUTHORIZED: Final = 13
#: A name with a dollar where none may be (an ``_id`` that ``applyOps`` has made), binary data not of its kind, and a
#: document of a capped collection with the name ``$v``, which 5.0 takes for an update's version.
_NOT_STORABLE: Final = (52, 378, 4772600, 4772602)
_NO_ROOM: Final = 14031
_TOO_LARGE: Final = 388
_GOES_ON: Final = "Then start the sync again: it goes on where it was, and nothing is lost"
_RETRYABLE: Final = "RetryableWriteError"
#: What a transaction has begun is gone; or it was too much for the cache just now (TemporarilyUnavailable).
_AGAIN: Final = frozenset({251, 365})
T = TypeVar("T")
#: Longer than an election takes; somebody may wait for the sentence that TARGET leads to a secondary.
_ELECTION_S: Final = 20.0


def is_worth_again(error: PyMongoError) -> bool:
    """Whether the same transaction or command may be done later: an election, a cut connection, a conflict."""
    labels = (TRANSIENT, _RETRYABLE, UNKNOWN_COMMIT)
    if any(error.has_error_label(label) for label in labels) or is_transient(error):
        return True
    return isinstance(error, WTimeoutError) or (isinstance(error, OperationFailure) and error.code in _AGAIN)


def sink_error(what: str, error: PyMongoError | BSONError) -> SinkError:
    """The one sentence for an error of the target; the server's code is kept."""
    code = error.code if isinstance(error, OperationFailure) else None
    details = getattr(error, "details", None)  # of several members' failures a list
    said = str(details.get("errmsg", error) if isinstance(details, Mapping) else error)
    hint = None
    if code == _UNAUTHORIZED:
        hint = (
            "The user needs readWrite and dbAdmin on the target's databases, readWrite on that of the sync, and for "
            f"UUIDs the role restore. {_GOES_ON}"
        )
    elif code in _NOT_STORABLE:
        hint = "No server accepts such a document from a client. Change it on the source, or leave its collection out"
    elif code == _TOO_LARGE:
        hint = f"Give the target more cache (storage.wiredTiger.engineConfig.cacheSizeGB). {_GOES_ON}"
    elif code == _NO_ROOM:
        hint = f"Make room on the target's disk. {_GOES_ON}"
    elif isinstance(error, NotPrimaryError):
        hint = f"Name the replica set in TARGET (?replicaSet=NAME, without directConnection). {_GOES_ON}"
    elif isinstance(error, ConnectionFailure):
        hint = f"Its log says why it does not answer: a server stops when its disk is full. Start it again. {_GOES_ON}"
    return SinkError(f"the target cannot {what}: {said}", code=code, hint=hint)


def answered(what: str, ask: Callable[[], T], *, check: Callable[[], None] | None = None) -> T:
    """What ``ask`` reads from the target. It is called again for as long as the target elects a primary or cuts the
    connection: PyMongo repeats a read once, and a command that returns a cursor never.

    ``check``: the owner's, called before each try. An owner waits ``RETRY_SECONDS`` for a target without a primary,
    others only as long as the driver, and ``_ELECTION_S`` where a member says that it is none. Raises SinkError.
    """
    backoff = Backoff(give_up_s=_ELECTION_S if check is None else RETRY_SECONDS)
    while True:
        if check is not None:
            check()
        try:
            return ask()
        except BSONError as error:
            raise sink_error(what, error) from error
        except PyMongoError as error:
            has_waited = check is None and isinstance(error, ServerSelectionTimeoutError)
            if has_waited or not is_worth_again(error) or backoff.exhausted:
                raise sink_error(what, error) from error
        backoff.wait()


@contextmanager
def answering(what: str) -> Iterator[None]:
    """Raise SinkError for what the driver raises."""
    try:
        yield
    except (PyMongoError, BSONError) as error:
        raise sink_error(what, error) from error
