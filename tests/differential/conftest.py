"""What the tests of archives in an object store share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet


@pytest.fixture
def collection(quiet_replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.node.name.split("[")[0][-40:]
    with MongoClient[Any](quiet_replica_set.uri) as client:
        client.drop_database(name)
        images: dict[str, Any] = {"changeStreamPreAndPostImages": {"enabled": True}}
        yield client[name].create_collection("Things", **images)
        client.drop_database(name)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return "".join(one if one.isalnum() else "-" for one in request.node.name.lower())[-50:].strip("-")
