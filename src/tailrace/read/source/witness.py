"""Which deployment it is, and whether its history is still the one that a store was read from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.errors import OtherHistoryError, SourceError, on_shard
from tailrace.read.source.connection import Connection
from tailrace.read.source.failure import is_transient
from tailrace.read.source.live import LiveSource
from tailrace.read.source.membership import changes
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster

#: A member that was elected just now, or a secondary, may not have the entry yet that the store was read up to.
_CATCH_UP_S: Final = 30.0
_LOOK_S: Final = 0.2
_UNAUTHORIZED: Final = 13

_T = TypeVar("_T")


def identity_of(deployment: MongoClient[Any] | Cluster, *, waits: bool = True) -> DeploymentIdentity:
    """The identity of a replica set, or of a cluster by its config server; of a cluster that was given as a list of
    shards, that of its shards. Raises SourceError where it cannot be read. ``waits``: as of ``Connection``."""
    if isinstance(deployment, Cluster):
        if deployment.config is None:
            clients = {one.name: deployment.client(one.name) for one in deployment.shards()}
            sets = {name: replica_set_id(Connection(client, waits=waits)) for name, client in clients.items()}
            return DeploymentIdentity(sets)
        return DeploymentIdentity({}, cluster_id(Connection(deployment.config, waits=waits)))
    connection = Connection(deployment, waits=waits)
    return DeploymentIdentity({connection.name: replica_set_id(connection)})


def oplogs_of(deployment: MongoClient[Any] | Cluster) -> dict[str, MongodSource]:
    """A source of each oplog, by its name as a witness has it: the replica set's, or the shards'."""
    if isinstance(deployment, Cluster):
        return {one.name: MongodSource(deployment.client(one.name)) for one in deployment.shards()}
    return {(source := MongodSource(deployment)).name: source}


def compared_oplogs(
    deployment: MongoClient[Any] | Cluster, marks: Mapping[str, EntryMark], oplogs: Mapping[str, LiveSource]
) -> dict[str, LiveSource]:
    """Those of ``oplogs`` that the marks can be of. A shard that was added after its mark is another one: the name was
    that of a shard that has been removed."""
    found = {name: source for name, source in oplogs.items() if name in marks}
    if not found or not isinstance(deployment, Cluster) or deployment.config is None:
        return found
    config, first = Connection(deployment.config), min(marks[name].time for name in found)
    added = {one.name: one.time for one in _if_allowed(partial(changes, config, first)) or () if one.host is not None}
    return {name: source for name, source in found.items() if added.get(name, ZERO) <= marks[name].time}


def witness_of(deployment: MongoClient[Any] | Cluster, oplogs: Mapping[str, LiveSource]) -> Witness:
    """Who the deployment is, and the newest entry of each oplog that a majority has committed. Where the user may not
    read an id or an oplog, that is left out."""
    return Witness(identity_if_allowed(deployment), newest_marks(oplogs))


def newest_marks(oplogs: Mapping[str, LiveSource]) -> dict[str, EntryMark]:
    """``newest_mark`` of each oplog that the user may read."""
    found = {name: _if_allowed(partial(newest_mark, source)) for name, source in oplogs.items()}
    return {name: mark for name, mark in found.items() if mark is not None}


def newest_mark(source: LiveSource) -> EntryMark | None:
    """The newest entry that a majority has committed; ``None`` where it has left the oplog just now."""
    newest = source.newest()
    entry = source.entries([newest])[0]
    return None if entry is None else EntryMark.of(newest, entry)


def identity_if_allowed(deployment: MongoClient[Any] | Cluster, *, waits: bool = True) -> DeploymentIdentity:
    """``identity_of``, without what the user may not read: ids that are not known are not compared."""
    found = _if_allowed(partial(identity_of, deployment, waits=waits))
    if found is not None:
        return found
    return DeploymentIdentity({} if isinstance(deployment, Cluster) else {Connection(deployment).name: ""})


def _if_allowed(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except SourceError as error:
        if error.code != _UNAUTHORIZED:
            raise
        return None


def replica_set_id(connection: Connection) -> str:
    """``settings.replicaSetId`` in hexadecimal; ``""`` where the server does not tell. It tells replica sets of the
    same name apart, and lies next to the oplog, where the user must be able to read anyhow."""
    read = connection.client["local"]["system.replset"].find_one
    config = connection.retrying(lambda: read({}, {"settings.replicaSetId": 1})) or {}
    return str(config.get("settings", {}).get("replicaSetId", ""))


def cluster_id(config: Connection) -> str:
    """``clusterId`` of the config server that ``config`` leads to; ``""`` where the user may not read it."""
    version = config.client["config"]["version"]

    def read() -> str:
        try:
            document = version.find_one({}, {"clusterId": 1})
        except OperationFailure as error:
            if is_transient(error):
                raise
            return ""
        return "" if document is None else str(document.get("clusterId", ""))

    return config.retrying(read)


def check_witness(
    witness: Witness,
    identity: DeploymentIdentity,
    oplogs: Mapping[str, LiveSource],
    *,
    what: str,
    hint: str,
    asked: Callable[[Callable[[str], None], Iterable[str]], Iterable[object]] = map,
) -> None:
    """Raise OtherHistoryError where ``what`` ("the tables in DIR") were not read from the history that is there now.

    ``what``    in the plural: the message goes on with "were read"
    ``oplogs``  the deployment's oplogs by name, as in the witness; one that is not there any more is not compared
    ``hint``    what to do then
    ``asked``   ``map``, or that of an executor, which asks all oplogs at once

    An entry that has left its oplog cannot be compared: whether the oplog still reaches back to the position is asked
    by the reader that continues (error 286).
    """
    difference = witness.identity.difference(identity)
    if difference is not None:
        raise OtherHistoryError(f"{what} were read from another deployment: {difference}", hint=hint)

    def check(name: str) -> None:
        try:
            _check_entry(witness.entries[name], oplogs[name], what, hint)
        except OtherHistoryError as error:
            raise (error if len(witness.entries) == 1 else on_shard(error, name)) from None

    for _ in asked(check, [name for name in witness.entries if name in oplogs]):
        pass


def _check_entry(mark: EntryMark, source: LiveSource, what: str, hint: str) -> None:
    newest = _reached(mark.time, source)
    if newest < mark.time:
        raise OtherHistoryError(
            f"{what} were read up to {mark.time}, and the oplog of {source.name} ends at {newest}: it is another "
            "deployment's, or was restored from an older backup",
            hint=hint,
        )
    found = source.entries([mark.time])[0]
    if found is not None:
        if EntryMark.of(mark.time, found) == mark:
            return
        raise OtherHistoryError(
            f"{what} were read from another history: the oplog of {source.name} has another entry at {mark.time} now",
            hint=hint,
        )
    oldest, complete = source.oldest()
    # An oplog that is complete from its first entry on would hold it too, were it the same.
    if complete or oldest <= mark.time:
        raise OtherHistoryError(
            f"{what} were read from another history: the oplog of {source.name} has no entry at {mark.time}, up to "
            "which they were read",
            hint=hint,
        )


def _reached(at: ClusterTime, source: LiveSource) -> ClusterTime:
    """The time of the newest entry, once the member that is read has come as far as ``at``; if it does not come so far,
    after a while."""
    given_up = time.monotonic() + _CATCH_UP_S
    while (newest := source.newest()) < at and time.monotonic() < given_up:
        time.sleep(_LOOK_S)
    return newest
