"""Replies that the server pushes, taken from the connection without waiting. Anything incomplete or unusual stays there
for PyMongo to read."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import bson
import pytest
from pymongo import MongoClient

from tailrace.read.source.raw_reply import PUSHED_BYTES_MAX, RawReplyCursor

_MORE = 2


def frame(reply: dict[str, Any], *, flags: int = _MORE, op_code: int = 2013) -> bytes:
    body = bson.encode(reply)
    head = (21 + len(body), 1, 2, op_code)
    return b"".join(number.to_bytes(4, "little") for number in (*head, flags)) + b"\x00" + body


def batch(*documents: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"cursor": {"nextBatch": list(documents), "id": bson.Int64(5), "ns": "local.oplog.rs"}, "ok": 1.0, **more}


class Pushed(NamedTuple):
    server: socket.socket
    cursor: RawReplyCursor
    view: socket.socket

    def left(self) -> bytes:
        """What was left on the connection."""
        try:
            return self.view.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


@pytest.fixture
def pushed() -> Iterator[Pushed]:
    server, ours = socket.socketpair()
    ours.settimeout(20)  # as PyMongo's have: nothing may wait for it
    with MongoClient[Any](connect=False) as client, server, ours:
        cursor = RawReplyCursor(client.local["oplog.rs"])
        cursor._id = bson.Int64(5)  # type: ignore[assignment]
        connection = SimpleNamespace(conn=SimpleNamespace(sock=ours), compression_context=None)
        cursor._sock_mgr = SimpleNamespace(conn=connection, more_to_come=True, close=lambda: None)  # type: ignore[assignment]
        view = cursor.pushed_socket()
        assert view is not None
        with view:
            yield Pushed(server, cursor, view)
        cursor._sock_mgr = None
        cursor._id = 0


def test_replies_are_taken_one_after_the_other(pushed: Pushed) -> None:
    assert pushed.cursor.take_pushed(pushed.view) is None
    pushed.server.sendall(frame(batch({"a": 1}, {"a": 2})) + frame(batch({"a": 3})))
    assert pushed.cursor.take_pushed(pushed.view) is True
    assert pushed.cursor.has_pushed_more
    assert next(pushed.cursor) == bson.encode({"a": 1}) + bson.encode({"a": 2})
    assert pushed.cursor.take_pushed(pushed.view) is True
    assert not pushed.cursor.has_pushed_more
    assert next(pushed.cursor) == bson.encode({"a": 3})
    assert pushed.cursor.take_pushed(pushed.view) is None


def test_the_cluster_time_is_noted(pushed: Pushed) -> None:
    signature = {"hash": b"x" * 20, "keyId": bson.Int64(1)}
    time = {"clusterTime": bson.Timestamp(8, 1), "signature": signature}
    pushed.server.sendall(frame(batch({"a": 1}, **{"$clusterTime": time})))
    assert pushed.cursor.take_pushed(pushed.view) is True
    assert pushed.cursor.collection.database.client._topology.max_cluster_time() == time


_OF_ANOTHER = {"cursor": {"nextBatch": [{}], "id": bson.Int64(6)}, "ok": 1.0}
_WHOLE = frame(batch({"a": 1}))
_BODY = _WHOLE[16:]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(frame({"ok": 0.0, "code": 237, "errmsg": "killed"}), id="an error"),
        pytest.param(frame(batch()), id="no documents"),
        pytest.param(frame(batch({"a": 1}), flags=0), id="the last one"),
        pytest.param(frame(batch({"a": 1}), op_code=2012), id="another opcode"),
        pytest.param(frame(batch({"a": 1}) | {"ok": 0.0}), id="a cursor in an error"),
        pytest.param(frame(_OF_ANOTHER), id="another cursor"),
        pytest.param(frame({"cursor": {"firstBatch": [{}], "id": bson.Int64(5)}, "ok": 1.0}), id="a first batch"),
        pytest.param(frame(batch({"a": "x" * PUSHED_BYTES_MAX})), id="a long one"),
        pytest.param(_WHOLE[:20] + b"\x01" + _WHOLE[21:], id="another kind of section"),
        pytest.param((25).to_bytes(4, "little") + zlib.compress(_BODY), id="nonsense"),
        *(pytest.param(_WHOLE[:size], id=f"{size} bytes of one") for size in range(1, len(_WHOLE), 7)),
    ],
)
def test_whatever_else_comes_stays_for_pymongo(pushed: Pushed, sent: bytes) -> None:
    pushed.server.sendall(sent)
    assert pushed.cursor.take_pushed(pushed.view) is False
    assert sent.startswith(pushed.left())
    assert pushed.left()
    assert not pushed.cursor._data


def test_the_end_of_the_connection_is_for_pymongo(pushed: Pushed) -> None:
    pushed.server.close()
    assert pushed.cursor.take_pushed(pushed.view) is False


def test_no_byte_of_a_reply_can_be_damaged_and_a_batch_be_made_up(pushed: Pushed) -> None:
    for place in range(16, len(_WHOLE)):
        damaged = _WHOLE[:place] + bytes([_WHOLE[place] ^ 0xFF]) + _WHOLE[place + 1 :]
        pushed.server.sendall(damaged)
        try:
            taken = pushed.cursor.take_pushed(pushed.view)
        except (bson.errors.BSONError, ValueError):
            taken = False
        if taken:
            assert len(next(pushed.cursor)) == len(bson.encode({"a": 1}))
        elif pushed.left():
            pushed.view.recv(len(damaged))


def test_a_view_is_a_handle_of_its_own(pushed: Pushed) -> None:
    pushed.cursor._sock_mgr.conn.conn.sock.close()  # type: ignore[union-attr]
    pushed.server.sendall(_WHOLE)
    assert pushed.cursor.take_pushed(pushed.view) is True


def test_a_connection_that_compresses_is_not_looked_at(pushed: Pushed) -> None:
    """No reply can be taken from such a connection: the event loop was asked each time, and the thread had to read the
    reply after all. Earlier tests had only plain connections."""
    pushed.cursor._sock_mgr.conn.compression_context = object()  # type: ignore[union-attr]
    assert pushed.cursor.pushed_socket() is None


def timed(seconds: int, *documents: dict[str, Any], key: int = 1) -> dict[str, Any]:
    """A reply as servers of a replica set end theirs."""
    signature = {"hash": bytes([seconds]) * 20, "keyId": bson.Int64(key)}
    time = bson.Timestamp(seconds, 1)
    return batch(*documents, **{"$clusterTime": {"clusterTime": time, "signature": signature}, "operationTime": time})


def test_replies_that_differ_in_their_times_alone_give_documents_and_times(pushed: Pushed) -> None:
    # The first of them is decoded as a whole, the others are compared with it: no test had two with a time.
    for seconds in range(1, 6):
        documents = [{"a": number, "text": "x" * seconds * 9} for number in range(seconds)]
        reply = timed(seconds, *documents)
        pushed.server.sendall(frame(reply))
        assert pushed.cursor.take_pushed(pushed.view) is True
        assert next(pushed.cursor) == b"".join(map(bson.encode, documents))
        assert bson.decode(pushed.cursor.clock or b"") == reply["$clusterTime"]


@pytest.mark.parametrize(
    "odd",
    [
        timed(2),
        {**timed(2, {"a": 1}), "ok": 0.0},
        {**timed(2, {"a": 1}), "cursor": {"nextBatch": [{"a": 1}], "id": bson.Int64(6), "ns": "local.oplog.rs"}},
        {"ok": 0.0, "errmsg": "x", "code": 136},
    ],
    ids=["no documents", "not ok", "another cursor", "an error"],
)
def test_after_a_usual_reply_an_odd_one_is_left(pushed: Pushed, odd: dict[str, Any]) -> None:
    pushed.server.sendall(frame(timed(1, {"a": 0})))
    assert pushed.cursor.take_pushed(pushed.view) is True
    next(pushed.cursor)
    pushed.server.sendall(frame(odd))
    assert pushed.cursor.take_pushed(pushed.view) is False
    assert pushed.left() == frame(odd)


def test_after_a_usual_reply_one_with_more_fields_is_read_whole(pushed: Pushed) -> None:
    pushed.server.sendall(frame(timed(1, {"a": 0})))
    assert pushed.cursor.take_pushed(pushed.view) is True
    next(pushed.cursor)
    pushed.server.sendall(frame({**timed(2, {"a": 1}), "more": 1}))
    assert pushed.cursor.take_pushed(pushed.view) is True
    assert next(pushed.cursor) == bson.encode({"a": 1})
