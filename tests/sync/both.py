"""The two ends of a fuzzed sync: who writes to the source, and what both hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Final

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.products.cluster_writes import ClusterWrites
from tests.sync.equality import RAW, Held, differences, held
from tests.sync.workload import Kinds, Writes

STATE_DB: Final = "tailrace_sync"
_PARAMETERS: Final = {
    "maxNumberOfTransactionOperationsInSingleOplogEntry": 3,
    "diagnosticDataCollectionEnabled": False,
    "ttlMonitorSleepSecs": 1,
}


@contextmanager
def beside(write: Callable[[], object]) -> Iterator[None]:
    """Run ``write`` beside the body. The block ends after both, with an error of ``write`` if there is one."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def replica_set(version: str, members: int = 1) -> Iterator[ReplicaSet]:
    """An end of a fuzzed sync: transactions of many entries, and documents that expire at once where they may."""
    with ReplicaSet(
        members, version=version, parameters=_PARAMETERS, enable_test_commands=True, oplog_size_mb=2000
    ) as running:
        yield running


class ReplicaSetSource:
    """A replica set and a seed's writers. ``write`` waits for them; with ``writing`` they write beside the body."""

    def __init__(self, deployment: ReplicaSet, chosen: Any) -> None:
        self.uri, self.version = deployment.uri, deployment.version
        # A transaction of 24 MB hangs in a mongod 4.4.2 with a cache as small as that of an embedded one.
        large = chosen.large and not self.version.startswith("4.")
        kinds = Kinds(series=chosen.series, capped=chosen.capped, large=large, columns=chosen.columns)
        self._writes = Writes(deployment.uri, chosen.seed, deployment.version, kinds=kinds)
        self.databases = self._writes.databases
        self._writes.clear()
        with MongoClient[Any](deployment.uri) as client:  # left by the way back of an earlier seed
            client.drop_database(STATE_DB)

    @property
    def sent(self) -> int:
        return self._writes.sent

    def write(self, steps: int) -> None:
        self._writes.run(steps)

    def writing(self, steps: int) -> AbstractContextManager[None]:
        return beside(lambda: self.write(steps))

    def holds(self) -> dict[str, Held]:
        return held(self.uri, but=[STATE_DB], selected=is_users)

    def close(self) -> None:
        self._writes.clear()
        self._writes.close()


class ClusterSource:
    """A cluster whose chunks, primaries and shards move while it is written to."""

    def __init__(self, cluster: ShardedCluster, chosen: Any) -> None:
        self.uri, self.version = cluster.uri, cluster.version
        self._cluster = cluster
        self._writes = ClusterWrites(cluster, chosen.seed, chosen.rounds + 1)
        self.databases = self._writes.databases
        self.sent = 0

    def write(self, steps: int) -> None:
        self.sent += steps
        self._writes.run(steps)

    def writing(self, steps: int) -> AbstractContextManager[None]:
        return beside(lambda: self.write(steps))

    def holds(self) -> dict[str, Held]:
        """The shards' collections, each with the documents that a router shows, without what a migration left
        behind."""
        found: dict[str, Held] = {}
        router = self._cluster.router
        for shard in self._cluster.shards.values():
            for namespace, one in held(shard.uri, but=[STATE_DB], selected=is_users).items():
                shown = one.documents
                if namespace.partition(".")[0] != self._writes.own:
                    shown = tuple(bson.encode(document) for document in router.find(namespace))
                if namespace not in found or len(one.indexes) > len(found[namespace].indexes):
                    found[namespace] = Held(one.kind, one.options, one.uuid, one.id_index, one.indexes, shown)
        return found

    def close(self) -> None:
        self._writes.close()


def is_users(namespace: str) -> bool:
    """Whether a collection is neither the server's own nor one whose name is not UTF-8: a sync leaves these alone."""
    return not namespace.partition(".")[2].startswith("system.") and "\ufffd" not in namespace


class Both:
    """What the two ends hold. ``turned``: the former source follows the former target now."""

    def __init__(self, source: Any, target: ReplicaSet, options: Mapping[str, Any]) -> None:
        self._source, self._target = source, target
        self._renames: Mapping[str, str] = options.get("rename", {})
        self._excluded: tuple[str, ...] = tuple(options.get("excluded", ()))
        self.turned = False

    def on_target(self) -> list[str]:
        """The databases of that end, by their names there."""
        return [self._renames.get(one, one) for one in self._source.databases if not self._is_out(f"{one}.c0")]

    def differences(self, *, held: bool) -> tuple[list[str], int]:
        """How they differ, and how many documents were compared. ``held``: no document may expire where a sync writes,
        so its limits of age differ."""
        source = {name: one for name, one in self._source.holds().items() if not self._is_out(name)}
        target = _held(self._target.uri)
        if self.turned and self._excluded:
            target = {name: one for name, one in target.items() if not self._is_out(name)}
        known = normal(self._source.version, self._target.version, ages=not held)
        found = differences(source, target, renames=self._renames, known=known)
        return found, sum(len(one.documents) for one in source.values())

    def _is_out(self, namespace: str) -> bool:
        return any(fnmatchcase(namespace, pattern) for pattern in self._excluded)


def _held(uri: str) -> dict[str, Held]:
    return held(uri, but=[STATE_DB], selected=is_users)


def normal(version: str, to_version: str, *, ages: bool) -> Any:
    """What is compared of options and indexes: everything, except limits of age that are held, and except orders and
    types in which 4.4 need not agree with the target: a newer server sorts options and gives them types of its own, and
    4.4 itself does so when they are altered."""
    is_old, is_newer = version.startswith("4."), not to_version.startswith("4.")

    def normalised(kind: str, raw: bytes) -> bytes:
        if not raw:
            return raw
        fields = list(RawBSONDocument(raw, RAW).items())
        if not ages:
            fields = [(name, value) for name, value in fields if name != "expireAfterSeconds"]
        if kind == "index" and is_old:
            fields = sorted((name, _with_one_type(name, value, is_newer)) for name, value in fields)
        return bson.encode(dict(fields))

    return normalised


def _with_one_type(name: str, value: Any, is_newer: bool) -> Any:
    """An option of an index with the type that it gets from ``collMod``, or from servers since 5.0."""
    if name == "expireAfterSeconds":
        return int(value)
    if is_newer and name in ("unique", "sparse", "background", "hidden"):
        return bool(value)
    return float(value) if is_newer and name in ("min", "max") and isinstance(value, int) else value
