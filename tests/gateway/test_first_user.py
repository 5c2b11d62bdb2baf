"""Nobody creates a server's first user through a gateway on the same machine.

The server takes the gateway's connections for those of its own machine, and would allow it. Tests with users had
created one before a gateway was started.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pymongo
import pytest
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded import Mongod, ReplicaSet
from tailrace.embedded.binary import find_mongod
from tailrace.errors import SourceError
from tests.gateway.gateways import running_gateway
from tests.gateway.side_by_side import OLDER_ARE_SLOW

pytestmark = pytest.mark.mongod

_KEY = "whatmembersshare" * 4
_LIMIT_S = 300.0


@pytest.fixture(params=OLDER_ARE_SLOW)
def without_users(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mongod]:
    """A server that requires users, and has none."""
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(_KEY)
    arguments = ("--auth", "--keyFile", str(key))
    with Mongod(replica_set="empty", arguments=arguments, binary=find_mongod(request.param)) as mongod:
        with pymongo.MongoClient[Any](mongod.uri, directConnection=True) as client:
            client.admin.command("replSetInitiate", {"_id": "empty", "members": [{"_id": 0, "host": mongod.host}]})
            limit = time.monotonic() + _LIMIT_S
            while not client.admin.command("hello")["isWritablePrimary"]:
                assert time.monotonic() < limit, "the member did not become primary"
                time.sleep(0.05)
        yield mongod


def test_a_gateway_that_others_can_reach_waits_for_a_first_user(
    without_users: Mongod, caplog: pytest.LogCaptureFixture
) -> None:
    upstream = f"mongodb://__system:{quote_plus(_KEY)}@{without_users.host}/?authSource=local&replicaSet=empty"
    with pytest.raises(SourceError, match="has none"), running_gateway(upstream, host="0.0.0.0"):
        pass
    with running_gateway(upstream) as gateway:
        assert "create one before" in caplog.text
        with pymongo.MongoClient[Any](gateway.uri("directConnection=true")) as client:
            with pytest.raises(OperationFailure):
                client.admin.command("usersInfo", 1)
            with suppress(PyMongoError):  # the server's exception for its own machine, which this test is about
                client.admin.command("createUser", "root", pwd="pw", roles=["root"])
    with running_gateway(upstream, host="0.0.0.0") as gateway:
        with pymongo.MongoClient[Any](gateway.uri("directConnection=true", user="root:pw")) as client:
            assert client.admin.command("usersInfo", "root")["users"]
        with pymongo.MongoClient[Any](gateway.uri("directConnection=true")) as client:
            with pytest.raises(OperationFailure) as refused:
                client.admin.command("createUser", "second", pwd="pw", roles=[])
            assert refused.value.code == 13


def test_a_server_without_access_control_is_asked_nothing_more(replica_set: ReplicaSet) -> None:
    with (
        running_gateway(replica_set.uri, host="0.0.0.0") as gateway,
        pymongo.MongoClient[Any](gateway.uri("directConnection=true")) as client,
    ):
        assert client.admin.command("ping")["ok"] == 1
