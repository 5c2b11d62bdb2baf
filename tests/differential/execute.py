"""Runs a workload's operations against a server and counts what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.differential.wire import CommandError, Wire
from tests.differential.workload import PREPARE_TIMESTAMP, Command, Operation, Workload

_NAMESPACE_NOT_FOUND = 26


@dataclass
class Executed:
    """The cluster times before the first operation and after the last one, the end of each operation, and the
    refusals."""

    start: ClusterTime
    end: ClusterTime
    ends: list[ClusterTime] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def operation_at(self, time: ClusterTime) -> int:
        """The number of the operation that wrote the oplog entry at ``time``."""
        for number, end in enumerate(self.ends):
            if time <= end:
                return number
        return len(self.ends)


def note(wire: Wire, text: str) -> ClusterTime:
    """Write a no-op into the oplog, majority-committed on return; its time."""
    command = {"appendOplogNote": 1, "data": {"msg": text}, "writeConcern": {"w": "majority"}}
    return ClusterTime.from_timestamp(wire.run("admin", command)["operationTime"])


def clear(wire: Wire, workload: Workload) -> None:
    """Drop what an earlier run of the same seed left."""
    for database in workload.databases:
        wire.run(database, {"dropDatabase": 1})
    try:
        wire.run("config", {"drop": workload.settings})
    except CommandError as error:
        if error.code != _NAMESPACE_NOT_FOUND:
            raise


def execute(wire: Wire, workload: Workload, count: int) -> Executed:
    """Run the first ``count`` operations. Server errors are counted; anything else is raised."""
    clear(wire, workload)
    start = note(wire, "workload begins")
    done = Executed(start, start)
    for operation in workload.operations(count):
        done.kinds[operation.kind] += 1
        done.ends.append(run_operation(wire, operation, done))
    done.end = note(wire, "workload ends")
    return done


def run_operation(wire: Wire, operation: Operation, done: Executed) -> ClusterTime:
    """Run the commands of one operation, and return when it ended. Refusals are counted in ``done``."""
    prepared: Timestamp | None = None
    end = done.ends[-1] if done.ends else done.start
    for command in operation.commands:
        if command.document.get("commitTimestamp") == PREPARE_TIMESTAMP:
            if prepared is None:
                break
            command = Command(command.database, {**command.document, "commitTimestamp": prepared})  # noqa: PLW2901
        reply = _send(wire, command, operation, done)
        if reply is None and operation.cleanup:
            break
        if reply is not None:
            prepared = reply.get("prepareTimestamp", prepared)
            end = max(end, ClusterTime.from_timestamp(reply["operationTime"]))
    else:
        return end
    for command in operation.cleanup:
        _send(wire, command, operation, done)
    return end


def _send(wire: Wire, command: Command, operation: Operation, done: Executed) -> RawBSONDocument | None:
    try:
        reply = wire.run(command.database, command.document)
    except CommandError as error:
        done.refused[f"{operation.kind}: {next(iter(command.document))}: {error.code}"] += 1
        return None
    for failed in reply.get("writeErrors", ()):
        done.refused[f"{operation.kind}: {next(iter(command.document))}: {failed['code']}"] += 1
    return reply
