"""A getMore that repeats the last one of its connection is not parsed again: whatever a message holds, the remembered
facts are those that parsing it would give."""

from __future__ import annotations

import uuid
from typing import Any

import bson
import pytest

from tailrace.watch.gateway.command import command_of
from tailrace.watch.gateway.frame import MORE_TO_COME, op_msg
from tailrace.watch.gateway.generic_fields import times_of
from tailrace.watch.gateway.repeated import LastGetMore, facts_of

_VERSION = (6, 0)
_SESSION = {"id": bson.Binary(uuid.UUID(int=5).bytes, 4)}


def time_of(seconds: int, key: int = 7) -> dict[str, Any]:
    signature = {"hash": bytes([seconds % 256]) * 20, "keyId": bson.Int64(key)}
    return {"clusterTime": bson.Timestamp(seconds, 1), "signature": signature}


def get_more(**fields: Any) -> bytes:
    return bson.encode({"getMore": bson.Int64(99), "collection": "orders", **fields, "$db": "shop"})


DOCUMENTS = {
    "bare": get_more(maxTimeMS=1000),
    "of a driver": get_more(lsid=_SESSION, **{"$clusterTime": time_of(50)}),
    "with a comment": get_more(comment={"$clusterTime": time_of(50)}, apiVersion="1"),
}


def remembered(document: bytes) -> LastGetMore:
    command = command_of(op_msg(document, request_id=1), None)
    assert command is not None
    last = LastGetMore()
    last.remember(command, facts_of(command, _VERSION))
    return last


def agrees(last: LastGetMore, message: bytes) -> bool:
    """Whether ``message`` is taken for a repetition; if so, checks that parsing it gives the same."""
    known = last.repeated(message)
    if known is None:
        return False
    read = command_of(message, None)
    assert read is not None
    assert (known.message, known.name, known.database, known.session) == (
        read.message,
        read.name,
        read.database,
        read.session,
    )
    assert known.facts == facts_of(read, _VERSION)
    assert known.cluster_time == times_of(read.document).cluster
    return True


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_same_again_is_known(document: bytes) -> None:
    assert agrees(remembered(document), op_msg(document, request_id=77))


def test_another_cluster_time_is_the_same_command() -> None:
    last = remembered(DOCUMENTS["of a driver"])
    for seconds in (51, 0xFFFFFFFF):
        again = get_more(lsid=_SESSION, **{"$clusterTime": time_of(seconds, key=seconds)})
        assert agrees(last, op_msg(again, request_id=2))


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_no_byte_can_be_changed_unnoticed(document: bytes) -> None:
    last, message = remembered(document), op_msg(document, request_id=1)
    for place in range(len(message)):
        for change in (1, 0x80, 0xFF):
            agrees(last, message[:place] + bytes([message[place] ^ change]) + message[place + 1 :])
    assert not agrees(last, message + b"\x00")
    assert not agrees(last, message[:-1])


def test_what_is_out_of_the_ordinary_is_read_each_time() -> None:
    document = DOCUMENTS["bare"]
    for message, compressor in (
        (op_msg(document, request_id=1, flags=MORE_TO_COME), None),
        (op_msg(document, request_id=1), "zlib"),
        (op_msg(get_more(unknown=1), request_id=1), None),
        (op_msg(get_more(**{"$clusterTime": {**time_of(50), "signature": {"hash": b"x"}}}), request_id=1), None),
        (op_msg(get_more(comment="x" * 5000), request_id=1), None),
    ):
        command = command_of(message, compressor)
        assert command is not None
        last = LastGetMore()
        last.remember(command, facts_of(command, _VERSION))
        assert last.size == 0
        assert last.repeated(message) is None


def test_another_stream_on_the_connection_takes_the_place_of_the_last() -> None:
    first, second = DOCUMENTS["bare"], bson.encode({"getMore": bson.Int64(98), "collection": "orders", "$db": "shop"})
    last = remembered(first)
    assert last.repeated(op_msg(second, request_id=3)) is None
    command = command_of(op_msg(second, request_id=3), None)
    assert command is not None
    last.remember(command, facts_of(command, _VERSION))
    assert agrees(last, op_msg(second, request_id=4))
    assert last.repeated(op_msg(first, request_id=5)) is None
