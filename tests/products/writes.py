"""What is written meanwhile, on a replica set: the core's workload, and writes that matter to products rather than to
events."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import bson
from pymongo import MongoClient
from pymongo.auth_shared import _build_credentials_tuple
from pymongo.errors import PyMongoError
from pymongo.synchronous.auth import _authenticate_scram
from pymongo.uri_parser import parse_uri

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tests.consumer.ordeal_view import acting_on
from tests.differential import native
from tests.differential.execute import Executed, clear, note, run_operation
from tests.differential.wire import CommandError, Wire
from tests.differential.workload import Command, Operation, Workload
from tests.products import own_writes
from tests.products.own_writes import EXPIRING, OwnWrites
from tests.products.truth import Truth, time_of
from tests.tables.equality import collections

ROOT_PASSWORD: Final = "r00t-s3cret"
#: The time-out of the harness's own connections: a server that hangs ends the run.
PATIENCE: Final[dict[str, Any]] = {"socketTimeoutMS": 300_000}
#: Only the harness itself writes to these collections.
OUTBOX, ORDERS = "outbox", "orders"
_NOT_WRITTEN: Final = frozenset({"long description"})


def authenticated(uri: str) -> Wire:
    """A connection to the first host, as the user that the address names."""
    parsed = parse_uri(uri)
    host, port = parsed["nodelist"][0]
    wire = Wire(host, port or 27017)
    if parsed["username"]:
        credentials = _build_credentials_tuple(
            "SCRAM-SHA-256", "admin", parsed["username"], parsed["password"], {}, "admin"
        )
        _authenticate_scram(credentials, _Dialogue(wire), "SCRAM-SHA-256")  # type: ignore[arg-type]
    return wire


class _Dialogue:
    """The parts of PyMongo's connection that a login needs."""

    auth_ctx = None

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def command(self, database: str, command: Any, **_: Any) -> dict[str, Any]:
        return bson.decode(self._wire.run(database, command).raw)


