"""The parts of the gateway that do no I/O: what a message is, what a privilege covers, which time is passed on."""

from __future__ import annotations

import struct
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.cursor.reply import kill_reply
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.watch.gateway.command import (
    app_name_of,
    command_of,
    cursor_asked,
    opens_stream,
    outline,
    without_cursors,
)
from tailrace.watch.gateway.fail_points import FailPoints
from tailrace.watch.gateway.frame import EXHAUST_ALLOWED, MORE_TO_COME, OP_MSG, OP_QUERY, op_msg, op_query
from tailrace.watch.gateway.replies import ServerClock, merged_kills
from tailrace.watch.gateway.rights import Identity

BOTH = ["find", "changeStream"]


def identity(*privileges: tuple[dict[str, Any], list[str]]) -> Identity:
    granted = [{"resource": resource, "actions": actions} for resource, actions in privileges]
    return Identity.of_status(
        {"authInfo": {"authenticatedUsers": [{"user": "u", "db": "d"}], "authenticatedUserPrivileges": granted}}
    )


ORDERS, ITEMS = Scope.of_collection("shop", "orders"), Scope.of_collection("shop", "items")
SHOP, CLUSTER = Scope.of_database("shop"), Scope.cluster()


@pytest.mark.parametrize(
    ("resource", "covered"),
    [
        ({"db": "shop", "collection": "orders"}, {ORDERS}),
        ({"db": "", "collection": "orders"}, {ORDERS}),
        ({"db": "shop", "collection": ""}, {ORDERS, ITEMS, SHOP}),
        ({"db": "", "collection": ""}, {ORDERS, ITEMS, SHOP, CLUSTER}),
        ({"anyResource": True}, {ORDERS, ITEMS, SHOP, CLUSTER}),
        ({"anyResource": False}, set()),
        ({"cluster": True}, set()),
        ({"db": "blog", "collection": ""}, set()),
        ({"db": "shop", "system_buckets": "orders"}, set()),
        ({"db": "shop", "collection": "orders", "more": 1}, set()),
        ({}, set()),
    ],
)
def test_a_privilege_covers_what_the_server_says(resource: dict[str, Any], covered: set[Scope]) -> None:
    who = identity((resource, BOTH))
    assert {scope for scope in (ORDERS, ITEMS, SHOP, CLUSTER) if who.may_watch(scope)} == covered
    for half in BOTH:
        assert not any(identity((resource, [half])).may_watch(scope) for scope in (ORDERS, SHOP, CLUSTER))


def test_what_is_for_every_database_is_not_for_the_server_s_own() -> None:
    who = identity(({"db": "", "collection": ""}, BOTH))
    for scope in (Scope.of_database("local"), Scope.of_collection("config", "shards")):
        assert not who.may_watch(scope)
    assert not who.may_watch(Scope.of_collection("shop", "system.views"))
    assert identity(({"db": "config", "collection": ""}, BOTH)).may_watch(Scope.of_collection("config", "shards"))


def test_two_privileges_may_come_to_what_one_does_not() -> None:
    who = identity(({"db": "shop", "collection": "orders"}, ["find"]), ({"db": "", "collection": ""}, ["changeStream"]))
    assert who.may_watch(ORDERS)
    assert not who.may_watch(ITEMS)


def test_nobody_may_nothing_unless_the_server_asks_nobody() -> None:
    assert not Identity.of_status({"authInfo": {}}).may_watch(ORDERS)
    assert not Identity.of_status({}).may_watch(CLUSTER)
    assert Identity(frozenset(), may_all=True).may_watch(CLUSTER)


def test_the_outline_of_a_message() -> None:
    ping = bson.encode({"ping": 1, "$db": "a"})
    assert outline(OP_MSG, op_msg(ping, request_id=1)).name == b"ping"
    unanswered = outline(OP_MSG, op_msg(ping, request_id=1, flags=MORE_TO_COME))
    assert (unanswered.answered, unanswered.exhaust) == (False, False)
    assert outline(OP_MSG, op_msg(ping, request_id=1, flags=EXHAUST_ALLOWED)).exhaust
    hello = op_query(b"admin.$cmd", bson.encode({"isMaster": 1}), request_id=1)
    assert outline(OP_QUERY, hello).name == b"isMaster"
    wrapped = op_query(b"admin.$cmd", bson.encode({"$query": {"ismaster": 1}}), request_id=1)
    assert outline(OP_QUERY, wrapped).name == b"ismaster"
    assert outline(OP_QUERY, op_query(b"a.b", bson.encode({"isMaster": 1}), request_id=1)).name == b""
    for code in (2001, 2002, 2006, 2007):
        assert not outline(code, bytes(16)).answered
    for message in (hello, op_msg(ping, request_id=1)):
        for end in range(len(message)):  # wherever it is cut off, this is no error
            outline(struct.unpack_from("<i", message, 12)[0], message[:end])


