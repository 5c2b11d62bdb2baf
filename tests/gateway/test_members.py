"""Upstreams of every kind: a secondary, a set with an arbiter, a standalone; and clients that choose a member.

No test had tried any of these: in all of them the gateway's upstream was a primary, and the client asked for one. In
front of a secondary each new connection waited five seconds for a primary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pymongo
import pytest
from pymongo.errors import NotPrimaryError, OperationFailure, ServerSelectionTimeoutError

from tailrace.embedded import Mongod, find_mongod
from tailrace.errors import SourceError, TailraceError
from tailrace.watch.gateway import upstream
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.gateway.running import eventually

pytestmark = pytest.mark.mongod

NAME = "withArbiter"


class Members(NamedTuple):
    """Their hosts, and a URI of them all."""

    primary: str
    secondary: str
    arbiter: str

    @property
    def uri(self) -> str:
        return f"mongodb://{','.join(self)}/?replicaSet={NAME}"


@pytest.fixture(scope="module")
def members(server_version: str) -> Iterator[Members]:
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(Mongod(replica_set=NAME, binary=find_mongod(server_version))).host for _ in range(3)
        ]
        listed: list[dict[str, Any]] = [{"_id": number, "host": host} for number, host in enumerate(hosts)]
        listed[1]["priority"] = 0
        listed[2]["arbiterOnly"] = True
        first = stack.enter_context(pymongo.MongoClient[Any](hosts[0], directConnection=True))
        # A secondary learns of a majority's commits within half of the election timeout, which is 10 s unless
        # configured otherwise.
        settings = {"electionTimeoutMillis": 3000, "heartbeatIntervalMillis": 500}
        first.admin.command("replSetInitiate", {"_id": NAME, "members": listed, "settings": settings})

        def states() -> bool:
            found = [each["stateStr"] for each in first.admin.command("replSetGetStatus")["members"]]
            return found == ["PRIMARY", "SECONDARY", "ARBITER"]

        eventually(states, "no primary, secondary and arbiter")
        yield Members(*hosts)


def assert_watches(uri: str, members: Members) -> None:
    """A client at ``uri`` sees what is written at the primary, and the server can resume at its token."""
    with pymongo.MongoClient[Any](uri) as client, pymongo.MongoClient[Any](members.uri, w="majority") as direct:
        notes = client.members.notes
        with notes.watch(max_await_time_ms=200) as stream:
            stream.try_next()
            written = direct.members.notes.insert_many([{"n": number} for number in range(2)]).inserted_ids
            assert eventually(stream.try_next, "no event came")["documentKey"]["_id"] == written[0]
            token = stream.resume_token
        with direct.members.notes.watch(resume_after=token) as resumed:
            assert next(resumed)["documentKey"]["_id"] == written[1]
        assert eventually(notes.find_one, "nothing is found there") is not None


@pytest.fixture(scope="module")
def at_the_secondary(members: Members) -> Iterator[RunningGateway]:
    with running_gateway(f"mongodb://{members.secondary}/?directConnection=true") as running:
        yield running


@pytest.fixture(scope="module")
def at_the_primary(members: Members) -> Iterator[RunningGateway]:
    """Given the arbiter alone, which names the others."""
    with running_gateway(f"mongodb://{members.arbiter}/?replicaSet={NAME}") as running:
        yield running


@pytest.mark.parametrize(
    "options",
    [
        "directConnection=true",
        f"replicaSet={NAME}&readPreference=secondary",
    ],
)
def test_streams_of_a_secondary(at_the_secondary: RunningGateway, members: Members, options: str) -> None:
    assert_watches(at_the_secondary.uri(options), members)


def test_nobody_waits_for_a_primary_that_was_not_asked_for(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_PRIMARY_S", 3600.0)
    with (
        running_gateway(f"mongodb://{members.secondary}/?directConnection=true") as running,
        pymongo.MongoClient[Any](running.uri("directConnection=true")) as client,
    ):
        assert client.admin.command("hello")["secondary"]


def test_a_secondary_takes_no_writes_through_the_gateway_either(at_the_secondary: RunningGateway) -> None:
    with (
        pymongo.MongoClient[Any](at_the_secondary.uri("directConnection=true")) as client,
        pytest.raises(NotPrimaryError) as refused,
    ):
        client.members.notes.insert_one({})
    assert refused.value.details is not None
    assert refused.value.details["code"] == 10107


@pytest.mark.parametrize(
    "options",
    ["", "directConnection=true", "readPreference=nearest", "directConnection=true&readPreference=secondary"]
    + [f"replicaSet={NAME}{more}" for more in ("", "&readPreference=secondaryPreferred", "&readPreference=nearest")],
)
def test_a_client_that_chooses_a_member_is_given_the_one_there_is(
    at_the_primary: RunningGateway, members: Members, options: str
) -> None:
    assert_watches(at_the_primary.uri(options), members)


def test_a_client_that_wants_a_secondary_alone_finds_none(at_the_primary: RunningGateway) -> None:
    uri = at_the_primary.uri(f"replicaSet={NAME}&readPreference=secondary&serverSelectionTimeoutMS=500")
    with pymongo.MongoClient[Any](uri) as client:
        hello = client.admin.command("hello", read_preference=pymongo.ReadPreference.PRIMARY)
        assert hello["hosts"] == [at_the_primary.hosts]
        assert "arbiters" not in hello
        with pytest.raises(ServerSelectionTimeoutError):
            client.members.notes.watch()


@pytest.fixture(scope="module")
def as_mongos(members: Members) -> Iterator[RunningGateway]:
    with running_gateway(members.uri, as_mongos=True) as running:
        yield running


@pytest.mark.parametrize("options", ["readPreference=secondary", "readPreference=nearest"])
def test_as_a_mongos_it_takes_reads_of_a_secondary_where_the_set_has_one(
    as_mongos: RunningGateway, members: Members, options: str
) -> None:
    """They were always refused; a mongos refuses none that a member can fulfil."""
    assert_watches(as_mongos.uri(options), members)


@pytest.mark.parametrize("mode", ["secondary", "nearest"])
def test_as_a_mongos_it_refuses_what_no_member_can_fulfil(as_mongos: RunningGateway, mode: str) -> None:
    uri = as_mongos.uri(f"readPreference={mode}&readPreferenceTags=place:elsewhere")
    with pymongo.MongoClient[Any](uri) as client, pytest.raises(OperationFailure, match="no member") as refused:
        client.members.notes.watch()
    assert refused.value.code == 133
    # The last of several lists of tags may be empty: then every member will do.
    with pymongo.MongoClient[Any](f"{uri}&readPreferenceTags=") as client, client.members.notes.watch() as stream:
        stream.try_next()


def test_the_upstream_may_be_read_at_a_secondary(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one read of the oplog goes where the URI's read preference says, and clients' writes to the primary."""

    monkeypatch.setattr(upstream, "APP_NAME", "reads-a-secondary")

    def reads(host: str) -> bool:
        with pymongo.MongoClient[Any](host, directConnection=True) as client:
            stages = [{"$currentOp": {"idleCursors": True}}, {"$match": {"ns": "local.oplog.rs"}}]
            operations = client.admin.aggregate([*stages, {"$match": {"appName": upstream.APP_NAME}}])
            return any(each.get("cursor") or each.get("op") == "getmore" for each in operations)

    with running_gateway(f"{members.uri}&readPreference=secondary") as running:
        assert_watches(running.uri(), members)
        with pymongo.MongoClient[Any](running.uri()) as client, client.members.notes.watch() as stream:
            stream.try_next()
            written = client.members.notes.insert_one({}).inserted_id
            assert next(stream)["documentKey"] == {"_id": written}
            eventually(lambda: reads(members.secondary), "the oplog is not read at the secondary")
            assert not reads(members.primary)
            for lookup in ("updateLookup", "default"):
                with client.members.notes.watch(full_document=lookup, max_await_time_ms=200) as updates:
                    updates.try_next()
                    client.members.notes.update_one({"_id": written}, {"$set": {lookup: 1}})
                    found = eventually(updates.try_next, "no update came")
                    assert found.get("fullDocument", {}).get(lookup) == (1 if lookup == "updateLookup" else None)


def test_what_keeps_no_oplog_is_refused_at_the_start(members: Members, server_version: str) -> None:
    with (
        Mongod(binary=find_mongod(server_version)) as alone,
        pytest.raises(SourceError, match="standalone server, which keeps no oplog"),
        running_gateway(f"mongodb://{alone.host}/"),
    ):
        pass
    with (
        pytest.raises(TailraceError) as refused,
        running_gateway(f"mongodb://{members.arbiter}/?directConnection=true"),
    ):
        pass
    assert "if it is an arbiter, name one that holds data" in str(refused.value.hint)
