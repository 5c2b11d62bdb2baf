"""Every made-up high-water mark: the server's code and ours.

A high-water mark with a txnOpIndex or the invalidate flag was accepted. The fuzzer's damaged tokens had hit neither
byte in its first 66,000 operations, and the table of refused tokens had only marks with a UUID.
"""

from __future__ import annotations

from itertools import product

import pymongo
import pytest
from pymongo.errors import OperationFailure

from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError

VERSIONS = ("2B02", "2B04")
INDEXES = ("29", "2B02")
FLAGS = ("6E", "6F")
UUIDS = ("", "14", "5A100400112233445566778899AABBCCDDEEFF")
IDENTIFIERS = ("", "461E5F6964002B020000")


def _servers_code(client: pymongo.MongoClient, scope: Scope, stage: dict[str, object]) -> int | None:
    try:
        client["hw"].command(
            {"aggregate": scope.collection or 1, "pipeline": [{"$changeStream": stage}], "cursor": {"batchSize": 0}}
        )
    except OperationFailure as error:
        return error.code
    return None


def _our_code(scope: Scope, stage: dict[str, object]) -> int | None:
    try:
        build_plan(StreamOptions.parse(scope, stage))
    except TailraceError as error:
        return error.code
    return None


@pytest.mark.mongod
@pytest.mark.parametrize("scope", [Scope.of_database("hw"), Scope.of_collection("hw", "c")], ids=str)
@pytest.mark.parametrize("option", ["startAfter", "resumeAfter"])
def test_a_made_up_high_water_mark_gets_the_servers_code(replica_set: ReplicaSet, option: str, scope: Scope) -> None:
    with pymongo.MongoClient(replica_set.uri) as client:
        client["hw"]["c"].insert_one({})
        now = client.admin.command("ping")["operationTime"]
        compared = refused = 0
        for version, index, flag, uuid, identifier in product(VERSIONS, INDEXES, FLAGS, UUIDS, IDENTIFIERS):
            data = f"82{now.time:08X}{now.inc:08X}{version}29{index}{flag}{uuid}{identifier}04"
            stage: dict[str, object] = {option: {"_data": data}}
            theirs = _servers_code(client, scope, stage)
            assert theirs == _our_code(scope, stage), stage
            compared += 1
            refused += theirs is not None
        assert compared == 48
        assert 0 < refused < compared
