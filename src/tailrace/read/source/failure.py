"""What went wrong between us and a deployment: wait and try again, or report it to the operator in one sentence."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

from pymongo import MongoClient
from pymongo.errors import (
    ConfigurationError,
    ConnectionFailure,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)
from pymongo.server_description import ServerDescription

from tailrace.errors import RESUMABLE_LABEL, SourceError
from tailrace.read.source.driver_error import as_driver_error
from tailrace.read.source.time_limit import remaining_s, time_limit_exceeded
from tailrace.read.source.uri import redact_uri

#: Codes after which the same read may work again: the retryable-reads and change-stream lists of the drivers'
#: specifications, a lost cursor (43, 136, 237), and what a member says while it starts, elects or rolls back.
#: 136 is here because the fresh look at the oplog decides whether anything was lost.
TRANSIENT_CODES: Final = frozenset(
    {6, 7, 43, 50, 63, 89, 91, 112, 133, 134, 136, 150, 175, 189, 202, 211, 234, 237, 246, 262, 384}
    | {9001, 10058, 10107, 11600, 11601, 11602, 13435, 13436}
)
#: How often who waits looks whether it is still to wait.
_LOOK_S: Final = 0.2
_KILLED: Final = (237, 11601)
_AUTHENTICATION_FAILED: Final = 18
_UNAUTHORIZED: Final = 13
_MAJORITY_OFF: Final = 148

#: What a user needs, by database and by collection or command (``None``: any other); built-in roles as measured on
#: mongod 6.0.27, 5.0.4 and 4.4.2.
_RIGHTS: Final[dict[tuple[str, str | None], tuple[str, str]]] = {
    ("local", None): (
        "the oplog (local.oplog.rs)",
        "Grant it the role read on the database local (the roles clusterMonitor, backup and root hold that too)",
    ),
    ("local", "system.replset"): (
        "the replica set's id (local.system.replset), which tells replica sets of one name apart in a checkpoint",
        "Grant it the role clusterMonitor, or find on this collection: read on local does not reach it",
    ),
    ("config", "system.preimages"): (
        "pre-images (config.system.preimages)",
        "Of the built-in roles only root may: make one with db.adminCommand({createRole: 'readPreImages', roles: [], "
        "privileges: [{resource: {db: 'config', collection: 'system.preimages'}, actions: ['find']}]}) and grant it",
    ),
    ("config", None): (
        "what the config server knows of the cluster ({collection})",
        "Grant it the role read on the database config there (the roles clusterMonitor and backup hold that too)",
    ),
    ("admin", "shardingState"): (
        "where the config server is (shardingState)",
        "Grant it the role clusterMonitor on each shard, or name the config server in the connection URI",
    ),
    ("admin", "tailraceStreams"): (
        "the streams that others have open",
        "The action inprog on the cluster suffices, and shows no document: db.adminCommand({createRole: 'seeStreams', "
        "roles: [], privileges: [{resource: {cluster: true}, actions: ['inprog']}]}), and grant that role",
    ),
    ("admin", "getShardMap"): (
        "where the config server is (getShardMap)",
        "Grant it the role clusterMonitor, or name the config server in the connection URI",
    ),
}
_REFUSED = re.compile(
    r"not authorized on (?P<database>\S+) to execute command \{ (?P<command>\w+): (?:\"(?P<collection>[^\"]*))?"
)


def is_transient(error: PyMongoError) -> bool:
    """Whether the same read may work later: a cut connection, an election, a cursor that went with its member."""
    if isinstance(error, OperationFailure):
        return error.code in TRANSIENT_CODES
    return isinstance(error, ConnectionFailure)


def is_killed(error: PyMongoError) -> TypeGuard[OperationFailure]:
    """Whether another client has ended the operation: by ``killCursors``, by ``killOp``, or with its session. A stream
    that waits for the operation ends then; one that does not has only lost a cursor and opens another."""
    return isinstance(error, OperationFailure) and error.code in _KILLED


def source_error(error: PyMongoError, client: MongoClient[Any]) -> SourceError:
    """The one sentence for an error of the driver. No secret of the connection string is in it. If the same read may
    work later, it has the label that makes a driver resume."""
    if error.timeout and (remaining_s() is not None or client.options.timeout is not None):
        return time_limit_exceeded(seed_names(client))
    failure = _described(error, client)
    if is_transient(error):
        failure.labels |= {RESUMABLE_LABEL}
    as_driver_error(failure, error)
    return failure


def _described(error: PyMongoError, client: MongoClient[Any]) -> SourceError:
    if isinstance(error, OperationFailure):
        return _from_command(error, client)
    if isinstance(error, ServerSelectionTimeoutError):
        return _from_selection(client)
    if isinstance(error, ConfigurationError):
        return SourceError(f"the connection cannot be made: {_first_clause(error)}")
    return SourceError(f"reading from {seed_names(client)} failed: {_first_clause(error)}")


def _from_command(error: OperationFailure, client: MongoClient[Any]) -> SourceError:
    where = seed_names(client)
    text = str((error.details or {}).get("errmsg") or _first_clause(error))
    if error.code == _AUTHENTICATION_FAILED:
        return SourceError(
            f"{where} refused the user or the password",
            code=error.code,
            hint="Check both, and authSource, the database that holds the user (often admin)",
        )
    if error.code == _UNAUTHORIZED:
        if "requires authentication" in text:
            return SourceError(
                f"{where} asks for a user and a password", code=error.code, hint="Put them into the connection URI"
            )
        return _not_authorized(text, where)
    if error.code == _MAJORITY_OFF:
        return SourceError(
            f"{where} runs without majority read concern",
            code=error.code,
            hint='Start it with enableMajorityReadConcern on, or use engine="server" (--engine server), which works',
        )
    return SourceError(f"{where} answered: {redact_uri(text)}", code=error.code)


def _not_authorized(text: str, where: str) -> SourceError:
    # The whole command, which the server repeats, would fill a page.
    refused = _REFUSED.match(text)
    if refused is None:
        return SourceError(f"this user is {redact_uri(text.partition(' {')[0])} at {where}", code=_UNAUTHORIZED)
    database, collection = refused["database"], refused["collection"] or refused["command"]
    if text.startswith("UUID(", refused.end()):
        return SourceError(
            f"this user may not read a collection of the database {database} of {where} by its UUID",
            code=_UNAUTHORIZED,
            hint=f"Grant it the role read on {database}, and the action useUUID (clusterMonitor and backup hold it)",
        )
    what, hint = (
        _RIGHTS.get((database, collection))
        or _RIGHTS.get((database, None))
        or (f"the database {database}", f"Grant it the role read on {database}")
    )
    what = what.format(collection=f"{database}.{collection}")
    return SourceError(f"this user may not read {what} of {where}", code=_UNAUTHORIZED, hint=hint)


def _from_selection(client: MongoClient[Any]) -> SourceError:
    servers = client.topology_description.server_descriptions()
    name = client.topology_description.replica_set_name
    hint = "Check the host, the port, the network and that mongod is running"
    readable = [server for server in servers.values() if server.is_readable]
    wanted_tags = [dict(tags) for tags in getattr(client.read_preference, "tag_sets", ())]
    has_them = any(tags.items() <= dict(server.tags).items() for server in readable for tags in wanted_tags)
    if readable and wanted_tags and not has_them:
        named = " or ".join(",".join(f"{name}:{value}" for name, value in tags.items()) for tags in wanted_tags)
        return SourceError(
            f"no member has the tags {named} that the connection URI asks for ({describe_members(client)})",
            hint="Check readPreferenceTags: rs.conf().members[n].tags are those of each member",
        )
    if readable:
        who = f"replica set {name}" if name else "the deployment"
        return SourceError(
            f"{who} has no member that can be read now ({describe_members(client)})",
            hint="Wait for the election, or start the other members",
        )
    wanted = client.options.replica_set_name
    if not servers and wanted:
        # The driver forgets a server that answers under another set's name.
        return SourceError(
            f"no server of the connection URI belongs to a replica set named {wanted}",
            hint="Check replicaSet in the URI: rs.status().set is the name",
        )
    return SourceError(f"cannot reach {describe_members(client) or 'any server'}", hint=hint)


def describe_members(client: MongoClient[Any]) -> str:
    """The members that the driver knows, and how each is, in words: what a reader waits for."""
    servers: Mapping[tuple[str, int | None], ServerDescription] = client.topology_description.server_descriptions()
    return ", ".join(f"{server_name(address)}: {_condition(server)}" for address, server in sorted(servers.items()))


def seed_names(client: MongoClient[Any]) -> str:
    """The replica set's name or else the addresses, for the start of a sentence."""
    topology = client.topology_description
    if topology.replica_set_name:
        return f"replica set {topology.replica_set_name}"
    return ", ".join(server_name(address) for address in sorted(topology.server_descriptions())) or "the server"


