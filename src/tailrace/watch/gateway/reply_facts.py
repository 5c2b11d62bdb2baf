"""What the replies of change streams say about their cursors, read from their bytes. No I/O."""

from __future__ import annotations

from typing import Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.core.cursor.reply import RESUMABLE_CODES
from tailrace.core.oplog.cluster_time import ClusterTime

#: How a reply to a getMore is laid out: where its array begins; what follows it; where in the token its text begins.
_NEXT_BATCH: Final = b"\x04nextBatch\x00"
_ARRAY_AT: Final = 27
_TOKEN: Final = b"\x03postBatchResumeToken\x00"
_DATA_AT: Final = 15
#: What is read of it: its time and its version.
_DATA_BYTES: Final = 22


class CursorFacts(NamedTuple):
    """What a reply says about its cursor; ``code`` if it is an error instead."""

    cursor_id: int
    namespace: str
    events: int
    code: int | None


#: The cursors of replies to a getMore that hold no event, and one.
_NOTHING: Final = CursorFacts(0, "", 0, None)
_ONE_EVENT: Final = CursorFacts(0, "", 1, None)


def facts_of_next(reply: bytes) -> CursorFacts | None:
    """How many events our own reply to a getMore has, where they are none or one; ``None``: look at all of it."""
    if not reply.startswith(_NEXT_BATCH, _ARRAY_AT - len(_NEXT_BATCH)):
        return None
    size = raw_bson.read_int32(reply, _ARRAY_AT)
    if size == len(raw_bson.EMPTY_DOCUMENT):
        return _NOTHING
    # An array of one document is that, the element's type and name, its own length and its end.
    return _ONE_EVENT if raw_bson.read_int32(reply, _ARRAY_AT + 7) == size - 8 else None


def facts_of_reply(reply: bytes) -> CursorFacts:
    found = raw_bson.find(reply, b"cursor")
    if found is None:
        code = raw_bson.find(reply, b"code")
        return CursorFacts(0, "", 0, 0 if code is None else raw_bson.read_int32(reply, code.value_start))
    cursor_id, namespace, events = 0, "", 0
    for element in raw_bson.elements(reply, found.value_start):
        if element.name == b"id":
            cursor_id = raw_bson.read_int64(reply, element.value_start)
        elif element.name == b"ns":
            namespace = raw_bson.read_string(reply, element.value_start).decode("utf-8", "replace")
        elif element.name in (b"firstBatch", b"nextBatch"):
            events = sum(1 for _ in raw_bson.elements(reply, element.value_start))
    return CursorFacts(cursor_id, namespace, events, None)


def is_left(code: int | None) -> bool:
    """Whether the server is to answer an aggregate that the engine refuses with ``code``. A command with a fault may
    have a second one, and which of them is reported depends on the order of the server's checks. Besides, the server
    supports some of what the engine does not. An error after which drivers resume is about the stream, not the
    command."""
    return code is not None and code not in RESUMABLE_CODES


def reached(reply: bytes) -> ClusterTime:
    """The cluster time of a reply's resume token: the stream was read up to there. 0 if there is none."""
    # The first value of a token is its time, most significant byte first, after the byte of its type.
    digits = _token_of(reply)[2:18]
    return ClusterTime(int(digits, 16) if digits else 0)


def token_form(reply: bytes) -> bytes | None:
    """In which version a reply's resume token is written; ``None`` if there is none."""
    return _token_of(reply)[18:22] or None


def _token_of(reply: bytes) -> bytes:
    """The text of a reply's resume token; empty if there is none."""
    if reply.startswith(_NEXT_BATCH, _ARRAY_AT - len(_NEXT_BATCH)):  # our own replies to a getMore: nothing to look for
        at = _ARRAY_AT + raw_bson.read_int32(reply, _ARRAY_AT)
        if reply.startswith(_TOKEN, at):
            at += len(_TOKEN) + _DATA_AT
            return reply[at : at + _DATA_BYTES]
    cursor = raw_bson.find(reply, b"cursor")
    token = None if cursor is None else raw_bson.find(reply, b"postBatchResumeToken", cursor.value_start)
    data = None if token is None else raw_bson.find(reply, b"_data", token.value_start)
    return b"" if data is None else raw_bson.read_string(reply, data.value_start)[:_DATA_BYTES]
