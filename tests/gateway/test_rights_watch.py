"""What the gateway hears of users and roles from the oplog that it reads anyway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pymongo
import pytest

from tailrace.embedded import ReplicaSet
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.gateway.running import eventually

pytestmark = pytest.mark.mongod

Client = pymongo.MongoClient[dict[str, Any]]


@pytest.fixture
def running(replica_set: ReplicaSet) -> Iterator[RunningGateway]:
    with running_gateway(replica_set.uri) as gateway:
        yield gateway


def generation(running: RunningGateway) -> int:
    heard = running.call(running.gateway.engine.rights_heard)
    return heard.generation if heard.until else 0


def test_every_change_of_a_user_or_a_role_is_heard_and_nothing_else(
    running: RunningGateway, replica_set: ReplicaSet
) -> None:
    with Client(running.uri()) as through, Client(replica_set.uri) as direct, through.heard.t.watch() as stream:
        eventually(lambda: generation(running), "the changes of rights are not heard")
        for command in (
            {"createRole": "heard", "privileges": [], "roles": []},
            {"createUser": "heard", "pwd": "pw", "roles": ["heard"]},
            {"grantRolesToRole": "heard", "roles": [{"role": "read", "db": "heardOf"}]},
            {"revokeRolesFromUser": "heard", "roles": ["heard"]},
            {"dropRole": "heard"},
            {"dropAllUsersFromDatabase": 1},
        ):
            before = generation(running)
            direct.heardOf.command(command)
            direct.heard.t.insert_one({})
            assert next(stream)["operationType"] == "insert"
            after = generation(running)  # by now everything before the event in the oplog is known
            assert after > before, command
        for number in range(3):
            direct.heard.t.insert_one({"_id": number})
            direct.heardOf.command({"createUser": "x", "pwd": "y", "roles": [{"role": "none"}]}, check=False)
            assert next(stream)["documentKey"]["_id"] == number
        assert generation(running) == after


def test_the_watch_lets_the_shared_read_end(running: RunningGateway) -> None:
    with Client(running.uri()) as through:
        with through.heard.t.watch():
            eventually(lambda: generation(running), "the changes of rights are not heard")
        engine = running.gateway.engine
        eventually(lambda: not running.call(lambda: engine.streams), "the stream stays")
        running.call(engine._let_go)
        eventually(lambda: running.call(lambda: engine._shared._reader) is None, "the shared read goes on")
        assert generation(running) == 0
        with through.heard.t.watch():
            eventually(lambda: generation(running), "the changes of rights are not heard again")
