"""The moment at which the target takes the source's place: no further write reaches the source, and that is proven.

From outside, nobody can know who is still writing. So the proof is the source's own oplog: after a no-op of ours, which
only a primary writes and a majority has, there is no entry of a synced collection. From 6.0 on,
``setUserWriteBlockMode`` refuses the writers first; on older servers the operator stops them, and if a write comes
nevertheless, the oplog shows it and the cut-over is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry
from tailrace.errors import SourceError, TailraceError, UsageError
from tailrace.read.source.failure import source_error
from tailrace.read.source.listing import shown_name
from tailrace.read.window.oplogs import Oplogs

#: Servers know the mode from this version on.
BLOCKS_SINCE: Final = (6, 0)
_UNAUTHORIZED: Final = 13
#: What a server says that does not know the mode, or whose feature compatibility version does not.
_WITHOUT_MODE: Final = (20, 59)
_BLOCKED: Final = 371
_MODE_BLOCKED: Final = 2
_COMMAND: Final = "db.adminCommand({setUserWriteBlockMode: 1, global: false})"
_UNBLOCK: Final = (
    f"Run {_COMMAND} on the source, as a user with the role clusterManager: until then no application can write there"
)
_ALLOW: Final = f"Run {_COMMAND} on the target, as a user with the role clusterManager (`reverse --unblock` does that)"
#: A primary that cannot reach a majority for this long has stepped down, or soon will.
_CONFIRMED_MS: Final = 30_000
#: What is written there is no change of a synced collection.
_SERVERS_OWN: Final = ("admin", "config", "local")
#: Commands that change nothing.
_HARMLESS: Final = frozenset((b"abortTransaction", b"startIndexBuild", b"abortIndexBuild"))
_NAMED_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class CutOver:
    """What a cut-over came to.

    Attributes:
        time: the source's last moment: the target equals it
        at: the target's time at which it became equal: where ``reverse`` begins
        blocked: whether the source refuses writes now
        seconds: from the moment at which the source took no more writes to the one at which the target does
        verified: how many documents were compared at the end
    """

    time: ClusterTime
    at: ClusterTime
    blocked: bool
    seconds: float
    verified: int
    restored: int

    def to_json(self) -> dict[str, Any]:
        return {
            "time": f"{self.time.seconds},{self.time.increment}",
            "at": f"{self.at.seconds},{self.at.increment}",
            "sourceBlocked": self.blocked,
            "seconds": round(self.seconds, 2),
            "documentsVerified": self.verified,
            "indexesRestored": self.restored,
        }


def block_writes(client: MongoClient[Any], version: str) -> bool:
    """Let the source refuse its users' writes. Whether it does: not before 6.0. Raises SourceError where the user may
    not say so: nobody has stopped the writers then."""
    if _numbers(version) < BLOCKS_SINCE:
        return False
    try:
        client.admin.command({"setUserWriteBlockMode": 1, "global": True})
    except PyMongoError as error:
        raise SourceError(
            f"the source's writes cannot be blocked: {_said(error)}",
            code=error.code if isinstance(error, OperationFailure) else None,
            hint="Grant the source's user the action setUserWriteBlockMode (the role clusterManager has it); or stop "
            "all writers and give --writers-stopped (block=False)",
        ) from error
    return True


def allow_writes(client: MongoClient[Any], version: str) -> None:
    """Let a deployment take its users' writes again. Raises SourceError where it cannot be made to."""
    if _numbers(version) < BLOCKS_SINCE:
        return
    try:
        client.admin.command({"setUserWriteBlockMode": 1, "global": False})
    except PyMongoError as error:
        code = error.code if isinstance(error, OperationFailure) else None
        if code in _WITHOUT_MODE:
            return
        raise SourceError(
            f"the source still refuses its users' writes, and cannot be made to accept them: {_said(error)}",
            code=code,
            hint=_UNBLOCK,
        ) from error


@contextmanager
def blocked_writes(
    client: MongoClient[Any], version: str, *, wanted: bool, stays: Callable[[], bool]
) -> Iterator[bool]:
    """Block the source's writes; where the block ends with an error, allow them again unless ``stays`` says that they
    must stay blocked. Whether they are blocked."""
    blocked = wanted and block_writes(client, version)
    try:
        yield blocked
    except BaseException as error:
        if not blocked or stays():
            raise
        try:
            allow_writes(client, version)
        except SourceError as unblocking:
            before = error.message if isinstance(error, TailraceError) else str(error) or type(error).__name__
            raise SourceError(f"{before}; and {unblocking.message}", code=unblocking.code, hint=_UNBLOCK) from error
        raise


