"""What the tests of archives in an object store share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.differential.stored_archives import HAS_IMAGES


@pytest.fixture
def collection(quiet_replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.node.name.split("[")[0][-40:]
    # An archive has what a majority has, and before 5.0 a write does not wait for that.
    with MongoClient[Any](quiet_replica_set.uri, w="majority") as client:
        client.drop_database(name)
        kept = {"changeStreamPreAndPostImages": {"enabled": True}}
        images: dict[str, Any] = kept if HAS_IMAGES else {"recordPreImages": True}
        yield client[name].create_collection("Things", **images)
        client.drop_database(name)
