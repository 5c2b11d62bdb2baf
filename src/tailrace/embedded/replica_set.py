"""A replica set of real mongods on this machine, for tests, demos and trials."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote_plus

import pymongo
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded.binary import find_mongod
from tailrace.embedded.errors import EmbeddedError
from tailrace.embedded.in_a_block import StartedInBlock
from tailrace.embedded.mongod import Mongod
from tailrace.embedded.ports import LOOPBACK, port_becomes_free
from tailrace.errors import UsageError

MEMBERS_MAX = 7  # the server's limit of voting members
ALREADY_INITIALIZED = 23
_STEP_S = 0.05
_PORT_FREED_S = 10.0
T = TypeVar("T")
_PRIMARY, _SECONDARY = 1, 2  # member states


class ReplicaSet(StartedInBlock):
    """A replica set that accepts writes as soon as the ``with`` block is entered, and is gone when it is left.

    Members are numbered from 0. ``version``, which ``upgrade`` changes for one member, is one of
    ``tailrace.embedded.VERSIONS`` or of a mongod that ``find_mongod`` finds. With a ``data_dir`` the data are kept, and
    the next ReplicaSet on that directory continues with them on the same ports. ``parameters`` are passed to
    ``--setParameter`` of every member, ``arguments`` to its command line. Elections are fast: they begin
    ``election_timeout_ms`` after a primary falls silent. With a ``root_password`` the server requires authentication,
    and ``uri`` holds the user ``root``. Raises EmbeddedError if the machine cannot do it.

    ``role`` makes it a part of a sharded cluster: ``configsvr`` or ``shardsvr``. Its parts then share one ``key_file``,
    and ``temporary_root`` is the cluster's own temporary directory around ``data_dir``, which the cluster removes.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        version: str | None = None,
        mongod: str | os.PathLike[str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        name: str = "rs0",
        parameters: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        enable_test_commands: bool = False,
        oplog_size_mb: int | None = None,
        cache_gb: float = 0.25,
        election_timeout_ms: int = 2000,
        root_password: str | None = None,
        role: Literal["configsvr", "shardsvr"] | None = None,
        key_file: Path | None = None,
        temporary_root: Path | None = None,
    ) -> None:
        if not 1 <= members <= MEMBERS_MAX:
            raise UsageError(f"A replica set has 1 to {MEMBERS_MAX} members, not {members}")
        self.binary = find_mongod(version, mongod=mongod)
        self.version = self.binary.version
        self.name = name
        self.temporary = data_dir is None
        self.data_dir = (
            Path(data_dir).absolute() if data_dir is not None else Path(tempfile.mkdtemp(prefix="tailrace-"))
        )
        self._election_timeout_ms = election_timeout_ms
        self._clients: dict[int, pymongo.MongoClient[dict[str, Any]]] = {}
        self._root_password = root_password
        self._role = role
        ports = self._remembered_ports(members)
        self._initiated = self._initiated_file.exists()
        if root_password is not None:
            arguments = [*arguments, "--keyFile", str(key_file or self._key_file())]
        if role is not None:
            arguments = [*arguments, f"--{role}"]
        settings: dict[str, object] = {}
        if not self.version.startswith("4."):
            # A primary that is asked to stop waits 15 s for the others to catch up; here they are quick. (New in 5.0.)
            settings["shutdownTimeoutMillisForSignaledShutdown"] = 1000
        self._members = [
            Mongod(
                self.binary,
                replica_set=name,
                data_dir=self.data_dir / f"member{number}",
                port=ports[number],
                parameters=settings | dict(parameters or {}),
                arguments=arguments,
                enable_test_commands=enable_test_commands,
                oplog_size_mb=oplog_size_mb,
                cache_gb=cache_gb,
            )
            for number in range(members)
        ]
        for member in self._members:
            member.temporary = self.data_dir if self.temporary else temporary_root

    @property
    def uri(self) -> str:
        """The URI of the replica set, every member named."""
        hosts = ",".join(member.host for member in self._members)
        user = "" if self._root_password is None else f"root:{quote_plus(self._root_password)}@"
        return f"mongodb://{user}{hosts}/?replicaSet={self.name}"

    @property
    def members(self) -> list[Mongod]:
        """The members' servers: ``.host``, ``.uri`` of one member alone, ``.pid``, ``.log_path``, ``.is_running``."""
        return list(self._members)

    @property
    def primary(self) -> int:
        """The number of the member that accepts writes. Waits for an election: for 300 s, then EmbeddedError."""
        return self._await(self._find_primary, "has no primary", timeout_s=300.0)

    def start(self, *, timeout_s: float = 300.0) -> None:
        """Start every member; make them a replica set the first time; wait until writes are accepted and every member
        has the data. Raises EmbeddedError."""
        with ThreadPoolExecutor(len(self._members)) as pool:  # all at once: each waits for its server
            for started in [pool.submit(self._start_member, *one) for one in enumerate(self._members)]:
                started.result()
        if not self._initiated:
            self._initiate()
        self.wait_until_ready(timeout_s=timeout_s)

    def kill(self, member: int | None = None) -> int:
        """SIGKILL a member, by default the primary. Returns its number. It stays dead until ``restart``."""
        number = self.primary if member is None else self._checked(member)
        self._disconnect(number)
        self._members[number].kill()
        return number

    def stop(self, member: int | None = None) -> int:
        """Shut a member down cleanly, by default the primary. Returns its number."""
        number = self.primary if member is None else self._checked(member)
        self._disconnect(number)
        self._members[number].stop()
        return number

    def restart(self, member: int, *, timeout_s: float = 300.0) -> None:
        """Start a member that was killed or stopped (one that runs is stopped first) on the same data and port, and
        wait until the replica set is whole again, as far as its members run."""
        number = self._checked(member)
        if self._members[number].is_running:
            self.stop(number)
        self._start_member(number, self._members[number])
        if self._has_majority():
            self.wait_until_ready(timeout_s=timeout_s)

    def upgrade(self, member: int, version: str, *, timeout_s: float = 300.0) -> None:
        """Let a member run another server version from now on, on its data and port: it is stopped cleanly and started
        again, and this waits for the replica set. If it is the primary, ``step_down`` first. The members' versions must
        fit each other and the data as MongoDB demands: from one major version to the next, ``set_compatibility`` at the
        end. Raises EmbeddedError."""
        number = self._checked(member)
        binary = find_mongod(version)
        if self._members[number].is_running:
            self.stop(number)
        self._members[number].binary = binary
        self.restart(number, timeout_s=timeout_s)

    def set_compatibility(self, version: str, *, timeout_s: float = 300.0) -> None:
        """Set the feature compatibility version, such as "7.0": every member must run that version. Raises
        EmbeddedError."""
        command: dict[str, Any] = {"setFeatureCompatibilityVersion": version}
        if int(self._members[self.primary].binary.version.partition(".")[0]) >= 7:
            command["confirm"] = True

        def done() -> bool:
            self._client(self.primary).admin.command(command)
            return True

        self._await(done, f"did not accept the feature compatibility version {version}", timeout_s=timeout_s)

    def step_down(self, *, seconds: int = 5, timeout_s: float = 300.0) -> int:
        """Make the primary step down for ``seconds`` (2 or more), and wait until there is a primary again: another one
        if there is another member. Returns its number.

        A write that meets the step-down can fail with 189 (PrimarySteppedDown) in ``writeErrors``, which PyMongo does
        not retry on its own; a write concern can fail with 11602.
        """
        alone = sum(member.is_running for member in self._members) == 1
        command: dict[str, Any] = {"replSetStepDown": seconds, "secondaryCatchUpPeriodSecs": seconds - 1}
        if alone:
            command = {"replSetStepDown": 1, "secondaryCatchUpPeriodSecs": 0, "force": True}
        deadline = time.monotonic() + timeout_s
        first, term = self._await(self._primary_and_term, "has no primary", timeout_s=timeout_s)

        def successor() -> int | None:
            primary = self._primary_and_term()
            if primary is None:
                return None
            number, now = primary
            if now > term and (alone or number != first):
                return number
            # Nothing happened yet, or the same member won again, since the others did not stand in time.
            self._client(number).admin.command(command)
            return None

        number = self._await(successor, "did not change its primary", timeout_s=timeout_s)
        self.wait_until_ready(timeout_s=max(1.0, deadline - time.monotonic()))
        return number

    def wait_until_ready(self, *, timeout_s: float = 300.0) -> None:
        """Wait until there is a primary whose writes become majority-committed, and every member that runs follows."""
        self._await(self._ready, "did not become ready", timeout_s=timeout_s)

    def close(self) -> None:
        """Stop every member, and remove the data directory when it is temporary. It may be called again."""
        for number in list(self._clients):
            self._disconnect(number)
        for member in self._members:
            if member.temporary is None:
                member.request_stop()  # all at once: they take a second or two each
        for member in self._members:
            member.close()
        if self.temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    # --- inside ---

    def _remembered_ports(self, members: int) -> list[int | None]:
        """The ports of the replica set that a kept data directory holds: its configuration names them."""
        kept = self.data_dir / "ports"
        if not kept.exists():
            return [None] * members
        ports = [int(word) for word in kept.read_text().split()]
        if len(ports) != members:
            raise UsageError(f"{self.data_dir} holds a replica set of {len(ports)} members, not {members}")
        for port in ports:
            # A mongod that was just killed gives up its port with its last thread, a little after it is seen dead.
            if not port_becomes_free(port, timeout_s=_PORT_FREED_S):
                raise EmbeddedError(f"Port {port} of the replica set in {self.data_dir} is in use")
        return list(ports)

    def _start_member(self, number: int, member: Mongod) -> None:
        self._disconnect(number)
        member.start()

    def _initiate(self) -> None:
        # The ports are kept before, so that a start that is cut short here uses the same ones next time.
        (self.data_dir / "ports").write_text(" ".join(str(member.port) for member in self._members) + "\n")
        config: dict[str, Any] = {
            "_id": self.name,
            "version": 1,
            "members": [{"_id": number, "host": member.host} for number, member in enumerate(self._members)],
            "settings": {
                "electionTimeoutMillis": self._election_timeout_ms,
                "heartbeatIntervalMillis": min(500, self._election_timeout_ms // 2),
            },
        }
        if self._role == "configsvr":
            config["configsvr"] = True
        try:
            self._client(0).admin.command("replSetInitiate", config)
        except PyMongoError as error:
            if not (isinstance(error, OperationFailure) and error.code == ALREADY_INITIALIZED):
                raise EmbeddedError(f"The replica set was not accepted by mongod: {error}") from error
        if self._root_password is not None:
            self._create_root(self._root_password)
        self._initiated_file.touch()
        self._initiated = True
        for number in list(self._clients):  # they know no password yet
            self._disconnect(number)

    @property
    def _initiated_file(self) -> Path:
        return self.data_dir / "initiated"

    def _key_file(self) -> Path:
        """The secret by which members recognise each other."""
        path = self.data_dir / "key"
        if not path.exists():
            self.data_dir.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
        return path

    def _create_root(self, password: str) -> None:
        """The first user may be created without authentication, over the loopback address."""
        number = self.primary
        roles = [{"role": "root", "db": "admin"}]
        try:
            self._client(number).admin.command("createUser", "root", pwd=password, roles=roles)
        except PyMongoError as error:
            raise EmbeddedError(f"The user root was not accepted by mongod: {error}") from error

    def _client(self, number: int) -> pymongo.MongoClient[dict[str, Any]]:
        if number not in self._clients:
            known = self._root_password is not None and self._initiated
            self._clients[number] = pymongo.MongoClient(
                LOOPBACK,
                self._members[number].port,
                directConnection=True,
                username="root" if known else None,
                password=self._root_password if known else None,
                serverSelectionTimeoutMS=2000,
                socketTimeoutMS=30_000,
                appname="tailrace.embedded",
            )
        return self._clients[number]

    def _disconnect(self, number: int) -> None:
        client = self._clients.pop(number, None)
        if client is not None:
            client.close()

    def _checked(self, member: int) -> int:
        if not 0 <= member < len(self._members):
            raise UsageError(f"There is no member {member}: they are 0 to {len(self._members) - 1}")
        return member

    def _has_majority(self) -> bool:
        return sum(member.is_running for member in self._members) * 2 > len(self._members)

    def _find_primary(self) -> int | None:
        for number, member in enumerate(self._members):
            if member.is_running and self._client(number).admin.command("hello").get("isWritablePrimary"):
                return number
        return None

    def _primary_and_term(self) -> tuple[int, int] | None:
        number = self._find_primary()
        if number is None:
            return None
        return number, int(self._client(number).admin.command("replSetGetStatus")["term"])

    def _ready(self) -> bool | None:
        number = self._find_primary()
        if number is None:
            return None
        status = self._client(number).admin.command("replSetGetStatus")
        for member in status["members"]:
            if self._members[member["_id"]].is_running and member["state"] not in (_PRIMARY, _SECONDARY):
                return None
        # The first majority-committed entry of the new term: majority reads are at the primary's own writes by then.
        committed = status["optimes"].get("readConcernMajorityOpTime")
        return True if committed and committed["t"] == status["term"] else None

    def _await(self, look: Callable[[], T | None], failing: str, *, timeout_s: float) -> T:
        """Ask ``look`` until it gives something. A member that is down or electing makes it fail or give ``None``."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(PyMongoError):
                found = look()
                if found is not None:
                    return found
            if time.monotonic() > deadline:
                down = {number: member for number, member in enumerate(self._members) if not member.is_running}
                reason = "".join(
                    f"; member {number} is not running ({one.last_words()})" for number, one in down.items()
                )
                raise EmbeddedError(f"The replica set {self.name} {failing} within {timeout_s:g} s{reason}")
            time.sleep(_STEP_S)