def refuse_blocked(target: MongoClient[Any]) -> None:
    """Raise UsageError if the target refuses its users' writes, as a former source does: after the cut-over nobody
    could write. Where the user may not see that, nothing is refused."""
    try:
        mode = target.admin.command({"serverStatus": 1}).get("repl", {}).get("userWriteBlockMode")
    except PyMongoError:
        return
    if mode == _MODE_BLOCKED:
        raise UsageError("the target refuses its users' writes, so it cannot take the source's place", hint=_ALLOW)


@contextmanager
def refused_writes_told() -> Iterator[None]:
    """Say what to do where a deployment refuses our own writes too."""
    try:
        yield
    except TailraceError as error:
        if error.code != _BLOCKED:
            raise
        raise UsageError(
            "the former source refuses its users' writes, including this user's",
            hint="Grant the role restore, whose bypassWriteBlockingMode lets it write; or use --unblock (unblock=True)",
        ) from error


def check_primaries(clients: Sequence[MongoClient[Any]]) -> None:
    """Raise UsageError if a client leads to a member that is no primary: it may be late, and then its last write is not
    the last."""
    for client in clients:
        try:
            hello = client.admin.command("hello")
        except PyMongoError as error:
            raise source_error(error, client) from error
        if not hello.get("isWritablePrimary"):
            raise UsageError(
                f"the source's member {hello.get('me', '')} is not a primary: it does not know which write is the last",
                hint="Name the replica set in SOURCE (?replicaSet=NAME, without directConnection)",
            )


def confirm_primaries(clients: Sequence[MongoClient[Any]], namespace: str) -> None:
    """Let each primary prove that it is one now: what was acknowledged before is in its oplog. A linearizable read, for
    which the server has a majority take over a no-op; a primary that another one has replaced cannot do that. It takes
    no right but that of reading ``namespace``, which need not exist. Raises SourceError."""
    database, _, name = namespace.partition(".")
    read = {"find": name, "filter": {}, "limit": 1, "projection": {"_id": 1}, "readConcern": {"level": "linearizable"}}
    for client in clients:
        try:
            client[database].command({**read, "maxTimeMS": _CONFIRMED_MS})
        except PyMongoError as error:
            if isinstance(error, OperationFailure) and error.code == _UNAUTHORIZED:
                raise source_error(error, client) from error
            raise SourceError(
                f"the source's primary cannot prove that it is one: {_said(error)}",
                code=error.code if isinstance(error, OperationFailure) else None,
                hint="Try again when a majority of the source's members is there: the sync goes on meanwhile",
            ) from error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _said(error: PyMongoError) -> str:
    details = getattr(error, "details", None)  # of a NotPrimaryError too
    return str(details.get("errmsg", error)) if isinstance(details, dict) else str(error)


def written(
    oplogs: Oplogs, after: ClusterTime, until: ClusterTime, has: Callable[[str], bool], *, own: str = ""
) -> set[str]:
    """The synced collections that the oplogs have changes of, after a time: their names; a command by its database.
    ``own``: the database of the sync's own state."""
    found: set[str] = set()
    position = after
    while position < until:
        window = oplogs.window(position, at_once=True, at_least=until)
        if window is None:
            break
        for run, places in window.in_order():
            start = run.rows.start
            for place in places:
                for entry in run.member.operations(run.raw[int(start[place]) : int(start[place + 1])]):
                    found |= changed(entry, has, own=own)
        position = window.until
    return found


def changed(entry: OplogEntry, has: Callable[[str], bool], *, own: str = "") -> set[str]:
    """What an entry changes of what is synced: a collection, or a database for a command."""
    if entry.operation == "n" or entry.from_migrate:
        return set()
    namespace = entry.namespace.decode("utf-8", "surrogateescape")
    database, _, name = namespace.partition(".")
    if database in (*_SERVERS_OWN, own):
        return set()
    if entry.operation == "c":
        harmless = not _HARMLESS.isdisjoint(entry.command_fields())
        return set() if harmless else {database}
    return {namespace} if has(namespace) or name == "system.views" else set()


def refuse_written(names: Iterable[str], doing: str) -> None:
    """Raise UsageError if somebody still writes to the source."""
    named = ", ".join(map(shown_name, sorted(names)[:_NAMED_MAX]))
    if named:
        raise UsageError(
            f"{doing}: somebody wrote to the source after its writers should have stopped ({named})",
            hint="Stop what writes there, and try again: the sync goes on meanwhile",
        )
