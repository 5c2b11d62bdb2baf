"""PyMongo's errors as the failures that the resume process decides on."""

from __future__ import annotations

from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError

from tailrace.read.source.time_limit import remaining_s
from tailrace.watch.client.resume import CursorCommand, Failure, labels_of_stream

#: Stands for the code of an error that no server has answered and no network has made: a client that was closed.
_OF_CLIENT = -1


def failure_of(error: PyMongoError, command: CursorCommand, wire_version: int | None) -> Failure:
    """What has failed, for a command of the server's stream that ran on a connection of this wire version.

    An error of the connection has no code: no server has answered. Nor has one after a wait for a server.
    """
    out_of_time = bool(error.timeout) and remaining_s() is not None
    if isinstance(error, OperationFailure):
        labels = frozenset((error.details or {}).get("errorLabels", ()))
        answered = _OF_CLIENT if error.code is None else error.code
        return Failure(command, answered, labels, wire_version, out_of_time)
    code = None if isinstance(error, ConnectionFailure) else _OF_CLIENT
    return Failure(command, code, out_of_time=out_of_time)


def failure_of_read(error: PyMongoError, command: CursorCommand) -> Failure:
    """What has failed of a stream that is made of the oplog. We read servers that label errors (4.4 and later)."""
    failure = failure_of(error, command, None)
    if not isinstance(error, OperationFailure):
        return failure
    message = str((error.details or {}).get("errmsg", ""))
    labels = labels_of_stream(error.code, failure.labels, message)
    return Failure(command, failure.code, labels, None, failure.out_of_time)
