"""Fail points for streams at the gateway strike like the server's, and leave the gateway's own reads alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bson
import pymongo
import pytest
from bson.int64 import Int64
from pymongo.errors import AutoReconnect, OperationFailure

from tests.differential.wire import ANY_VALUE, Wire
from tests.gateway.side_by_side import VERSIONS, SideBySide, side_by_side

pytestmark = pytest.mark.mongod

STREAM = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}
#: Errors that announce another primary also carry the server's ``topologyVersion``; drivers can do without.
OF_THE_SERVER = ("$clusterTime", "operationTime", "topologyVersion")
CODES = (6, 7, 43, 63, 89, 91, 133, 134, 150, 189, 234, 262, 1000, 9001, 10107, 11600, 11601, 11602, 13435, 13436)


@pytest.fixture(scope="module", params=VERSIONS)
def sides(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    with side_by_side(request.param, test_commands=True) as made:
        for wire in (made.server, made.gateway):
            name(wire, "struck")
        yield made


def name(wire: Wire, application: str) -> None:
    driver = {"driver": {"name": "none", "version": "1"}, "os": {"type": "Linux"}}
    wire.run("admin", {"hello": 1, "client": {"application": {"name": application}, **driver}})


def configure(wire: Wire, name: str, mode: Any, **data: Any) -> None:
    wire.run("admin", {"configureFailPoint": name, "mode": mode, **({"data": data} if data else {})})


def answer(wire: Wire, command: dict[str, Any]) -> dict[str, Any]:
    reply = bson.decode(wire.exchange(bson.encode({**command, "$db": "shop"})), ANY_VALUE)
    return {name: value for name, value in reply.items() if name not in OF_THE_SERVER}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("labels", [{}, {"errorLabels": ["ResumableChangeStreamError"]}, {"errorLabels": []}])
def test_a_failing_command_s_reply_is_the_server_s(sides: SideBySide, code: int, labels: dict[str, Any]) -> None:
    data = {"failCommands": ["aggregate", "getMore"], "errorCode": code, "appName": "struck", **labels}
    for command in (STREAM, {"getMore": Int64(5), "collection": "c"}):
        replies = []
        for wire in (sides.server, sides.gateway):
            configure(wire, "failCommand", {"times": 1}, **data)
            replies.append(answer(wire, command))
            configure(wire, "failCommand", "off")
        assert replies[1] == replies[0]
        assert replies[0]["code"] == code


@pytest.mark.parametrize("code", CODES)
def test_a_failing_get_more_ends_its_cursor_as_the_server_s_does(sides: SideBySide, code: int) -> None:
    replies = []
    for wire in (sides.server, sides.gateway):
        cursor = wire.run("shop", STREAM)["cursor"]["id"]
        read = {"getMore": Int64(cursor), "collection": "c", "maxTimeMS": 1}
        configure(wire, "failGetMoreAfterCursorCheckout", "alwaysOn", errorCode=code)
        failed = answer(wire, read)
        configure(wire, "failGetMoreAfterCursorCheckout", "off")
        replies.append((failed, answer(wire, read)["code"]))
    assert replies[1] == replies[0]
    assert replies[0][1] == 43


def test_a_fail_point_strikes_so_often_and_others_not_at_all(sides: SideBySide) -> None:
    configure(sides.gateway, "failCommand", {"times": 2}, failCommands=["aggregate"], errorCode=6, appName="struck")
    with Wire.to(sides.running.uri()) as unnamed:
        assert answer(unnamed, STREAM)["ok"] == 1
    assert [answer(sides.gateway, STREAM).get("code") for _ in range(3)] == [6, 6, None]
    # It struck the aggregates that the server answers, too.
    configure(sides.gateway, "failCommand", {"times": 1}, failCommands=["aggregate"], errorCode=6)
    assert answer(sides.gateway, {"aggregate": "c", "pipeline": [], "cursor": {}})["code"] == 6
    assert answer(sides.server, {"aggregate": "c", "pipeline": [], "cursor": {}})["ok"] == 1


def test_commands_that_the_server_answers_fail_there(sides: SideBySide) -> None:
    data = {"failCommands": ["ping", "getMore"], "errorCode": 6, "appName": "struck"}
    configure(sides.gateway, "failCommand", {"times": 1}, **data)
    assert answer(sides.gateway, {"ping": 1})["code"] == 6
    assert answer(sides.gateway, {"getMore": Int64(5), "collection": "c"})["code"] == 6
    configure(sides.gateway, "failCommand", "off")


def test_a_get_more_that_is_repeated_counts_once(sides: SideBySide) -> None:
    """A getMore whose cursor had gone was checked twice, and so used up two of a fail point's times. No test had
    repeated a getMore on its connection after the end of its cursor."""
    codes = []
    for uri in (sides.deployment.uri, sides.running.uri()):
        with Wire.to(uri) as wire, Wire.to(uri) as other:
            name(wire, "counted")  # otherwise the gateway's own reads of the server's oplog would count too
            cursor = wire.run("shop", STREAM)["cursor"]["id"]
            read = {"getMore": Int64(cursor), "collection": "c", "maxTimeMS": 1}
            assert [answer(wire, read)["ok"] for _ in range(2)] == [1, 1]
            assert answer(other, {"killCursors": "c", "cursors": [Int64(cursor)]})["cursorsKilled"] == [cursor]
            configure(wire, "failCommand", {"skip": 3}, failCommands=["getMore"], errorCode=6, appName="counted")
            codes.append([answer(wire, read)["code"] for _ in range(5)])
            configure(wire, "failCommand", "off")
    assert codes == [[43, 43, 43, 6, 6]] * 2


def test_a_connection_is_closed_and_the_stream_goes_on(sides: SideBySide) -> None:
    with pymongo.MongoClient[dict[str, Any]](sides.running.uri()) as client:
        with client.shop.c.watch(max_await_time_ms=100) as stream:
            data = {"failCommands": ["getMore"], "closeConnection": True}
            client.admin.command("configureFailPoint", "failCommand", mode={"times": 1}, data=data)
            client.shop.c.insert_one({"_id": 1})
            assert next(stream)["documentKey"] == {"_id": 1}
        data = {"failCommands": ["killCursors"], "closeConnection": True}
        client.admin.command("configureFailPoint", "failCommand", mode={"times": 1}, data=data)
        with pytest.raises(AutoReconnect):
            client.shop.command({"killCursors": "c", "cursors": [Int64(5)]})


def test_without_test_commands_the_server_s_alone_are_set(sides: SideBySide) -> None:
    from tests.gateway.gateways import running_gateway

    with running_gateway(sides.deployment.uri) as plain, Wire.to(plain.uri()) as wire:
        configure(wire, "failCommand", {"times": 1}, failCommands=["ping"], errorCode=6)
        assert answer(wire, {"ping": 1})["code"] == 6
        with pymongo.MongoClient[dict[str, Any]](plain.uri()) as client, pytest.raises(OperationFailure):
            client.admin.command("configureFailPoint", "noSuchFailPoint", mode="off")
