"""A runner for the drivers' unified test files on change streams: just what those files need.

It knows neither whose client it drives nor whether calls are to be awaited: a ``Flavour`` makes the client, and every
result is awaited where it can be.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bson import json_util
from pymongo import MongoClient
from pymongo.errors import PyMongoError
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent
from pymongo.write_concern import WriteConcern

from tailrace.errors import TailraceError
from tests.spec.matching import difference

#: Looks until a document or an error has to be there.
_LOOKS_MAX = 60
_WATCH_ARGUMENTS = {
    "batchSize": "batch_size",
    "collation": "collation",
    "comment": "comment",
    "fullDocument": "full_document",
    "fullDocumentBeforeChange": "full_document_before_change",
    "maxAwaitTimeMS": "max_await_time_ms",
    "pipeline": "pipeline",
    "resumeAfter": "resume_after",
    "showExpandedEvents": "show_expanded_events",
    "startAfter": "start_after",
    "startAtOperationTime": "start_at_operation_time",
    "timeoutMS": "timeout_ms",
}


@dataclass(frozen=True)
class Flavour:
    """Whose streams are tested.

    ``connect``    makes a client; it takes ``event_listeners``
    ``opens_by``   the commands that open a stream and that resume one: a fail point that stops an aggregate stops these
    """

    name: str
    connect: Callable[..., Any]
    opens_by: tuple[str, str] = ("aggregate", "aggregate")


@dataclass(frozen=True)
class Case:
    """One test of one file."""

    file: str
    document: Mapping[str, Any]
    test: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.file}: {self.test['description']}"

    def runs_on(self, version: tuple[int, ...], topology: str) -> bool:
        return all(
            not requirements or any(_is_met(one, version, topology) for one in requirements)
            for requirements in (self.document.get("runOnRequirements"), self.test.get("runOnRequirements"))
        )


def cases_in(directory: Path, files: str = "*.json") -> list[Case]:
    """All cases of the files of that pattern in a directory."""
    found = []
    for path in sorted(directory.glob(files)):
        document = json_util.loads(path.read_text())
        found += [Case(path.stem, document, test) for test in document["tests"]]
    return found


def _is_met(requirement: Mapping[str, Any], version: tuple[int, ...], topology: str) -> bool:
    def parts(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    unknown = set(requirement) - {"minServerVersion", "maxServerVersion", "topologies", "serverless"}
    assert not unknown, unknown
    return parts(requirement.get("minServerVersion", "0")) <= version <= parts(
        requirement.get("maxServerVersion", "999")
    ) and topology in requirement.get("topologies", [topology])


class _Recorder(CommandListener):
    """Keeps the commands that a test asks for."""

    def __init__(self, kinds: list[str], ignored: list[str]) -> None:
        self.kinds = kinds
        self.ignored = {"configureFailPoint", *ignored}
        self.events: list[tuple[str, Any]] = []

    def _record(self, kind: str, event: Any) -> None:
        if kind in self.kinds and event.command_name not in self.ignored:
            self.events.append((kind, event))

    def started(self, event: CommandStartedEvent) -> None:
        self._record("commandStartedEvent", event)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        self._record("commandSucceededEvent", event)

    def failed(self, event: CommandFailedEvent) -> None:
        self._record("commandFailedEvent", event)


@dataclass
class Run:
    """One case being run."""

    flavour: Flavour
    case: Case
    entities: dict[str, Any] = field(default_factory=dict)
    clients: list[Any] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)
    recorders: dict[str, _Recorder] = field(default_factory=dict)

    async def all(self, admin: MongoClient[Any]) -> None:
        """Run the case on the deployment that ``admin`` leads to. Raises AssertionError where it is not met."""
        for data in self.case.document.get("initialData", ()):
            database = admin.get_database(data["databaseName"], write_concern=WriteConcern("majority"))
            database.drop_collection(data["collectionName"])
            database.create_collection(data["collectionName"])
            if data["documents"]:
                database[data["collectionName"]].insert_many(data["documents"])
        fail_points: list[str] = []
        try:
            for entity in self.case.document["createEntities"]:
                self._create(*next(iter(entity.items())))
            for operation in self.case.test["operations"]:
                if operation["name"] == "failPoint":
                    fail_points.append(operation["arguments"]["failPoint"]["configureFailPoint"])
                await self._perform(operation)
            for expected in self.case.test.get("expectEvents", ()):
                self._compare_events(expected)
        finally:
            for name in fail_points:
                admin.admin.command("configureFailPoint", name, mode="off")
            for open_one in [*self.streams, *self.clients]:
                await _awaited(open_one.close())

    def _create(self, kind: str, wanted: Mapping[str, Any]) -> None:
        name = wanted["id"]
        if kind == "client":
            listeners = []
            if "observeEvents" in wanted:
                recorder = _Recorder(wanted["observeEvents"], wanted.get("ignoreCommandMonitoringEvents", []))
                self.recorders[name] = recorder
                listeners.append(recorder)
            made = self.flavour.connect(event_listeners=listeners)
            self.clients.append(made)
        elif kind == "database":
            made = self.entities[wanted["client"]][wanted["databaseName"]]
        else:
            assert kind == "collection", kind
            made = self.entities[wanted["database"]][wanted["collectionName"]]
        self.entities[name] = made

    async def _perform(self, operation: Mapping[str, Any]) -> None:
        known = {"name", "object", "arguments", "expectResult", "expectError", "saveResultAsEntity"}
        assert not set(operation) - known, set(operation) - known
        perform = getattr(self, f"_do_{operation['name']}")
        error: Exception | None = None
        result: Any = None
        try:
            # A copy: PyMongo adds an _id to the documents that it inserts.
            result = await perform(operation["object"], copy.deepcopy(operation.get("arguments", {})))
        except (TailraceError, PyMongoError) as raised:
            error = raised
        if "expectError" in operation:
            assert error is not None, f"{operation['name']} gave {result!r} and no error"
            _compare_error(operation["expectError"], error)
            return
        if error is not None:
            raise error
        if "expectResult" in operation:
            wrong = difference(operation["expectResult"], result)
            assert wrong is None, f"{wrong}: {result!r}"
        if "saveResultAsEntity" in operation:
            self.entities[operation["saveResultAsEntity"]] = result

    async def _do_createChangeStream(self, name: str, arguments: dict[str, Any]) -> Any:  # noqa: N802
        parameters = {_WATCH_ARGUMENTS[argument]: value for argument, value in arguments.items()}
        stream = await _awaited(self.entities[name].watch(**parameters))
        self.streams.append(stream)
        return stream

    async def _do_iterateUntilDocumentOrError(self, name: str, arguments: dict[str, Any]) -> Any:  # noqa: N802
        stream = self.entities[name]
        for _ in range(_LOOKS_MAX):
            document = await _awaited(stream.try_next())
            if document is not None:
                return document
        raise AssertionError("neither a document nor an error came")

    async def _do_iterateOnce(self, name: str, arguments: dict[str, Any]) -> Any:  # noqa: N802
        return await _awaited(self.entities[name].try_next())

    async def _do_insertOne(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        await _awaited(self.entities[name].insert_one(arguments["document"]))

    async def _do_updateOne(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        await _awaited(self.entities[name].update_one(arguments["filter"], arguments["update"]))

    async def _do_replaceOne(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        await _awaited(self.entities[name].replace_one(arguments["filter"], arguments["replacement"]))

    async def _do_deleteOne(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        await _awaited(self.entities[name].delete_one(arguments["filter"]))

    async def _do_createCollection(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        collection = arguments.pop("collection")
        await _awaited(self.entities[name].create_collection(collection, **arguments))

    async def _do_dropCollection(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        await _awaited(self.entities[name].drop_collection(arguments["collection"]))

    async def _do_createIndex(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        await _awaited(self.entities[name].create_index(list(arguments["keys"].items()), name=arguments["name"]))

    async def _do_dropIndex(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        await _awaited(self.entities[name].drop_index(arguments["name"]))

    async def _do_rename(self, name: str, arguments: dict[str, Any]) -> None:
        await _awaited(self.entities[name].rename(arguments["to"], dropTarget=arguments.get("dropTarget", False)))

    async def _do_runCommand(self, name: str, arguments: dict[str, Any]) -> Any:  # noqa: N802
        return await _awaited(self.entities[name].command(arguments["command"]))

    async def _do_failPoint(self, name: str, arguments: dict[str, Any]) -> None:  # noqa: N802
        client = self.entities[arguments["client"]]
        data = arguments["failPoint"]["data"]
        if "failCommands" in data:
            stopped = data["failCommands"]
            opens_by = self.flavour.opens_by[bool(self.streams)]
            data["failCommands"] = [opens_by if name == "aggregate" else name for name in stopped]
        await _awaited(client.admin.command(arguments["failPoint"]))

    def _compare_events(self, expected: Mapping[str, Any]) -> None:
        found = self.recorders[expected["client"]].events
        wanted = expected["events"]
        if not expected.get("ignoreExtraEvents"):
            assert len(found) == len(wanted), [(kind, event.command_name) for kind, event in found]
        assert len(found) >= len(wanted), [(kind, event.command_name) for kind, event in found]
        for (kind, event), one in zip(found, wanted, strict=False):
            wanted_kind, details = next(iter(one.items()))
            assert kind == wanted_kind
            for attribute, name in (("command_name", "commandName"), ("database_name", "databaseName")):
                assert getattr(event, attribute) == details.get(name, getattr(event, attribute))
            wrong = difference(details.get("command", {}), event.command)
            assert wrong is None, f"{wrong}: {event.command!r}"


def _compare_error(expected: Mapping[str, Any], error: Exception) -> None:
    unknown = set(expected) - {"errorCode", "errorCodeName", "errorLabelsContain", "isClientError", "isTimeoutError"}
    assert not unknown, unknown
    # PyMongo's errors and ours say these in different words.
    details = getattr(error, "details", None) or {}
    if "errorCode" in expected:
        assert getattr(error, "code", None) == expected["errorCode"], repr(error)
    if "errorCodeName" in expected:
        assert expected["errorCodeName"] in (details.get("codeName"), getattr(error, "code_name", None)), repr(error)
    if "isTimeoutError" in expected:
        assert getattr(error, "timeout", False) == expected["isTimeoutError"], repr(error)
    if "isClientError" in expected:
        assert (getattr(error, "code", None) is None) == expected["isClientError"], repr(error)
    for label in expected.get("errorLabelsContain", ()):
        labels = {*details.get("errorLabels", ()), *getattr(error, "labels", ())}
        assert label in labels, repr(error)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def run(flavour: Flavour, case: Case, admin: MongoClient[Any]) -> None:
    """Run one case. Raises AssertionError, or the error that the case does not expect."""
    asyncio.run(Run(flavour, case).all(admin))