def server_name(address: tuple[str, int | None]) -> str:
    """A server's address as people write it."""
    host, port = address
    return host if port is None else f"{host}:{port}"


def _condition(server: ServerDescription) -> str:
    if server.error is not None:
        return reason_of(server.error)
    if server.server_type_name == "Unknown":
        return "no answer so far"
    return server.server_type_name.removeprefix("RS").lower()


#: What the driver says about a reply that is none: PyMongo takes the first bytes for a header.
_NO_REPLY: Final = ("Got response id", "Message length (", "Got opcode", "Unknown opcode")


def reason_of(error: Exception) -> str:
    """Why a server did not answer, in few words."""
    text = str(error)
    for known, words in (
        *((said, "a program other than MongoDB answers there") for said in _NO_REPLY),
        ("Connection refused", "connection refused"),
        ("Name or service not known", "unknown host name"),
        ("nodename nor servname", "unknown host name"),
        ("Temporary failure in name resolution", "unknown host name"),
        ("No address associated", "unknown host name"),
        ("timed out", "no answer in time"),
        ("connection closed", "connection closed"),
        ("record layer failure", "this server speaks without TLS (tls=true)"),
        ("WRONG_VERSION_NUMBER", "this server speaks without TLS (tls=true)"),
        ("UNEXPECTED_EOF_WHILE_READING", "the TLS handshake was cut off: a server without TLS? (tls=true)"),
        ("EOF occurred in violation of protocol", "the TLS handshake was cut off: a server without TLS? (tls=true)"),
        ("CERTIFICATE_VERIFY_FAILED", "its TLS certificate cannot be verified (tlsCAFile)"),
        ("SSL", "TLS handshake failed"),
    ):
        if known in text:
            return words
    return _first_clause(error)