class ReplicaSetWrites:
    """The writes of one seed. ``run`` carries out some of them, ``pause`` records the truth about what is there then.

    ``followers``: whether collections for views, messages and listeners are written to as well.
    """

    def __init__(self, deployment: ReplicaSet, seed: int, count: int, *, unique_names: bool, salt: int = 0) -> None:
        self.deployment = deployment
        self.version = deployment.version
        self.workload = Workload(seed, self.version, unique_names=unique_names)
        if salt:  # the same names with other documents
            self.workload._rng.seed(f"tailrace workload {seed} {salt}")
        self.databases = (*self.workload.databases, f"fuzz{seed}s")
        self.own = self.databases[-1]
        #: Writes here become views, messages and effects, which change with them, so this is not compared as any
        #: product's truth.
        self.followed = f"fuzz{seed}v"
        self.moved: tuple[str, ...] = ()
        self.resharded: tuple[str, ...] = ()
        #: Where positions and effects are kept, if elsewhere.
        self.leases = ""
        self._rng = random.Random(f"tailrace products {seed + salt}")
        self._operations = self.workload.operations(count)
        self._client: MongoClient[Any] = MongoClient(deployment.uri, **PATIENCE)
        self._wire = authenticated(self._primary_uri())
        #: The URI of a hidden member, from which products read now and then; empty if there is none.
        self.hidden_uri = _hidden(deployment)
        self.clear()
        # Documents that expire by themselves might vanish between a pause and the reading of what is there.
        self._expired = bool(self._wire.run("admin", {"setParameter": 1, "ttlMonitorEnabled": False})["was"])
        self.start = note(self._wire, "workload begins")
        self._recorded = self.start
        self.done = Executed(self.start, self.start)
        self._unique_names = unique_names
        unreadable = 0.0 if salt else own_writes.UNREADABLE
        self._mine = OwnWrites(
            self.own, f"{seed} {salt}", self.version, unreadable=unreadable, unique_names=unique_names
        )
        self.eventless, self.unlogged = self._mine.eventless, self._mine.unlogged
        self._beside = acting_on(self._client[self.followed])
        self._beside_rng = random.Random(f"tailrace beside {seed + salt}")

    def close(self) -> None:
        """Close the connections."""
        self._set(ttlMonitorEnabled=self._expired)
        self._wire.close()
        self._client.close()

    def clear(self) -> None:
        """Drop what was written, and the user with few rights."""
        for name in (*self.databases, self.followed, f"{self.followed}_leases"):
            self._wire.run(name, {"dropDatabase": 1})
        clear(self._wire, self.workload)
        with suppress(CommandError):  # it was never made
            self._wire.run("admin", {"dropUser": _partial(self.workload.seed)})

    def _primary_uri(self) -> str:
        members = self.deployment.members
        host = members[self.deployment.primary].host
        return self.deployment.uri.replace(",".join(one.host for one in members), host)

    # -- writing ----------------------------------------------------------------------------------------------------

    def run(self, count: int) -> None:
        """Carry out the next operations of the workload, mixed with some of the harness's own."""
        self._mine.begin_round(self._send, self._wire.exchange)
        for operation in self._next(count):
            if operation.kind not in _NOT_WRITTEN:
                self._run(operation)
            self._mine.write(self._send)
            if self._rng.random() < 0.3:
                self._beside(self._beside_rng)
                self._message()

    def write_more(self) -> None:
        """Write a little, whatever was written so far."""
        self._mine.begin_round(self._send, self._wire.exchange)
        for _ in range(20):
            self._mine.write(self._send)
            self._message()

    def _run(self, operation: Operation) -> None:
        commands = tuple(_as_events(command, self.version) for command in operation.commands)
        self.done.ends.append(run_operation(self._wire, replace(operation, commands=commands), self.done))

    def _next(self, count: int) -> Iterator[Operation]:
        for _ in range(count):
            operation = next(self._operations, None)
            if operation is None:
                return
            yield operation

    def _send(self, command: dict[str, Any]) -> None:
        database = str(command.pop("$db", self.own))
        with suppress(CommandError):
            self._wire.run(database, command)

    def _message(self) -> None:
        """An order and the message about it, in one transaction; some are aborted."""
        rng = self._beside_rng
        with suppress(PyMongoError), self._client.start_session() as session, session.start_transaction():
            database = self._client[self.followed]
            number = rng.randrange(12)
            database[ORDERS].update_one({"_id": number}, {"$inc": {"n": 1}}, upsert=True, session=session)
            payload = {"n": rng.randrange(1000)}
            letter = {"_id": rng.getrandbits(60), "topic": "orders", "key": str(number), "payload": payload}
            database[OUTBOX].insert_one(letter, session=session)
            if rng.random() < 0.2:
                raise PyMongoError("given up")

    def expire(self) -> None:
        """Documents that the server removes by itself when they expire, if it checks for them often."""
        if self._wire.run("admin", {"getParameter": 1, "ttlMonitorSleepSecs": 1})["ttlMonitorSleepSecs"] > 1:
            return
        for command in self._mine.expiring():
            self._wire.run(self.own, command)
        self._set(ttlMonitorEnabled=True)
        deadline = time.monotonic() + 120
        while self._client[self.own][EXPIRING].count_documents({}) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._set(ttlMonitorEnabled=False)

    def _set(self, **parameters: Any) -> None:
        self._wire.run("admin", {"setParameter": 1, **parameters})

    def disturb(self, rng: random.Random) -> str | None:
        """If there are other members, let one of them become primary, or let the primary lose writes that no other
        member has. Returns what was done, if anything."""
        if len(self.deployment.members) == 1 or rng.random() < 0.5:
            return None
        done = "rollback" if rng.random() < 0.5 else "step-down"
        if done == "rollback":
            self._roll_back()
        else:
            self.deployment.step_down()
        self._wire.close()
        self._wire = authenticated(self._primary_uri())
        return done

    def _roll_back(self) -> None:
        """Writes that only the primary has are gone when it comes back: the others do not replicate meanwhile."""
        first = self.deployment.primary
        root = f"root:{ROOT_PASSWORD}@" if "root:" in self.deployment.uri else ""
        others = [one for number, one in enumerate(self.deployment.members) if number != first]
        uris = [f"mongodb://{root}{one.host}/?directConnection=true" for one in others]
        for uri in uris:
            _fail_point(uri, "alwaysOn")
        with authenticated(self._primary_uri()) as wire:
            lost = {"insert": "c0", "documents": [{"_id": "rolled back"}], "writeConcern": {"w": 1}}
            wire.run(self.databases[0], lost)
        self.deployment.kill(first)
        for uri in uris:
            _fail_point(uri, "off")
        self.deployment.wait_until_ready()
        self.deployment.restart(first)

    # -- an older copy ----------------------------------------------------------------------------------------------

    @property
    def can_be_restored(self) -> bool:
        """Whether the deployment is one member, which can be stopped and copied."""
        return len(self.deployment.members) == 1

    def back_up(self, folder: Path) -> None:
        """Copy all data as it is now."""
        with self._stopped():
            shutil.copytree(self.deployment.data_dir, folder)

    @contextmanager
    def restored(self, folder: Path, pause: ClusterTime) -> Iterator[None]:
        """Inside the block the deployment is what it was when it was copied, at ``pause``."""
        data, newer = self.deployment.data_dir, folder.with_name("newer")
        with self._stopped():
            shutil.move(data, newer)
            shutil.move(folder, data)
        recorded, self._recorded = self._recorded, pause
        try:
            yield
        finally:
            self._recorded = recorded
            with self._stopped():
                shutil.rmtree(data)
                shutil.move(newer, data)

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        self._wire.close()
        self.deployment.stop(0)
        yield
        self.deployment.restart(0)
        self._wire = authenticated(self._primary_uri())
        while "operationTime" not in self._wire.run("admin", {"ping": 1}):
            time.sleep(0.05)  # it gives none until it has read the keys with which it signs cluster times
        self._set(ttlMonitorEnabled=False)

    def write_otherwise(self, count: int) -> None:
        """Carry out other writes than ``run`` does, to the same names."""
        other = Workload(self.workload.seed, self.version, unique_names=self._unique_names)
        other._rng.seed(f"tailrace workload {self.workload.seed} restored")
        for operation in other.operations(count):
            if operation.kind not in _NOT_WRITTEN:
                self._run(operation)
            self._beside(self._beside_rng)
            self._message()

    # -- the truth --------------------------------------------------------------------------------------------------

    def pause(self, truth: Truth) -> ClusterTime:
        """Record what is there now. Raises ServerFailed where the server's own stream cannot be read."""
        time = note(self._wire, "workload pauses")
        if self.hidden_uri:
            _wait_for(self.hidden_uri, time)
        found = collections(self._client, self.databases)
        since = self._recorded.tick()
        stage: dict[str, Any] = {"startAtOperationTime": since.to_timestamp()}
        events = self._read(stage, time)
        imaged = []
        if int(self.version.partition(".")[0]) >= 6:
            available = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}
            imaged = self._read({**stage, **available}, time)
        truth.record(time, found, events, imaged)
        self._recorded = time
        return time

    def _read(self, stage: dict[str, Any], until: ClusterTime) -> list[bytes]:
        database, command = native.aggregate(("admin", None), stage)
        found = native.read(self._wire, database, command, until)
        if found.error is not None:
            raise ServerFailed(f"the server's own stream: {found.error}")
        return [event for event in found.events if time_of(event) <= until]

    def partial_uri(self) -> str | None:
        """The address with the name of a user who may read the oplog and one of the databases; ``None`` where the
        server knows no users."""
        if f"root:{ROOT_PASSWORD}@" not in self.deployment.uri:
            return None
        return with_partial_rights(self.deployment.uri, self.workload.seed, self.databases[0])


