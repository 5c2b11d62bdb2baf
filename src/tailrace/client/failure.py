"""PyMongo's errors as the failures that the resume process decides on."""

from __future__ import annotations

from pymongo.errors import OperationFailure, PyMongoError

from tailrace.client.resume import Command, Failure
from tailrace.source.time_limit import remaining_s


def failure_of(error: PyMongoError, command: Command, wire_version: int | None) -> Failure:
    """What has failed, for a command that ran on a connection of this wire version.

    An error of the connection has no code: no server has answered. So has the end of a wait for a server.
    """
    out_of_time = bool(error.timeout) and remaining_s() == 0.0
    if not isinstance(error, OperationFailure):
        return Failure(command, out_of_time=out_of_time)
    labels = frozenset((error.details or {}).get("errorLabels", ()))
    # A code of our own making stands for an error that PyMongo gave none: it is no network's.
    code = -1 if error.code is None else error.code
    return Failure(command, code, labels, wire_version, out_of_time)
