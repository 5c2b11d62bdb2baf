"""A sharded cluster of real mongods on this machine, for tests, demos and trials."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

from pymongo.errors import OperationFailure

from tailrace.embedded.binary import find_mongod
from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.in_a_block import StartedInBlock
from tailrace.embedded.replica_set import ReplicaSet
from tailrace.embedded.sharding.connections import CONFIG, MAJORITY, Connections
from tailrace.embedded.sharding.dialect import Dialect
from tailrace.embedded.sharding.router import Router
from tailrace.errors import UsageError

#: A range that was given away is deleted at once, not after a quarter of an hour: only then can it come back.
_SHARD_PARAMETERS: Final[Mapping[str, object]] = {"orphanCleanupDelaySecs": 0}
_NOT_YET = frozenset({6, 89, 91, 134, 189, 211, 10107, 11600, 11602, 13435})
_STEP_S = 0.05
#: In the directory of a replica set that is no longer a shard of the cluster.
_REMOVED: Final = "removed"
#: A replica set that gets the name of a removed shard has this and a number after its own name: the other members
#: remember for a while where the former replica set of that name was.
_AGAIN: Final = "~"


class ShardedCluster(StartedInBlock):
    """A config server and shards, each a replica set, ready for a ``with`` block and gone when it is left.

    There is no mongos: ``router`` does what tests need from one, and ``uri`` is that of the config server's replica
    set, which ``tailrace.connect`` takes. Shards are called ``shard0``, ``shard1`` and so on. ``members`` is the number
    of members of each shard, one number for all or one each; ``config_members`` that of the config server. ``version``,
    ``mongod``, ``data_dir``, ``parameters`` (of every member), ``enable_test_commands``, ``oplog_size_mb`` and
    ``root_password`` are as for ``ReplicaSet``. An idle primary writes a no-op every ``noop_interval_s`` seconds, as
    the server does by default. The balancer is off: chunks move when the router moves them. Raises EmbeddedError if the
    machine cannot do it.
    """

    def __init__(
        self,
        shards: int = 2,
        *,
        members: int | Sequence[int] = 1,
        config_members: int = 1,
        version: str | None = None,
        mongod: str | os.PathLike[str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        root_password: str | None = None,
        noop_interval_s: int = 10,
        parameters: Mapping[str, object] | None = None,
        enable_test_commands: bool = False,
        oplog_size_mb: int | None = 128,
        cache_gb: float = 0.25,
        election_timeout_ms: int = 2000,
    ) -> None:
        sizes = [members] * shards if isinstance(members, int) else list(members)
        if shards < 1 or len(sizes) != shards:
            raise UsageError(
                f"A cluster has at least one shard, each with its number of members, not {shards} and {len(sizes)}"
            )
        self.binary = find_mongod(version, mongod=mongod)
        self.version = self.binary.version
        self._temporary = data_dir is None
        self.data_dir = (
            Path(data_dir).absolute() if data_dir is not None else Path(tempfile.mkdtemp(prefix="tailrace-cluster-"))
        )
        self._parameters = {"periodicNoopIntervalSecs": noop_interval_s, **(parameters or {})}
        self._options: dict[str, Any] = {
            "mongod": self.binary.path,
            "enable_test_commands": enable_test_commands,
            "oplog_size_mb": oplog_size_mb,
            "cache_gb": cache_gb,
            "election_timeout_ms": election_timeout_ms,
            "root_password": root_password,
            "temporary_root": self.data_dir if self._temporary else None,
        }
        key = None
        if root_password is not None:
            key = self._key()
            self._options["key_file"] = self.data_dir / "key"
        self.config = self._replica_set(CONFIG, config_members, "configsvr")
        self._shards: dict[str, ReplicaSet] = {}
        for number, size in enumerate(sizes):
            self._shards[f"shard{number}"] = self._replica_set(f"shard{number}", size, "shardsvr")
        #: Replica sets that were shards; they run until they or the cluster are closed.
        self._removed: list[ReplicaSet] = []
        for directory, name in self._kept_shards():
            size = len((directory / "ports").read_text().split())
            self._shards[name] = self._replica_set(name, size, "shardsvr", directory)
        self._connections = Connections(lambda: {CONFIG: self.config, **self._shards}, key=key)
        major, minor = self.version.split(".")[:2]
        #: Does what a mongos would: see ``tailrace.embedded.sharding.Router``.
        self.router = Router(self._connections, Dialect((int(major), int(minor))))

    @property
    def uri(self) -> str:
        """The URI of the config server's replica set."""
        return self.config.uri

    @property
    def shards(self) -> dict[str, ReplicaSet]:
        """The shards by name, in the order they were added."""
        return dict(self._shards)

    def start(self, *, timeout_s: float = 300.0) -> None:
        """Start every member at once, make them one cluster, and wait until it accepts writes. Raises EmbeddedError."""
        parts = [self.config, *self._shards.values()]
        with ThreadPoolExecutor(len(parts)) as pool:
            for started in [pool.submit(part.start, timeout_s=timeout_s) for part in parts]:
                started.result()
        try:
            known = {found["_id"] for found in self._connections.find(CONFIG, "config.shards", {})}
            for name in self._shards:
                if name not in known:
                    self._register(name, timeout_s)
            self._ask_config({"_configsvrBalancerStop": 1}, timeout_s)
        except OperationFailure as error:
            raise EmbeddedError(f"The config server did not accept a shard: {error}") from error

    def add_shard(self, name: str | None = None, *, members: int = 1, timeout_s: float = 300.0) -> str:
        """Start another shard and add it to the cluster. Returns its name. The name of a removed shard may be used
        again, for another replica set."""
        chosen = name or next(free for free in map("shard{}".format, range(10_000)) if free not in self._shards)
        if chosen in self._shards or chosen == CONFIG:
            raise UsageError(f"There is a shard {chosen} already")
        added = self._replica_set(chosen, members, "shardsvr", self._free_directory(chosen))
        self._shards[chosen] = added
        try:
            added.start(timeout_s=timeout_s)
            self._register(chosen, timeout_s)
        except OperationFailure as error:
            raise EmbeddedError(f"The config server did not accept the shard {chosen}: {error}") from error
        return chosen

    def remove_shard(self, name: str, *, timeout_s: float = 300.0) -> ReplicaSet:
        """Move a shard's chunks and databases to the other shards and take it out of the cluster, as an operator does.

        Returns its replica set, which still runs: ``close`` it, or leave it to the end of the cluster. Raises
        EmbeddedError if the config server does not release it.
        """
        removed = self._part(name)
        others = [other for other in self._shards if other != name]
        if name == CONFIG or not others:
            raise UsageError(f"{name} cannot be removed", hint="A cluster keeps its config server and one shard")
        command = {"_configsvrRemoveShard": name, "writeConcern": MAJORITY}
        deadline = time.monotonic() + timeout_s
        try:
            while (reply := self._connections.run_again(CONFIG, "admin", command))["state"] != "completed":
                if time.monotonic() > deadline:
                    raise EmbeddedError(f"The shard {name} is not drained: {reply.get('remaining')}")
                self.router.drain(name, others)
        except OperationFailure as error:
            raise EmbeddedError(f"The config server did not remove the shard {name}: {error}") from error
        (removed.data_dir / _REMOVED).touch()
        self._removed.append(self._shards.pop(name))
        self._connections.forget(name)
        return removed

    def kill(self, shard: str, member: int | None = None) -> int:
        """SIGKILL a member of a shard, by default its primary. Returns its number. It stays dead until ``restart``."""
        return self._part(shard).kill(member)

    def restart(self, shard: str, member: int = 0, *, timeout_s: float = 300.0) -> None:
        """Start a member that was killed, as ``ReplicaSet.restart``."""
        self._part(shard).restart(member, timeout_s=timeout_s)

    def step_down(self, shard: str, *, timeout_s: float = 300.0) -> int:
        """Give a shard another primary, as ``ReplicaSet.step_down``. Returns its number."""
        return self._part(shard).step_down(timeout_s=timeout_s)

    def close(self) -> None:
        """Stop every member, and remove the data directory when it is temporary. It may be called again."""
        self._connections.close()
        parts = [
            *self._removed,
            *self._shards.values(),
            self.config,
        ]  # a shard that stops last waits for the config server
        with ThreadPoolExecutor(len(parts)) as pool:
            for closed in [pool.submit(part.close) for part in parts]:
                closed.result()
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    # --- inside ---

    def _replica_set(
        self, name: str, members: int, role: Literal["configsvr", "shardsvr"], directory: Path | None = None
    ) -> ReplicaSet:
        series = tuple(map(int, self.version.split(".")[:2]))
        settings: dict[str, object] = {}
        if role == "shardsvr":
            settings |= _SHARD_PARAMETERS
            if self.binary.wine is not None:  # with more threads most reshardings end the process
                settings["reshardingRecipientServiceMaxThreadCount"] = 1
            if series == (
                5,
                0,
            ):  # elsewhere a commit is answered when every shard has carried it out: our reads count on it
                settings["coordinateCommitReturnImmediatelyAfterPersistingDecision"] = False
        elif series >= (5, 0):
            settings["reshardingMinimumOperationDurationMillis"] = 0
        directory = directory or self.data_dir / name
        return ReplicaSet(
            members,
            name=directory.name,
            role=role,
            data_dir=directory,
            parameters=settings | self._parameters,
            **self._options,
        )

    def _kept_shards(self) -> list[tuple[Path, str]]:
        """Shards that were added to the cluster which a kept data directory holds: each one's directory and name."""
        kept = sorted(path.parent for path in self.data_dir.glob("*/ports"))
        named = [(path, path.name.partition(_AGAIN)[0]) for path in kept if not (path / _REMOVED).exists()]
        return [(path, name) for path, name in named if name != CONFIG and path.name not in self._shards]

    def _free_directory(self, name: str) -> Path:
        numbered = (self.data_dir / f"{name}{_AGAIN}{number}" for number in range(1, 10_000))
        return next(path for path in (self.data_dir / name, *numbered) if not path.exists())

    def _key(self) -> str:
        """The secret by which the members recognise each other; it is kept with the data."""
        path = self.data_dir / "key"
        if not path.exists():
            self.data_dir.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
        return path.read_text()

    def _register(self, name: str, timeout_s: float) -> None:
        hosts = ",".join(member.host for member in self._shards[name].members)
        command = {"_configsvrAddShard": f"{self._shards[name].name}/{hosts}", "name": name, "writeConcern": MAJORITY}
        self._ask_config(command, timeout_s)

    def _ask_config(self, command: Mapping[str, object], timeout_s: float) -> None:
        """A config server that has just become primary is not ready for everything at once."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._connections.run_again(CONFIG, "admin", command, timeout_s=timeout_s)
            except OperationFailure as error:
                if error.code not in _NOT_YET or time.monotonic() > deadline:
                    raise
                time.sleep(_STEP_S)
            else:
                return

    def _part(self, name: str) -> ReplicaSet:
        if name == CONFIG:
            return self.config
        if name not in self._shards:
            raise UsageError(f"There is no shard {name}: they are {', '.join(self._shards)}")
        return self._shards[name]