def short_reason(error: PyMongoError) -> str:
    """What the server or the driver says, in few words: a server that refuses a command repeats all of it, and PyMongo
    appends the whole reply. No secret of the connection string is in it."""
    text = _first_clause(error)
    refused = _REFUSED.match(text)
    return text if refused is None else f"not authorized on {refused['database']} to execute {refused['command']}"


def _first_clause(error: Exception) -> str:
    text = redact_uri(str(error)).partition(", full error:")[0].partition(", Timeout:")[0]
    return text.partition(" (configured timeouts")[0].rstrip(".") or type(error).__name__


class Backoff:
    """Waiting between tries: doubling, at most ``wait_s_max``, half of it random so that readers do not all come at
    once.

    ``give_up_s`` bounds the time without any progress; ``None`` waits for ever.
    """

    def __init__(self, *, give_up_s: float | None, wait_s_min: float = 0.05, wait_s_max: float = 5.0) -> None:
        self._give_up_s = give_up_s
        self._wait_s_min = wait_s_min
        self._wait_s_max = wait_s_max
        self.progress()

    def progress(self) -> None:
        """Something came: the next failure starts from the shortest wait."""
        self._wait_s = self._wait_s_min
        self._since: float | None = None

    @property
    def exhausted(self) -> bool:
        """Whether the time without progress, counted from the first failure, is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return self._give_up_s is not None and now - self._since >= self._give_up_s

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait; not much longer than until ``stopped``."""
        left_s = remaining_s()
        wait_s = self._wait_s * random.uniform(0.5, 1.0)
        end = time.monotonic() + (wait_s if left_s is None else min(wait_s, left_s))
        while (left := end - time.monotonic()) > 0 and not stopped():
            time.sleep(min(left, _LOOK_S))
        self._wait_s = min(self._wait_s * 2, self._wait_s_max)