def with_partial_rights(uri: str, seed: int, database: str) -> str:
    """The address with the name of a new user of this replica set, who may read its oplog and that database."""
    roles = [{"role": "read", "db": name} for name in ("local", "config", database)]
    name = _partial(seed)
    with MongoClient[Any](uri) as client, suppress(PyMongoError):  # it is there already
        client.admin.command("createUser", name, pwd=name, roles=roles)
    return uri.replace(f"root:{ROOT_PASSWORD}@", f"{name}:{name}@") + "&authSource=admin"


def _partial(seed: int) -> str:
    return f"partial{seed}"


def _hidden(deployment: ReplicaSet) -> str:
    for member in deployment.members if len(deployment.members) > 1 else ():
        uri = f"mongodb://{member.host}/?directConnection=true"
        with MongoClient[Any](uri) as client:
            if client.admin.command("hello").get("hidden"):
                root = f"root:{ROOT_PASSWORD}@" if "root:" in deployment.uri else ""
                return uri.replace("mongodb://", f"mongodb://{root}")
    return ""


def _wait_for(uri: str, until: ClusterTime) -> None:
    """Wait until a member knows that everything written up to a time is committed."""
    deadline = time.monotonic() + 120
    with MongoClient[Any](uri, **PATIENCE) as client:
        while True:
            known = client.admin.command("replSetGetStatus")["optimes"]["lastCommittedOpTime"]["ts"]
            if ClusterTime.from_timestamp(known) >= until:
                return
            assert time.monotonic() < deadline, "the hidden member stays behind"
            time.sleep(0.05)


def _fail_point(uri: str, mode: str) -> None:
    with MongoClient[Any](uri) as client:
        client.admin.command("configureFailPoint", "stopReplProducer", mode=mode)


class ServerFailed(Exception):  # noqa: N818 - as in the products
    """The server's own stream failed: there is nothing to compare with."""


def _as_events(command: Command, version: str) -> Command:
    """Writes that the products can follow: an atomic applyOps changes documents without an event (before 8.0), and 4.4
    removes documents from capped collections without an entry in the oplog."""
    document = command.document
    if "applyOps" in document:
        document = {**document, "allowAtomic": False}
    if document.get("viewOn") and str(document.get("create", "")).startswith("again"):
        # A look-up that finds a view in place of its collection ends the server's streams too (6.0).
        return Command("admin", {"appendOplogNote": 1, "data": {"left out": "a view"}})
    if version.startswith("4.") and "convertToCapped" in document:
        document = {"appendOplogNote": 1, "data": {"left out": "capped"}}
        return Command("admin", document)
    if version.startswith("4.") and document.get("capped"):
        document = {name: value for name, value in document.items() if name not in ("capped", "size", "max")}
    return Command(command.database, document)
