"""Several gateways of one replica set in one URI: when one ends, its clients go on at another.

Each gateway was the only member of a replica set of its own, so a driver that was given two of them dropped one, and
then had nowhere to go. In earlier tests clients were always given one gateway.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.write_concern import WriteConcern

from tailrace.embedded import ReplicaSet
from tests.gateway.running import GatewayProcess, eventually

pytestmark = pytest.mark.mongod

Client = pymongo.MongoClient[dict[str, Any]]


@pytest.fixture
def two(replica_set: ReplicaSet, tmp_path: Path) -> Iterator[list[GatewayProcess]]:
    with (
        GatewayProcess(replica_set.uri, tmp_path / "one.log", "--as-mongos") as one,
        GatewayProcess(replica_set.uri, tmp_path / "other.log", "--as-mongos") as other,
    ):
        yield [one, other]


def at(gateways: list[GatewayProcess], **options: Any) -> Client:
    return Client(f"mongodb://{','.join(one.address for one in gateways)}/", **options)


def test_a_driver_sees_two_routers(two: list[GatewayProcess]) -> None:
    with at(two) as client:
        client.admin.command("ping")
        eventually(lambda: len(client.nodes) == 2, "one of them is not seen")
        described = client.topology_description
        assert described.topology_type_name == "Sharded"
        found = [server.server_type_name for server in described.server_descriptions().values()]
        assert found == ["Mongos", "Mongos"]
        hello = client.admin.command("hello")
        assert hello["msg"] == "isdbgrid"
        assert not {"setName", "hosts", "me", "primary", "setVersion", "electionId", "lastWrite"} & hello.keys()


@pytest.mark.parametrize("mode", ["primary", "primaryPreferred", "secondaryPreferred", "nearest", "secondary"])
def test_a_read_preference_is_done_or_refused(
    mode: str, replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, "--as-mongos")
    with at([gateway], readPreference=mode) as client:
        if mode == "secondary":  # a set of one member has none
            with pytest.raises(OperationFailure, match="no member that matches the read") as refused:
                client.several.notes.watch()
            assert refused.value.code == 133
            return
        with client.several.modes.watch() as stream:
            client.several.modes.insert_one({"mode": mode})
            assert next(stream)["fullDocument"]["mode"] == mode


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_streams_go_on_at_the_other_gateway(number: int, two: list[GatewayProcess], replica_set: ReplicaSet) -> None:
    """Whichever of the two a stream uses, no event is lost and none comes twice; writes go on too."""
    with at(two) as client, Client(replica_set.uri) as direct:
        notes = client.several.notes
        with notes.watch(max_await_time_ms=100) as first, notes.watch(max_await_time_ms=100) as second:
            direct.several.notes.insert_one({"_id": 0})
            addresses = set()
            for stream in (first, second):
                assert next(stream)["documentKey"] == {"_id": 0}
                addresses.add(stream._cursor.address)
            gone = next(one for one in two if one.host_and_port == next(iter(addresses)))
            gone.process.send_signal(number)
            gone.process.wait(300)
            for each in range(1, 6):
                direct.several.notes.insert_one({"_id": each})
            for stream in (first, second):
                assert [next(stream)["documentKey"]["_id"] for _ in range(5)] == [1, 2, 3, 4, 5]
                assert stream._cursor.address != gone.host_and_port
        notes.insert_one({"_id": 6})
        with client.start_session() as session, session.start_transaction(write_concern=WriteConcern("majority")):
            notes.insert_one({"_id": 7}, session=session)
        assert direct.several.notes.count_documents({}) == 8
        direct.several.notes.drop()


def test_as_the_member_of_a_set_a_gateway_is_alone(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """What the page says of --as-mongos: without it a driver leaves one of two gateways."""
    both = [start_gateway(replica_set.uri) for _ in range(2)]
    options = f"replicaSet={replica_set.name}&serverSelectionTimeoutMS=2000"
    with Client(f"mongodb://{','.join(one.address for one in both)}/?{options}") as client:
        client.admin.command("ping")
        used = client.address
        gone = next(one for one in both if one.host_and_port == used)
        gone.stop()
        with pytest.raises(PyMongoError):
            client.several.notes.find_one()