def test_a_command_that_can_be_read_in_two_ways_is_the_server_s() -> None:
    good = {"getMore": Int64(5), "collection": "c", "lsid": {"id": 1}, "$db": "a"}
    command = command_of(op_msg(bson.encode(good), request_id=1), None)
    assert command is not None
    assert (command.name, command.database, cursor_asked(command.document)) == (b"getMore", "a", 5)
    twice = bson.encode(good)[4:-1] + bson.encode({"getMore": Int64(6)})[4:-1]
    document = struct.pack("<i", len(twice) + 5) + twice + b"\0"
    assert command_of(op_msg(document, request_id=1), None) is None
    assert command_of(op_msg(bson.encode({"getMore": Int64(5)}), request_id=1), None) is None
    sequences = ((b"pipeline", bson.encode({"$changeStream": {}})),)
    assert command_of(op_msg(bson.encode(good), request_id=1, sequences=sequences), None) is None
    for place in range(16, len(document)):
        command_of(op_msg(document, request_id=1)[:place], None)


def test_which_aggregates_are_for_the_engine() -> None:
    def opens(**fields: Any) -> bool:
        return opens_stream(bson.encode({"aggregate": "c", **fields}))

    assert opens(pipeline=[{"$changeStream": {}}])
    assert not opens(pipeline=[{"$changeStream": {}}], explain=True)
    for pipeline in ([], [{"$match": {}}, {"$changeStream": {}}], [1], {}, "x", [{}]):
        assert not opens(pipeline=pipeline)
    assert not opens()


def test_a_kill_is_divided_and_put_together() -> None:
    command = bson.encode({"killCursors": "c", "cursors": [Int64(number) for number in (1, 2, 3, 4)], "$db": "a"})
    assert bson.decode(without_cursors(command, [1, 4])) == {"killCursors": "c", "cursors": [1, 4], "$db": "a"}
    reply = bson.decode(merged_kills([1, 2, 3, 4], {2, 3}, kill_reply([4], [1])))
    assert (reply["cursorsKilled"], reply["cursorsNotFound"]) == ([2, 3, 4], [1])


def clock_document(seconds: int, key: int) -> bytes:
    signature = {"hash": b"\1" * 20, "keyId": Int64(key)}
    return bson.encode({"clusterTime": Timestamp(seconds, 1), "signature": signature})


def test_only_the_newest_time_is_passed_on_and_with_users_only_a_signed_one() -> None:
    reply = bson.encode({"ok": 1.0})
    clock = ServerClock(signed=True)
    assert clock.stamp(reply, ClusterTime(0)) == reply
    for seconds, key in ((7, 5), (9, 0), (8, 5), (6, 5)):
        clock.saw(clock_document(seconds, key))
    stamped = bson.decode(clock.stamp(reply, ClusterTime.of(3, 1)))
    assert list(stamped) == ["ok", "$clusterTime", "operationTime"]
    assert stamped["$clusterTime"]["clusterTime"] == Timestamp(8, 1)
    assert stamped["operationTime"] == Timestamp(3, 1)
    assert bson.decode(clock.stamp(reply, ClusterTime.of(99, 1)))["operationTime"] == Timestamp(8, 1)
    for damaged in (b"", b"\5\0\0\0", bson.encode({"clusterTime": 1})):
        clock.saw(damaged)
    assert ServerClock().stamp(reply, ClusterTime(0)) == reply


def test_what_the_server_is_left_of_a_fail_point() -> None:
    ours = {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": {"failCommands": ["getMore"]}}
    assert FailPoints.for_server(ours) == {"configureFailPoint": "failCommand", "mode": "off"}
    mixed = {**ours, "data": {"failCommands": ["getMore", "find"], "errorCode": 5}}
    assert FailPoints.for_server(mixed)["data"] == {"failCommands": ["find"], "errorCode": 5}
    other = {"configureFailPoint": "somethingElse", "mode": "alwaysOn"}
    assert FailPoints.for_server(other) == other
    points = FailPoints()
    points.configure({**ours, "mode": {"skip": 1, "times": 1}})
    struck = [points.on_command("getMore", None, opens_stream=False) is not None for _ in range(4)]
    assert struck == [False, True, False, False]
    assert points.on_command("aggregate", None, opens_stream=True) is None


def test_the_program_s_name_in_a_hello() -> None:
    hello = bson.encode({"hello": 1, "client": {"application": {"name": "shop"}}})
    assert app_name_of(op_msg(hello, request_id=1)) == "shop"
    assert app_name_of(hello[:-12]) is None
    assert app_name_of(b"") is None
