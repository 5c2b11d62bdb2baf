"""A cursor that gives each reply's documents as bytes, without making an object of each on the way.

PyMongo's raw batches are meant for this, yet they build a ``RawBSONDocument`` for every document of a reply before they
join the bytes again: 2.5 of the 6 µs of client CPU that an oplog entry costs from the server to a finished file
(measured with PyMongo 4.20 on 200,000 entries; this is 0.4 µs). Only the unpacking of a reply is replaced; sessions,
retries, pinning and the closing of cursors stay PyMongo's, and so does the unpacking where PyMongo's internals look
different.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from pymongo.cursor import RawBatchCursor

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import OplogFormatError

_BATCHES: Final = (b"firstBatch", b"nextBatch")
#: As PyMongo reads replies: a server's message that is not UTF-8 must not hide the error that it tells.
_CODEC: Final = CodecOptions[dict[str, Any]](unicode_decode_error_handler="replace")

#: A longer reply is left to PyMongo, which waits for the rest of it.
PUSHED_BYTES_MAX: Final = 1 << 16
_LOOK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
#: What an OP_MSG with one document begins with: length, two ids, opcode, flags, kind; then the document's length.
_HEAD: Final = struct.Struct("<iiiiIBi")
_OP_MSG: Final = 2013
_MORE_TO_COME: Final = 2
_BEFORE_DOCUMENT: Final = 21
#: How a successful reply begins, after its length. An error's begins otherwise.
_SUCCESS: Final = b"\x03cursor\x00"
_NEXT_BATCH: Final = b"\x04nextBatch\x00"
#: Where the array of such a reply begins.
_BATCH_AT: Final = 16 + len(_NEXT_BATCH)
_OPERATION_TIME: Final = b"\x11operationTime\x00"
#: What a ``$clusterTime`` begins with: its length, and the name of its time.
_CLOCK_HEAD: Final = 4 + len(b"\x11clusterTime\x00")
#: For a smaller batch the compiled code takes longer, for the fixed work of a call.
_COMPILED_BYTES_MIN: Final = 4_096


class RepeatedReply:
    """What a server's replies to a cursor's getMores have in common after their documents: all but their times.

    ``clock``  the ``$clusterTime`` of the last of them
    """

    def __init__(self, clock: bytes, between: bytes, rest: int, in_cursor: int) -> None:
        self.clock = clock
        #: From the end of the batch to the ``$clusterTime``, and how long everything after the batch is, and the part
        #: of it that is in the cursor.
        self._between = between
        self._rest = rest
        self._in_cursor = in_cursor

    @classmethod
    def of(cls, reply: bytes) -> RepeatedReply | None:
        """``None`` where the reply is not as servers write it."""
        if not _is_usual(reply):
            return None
        past = raw_bson.document_end(reply, _BATCH_AT)
        time = raw_bson.find(reply, b"$clusterTime")
        if time is None or time.type != raw_bson.OBJECT or time.value_start < past:
            return None
        if not reply.startswith(_OPERATION_TIME, time.end) or len(reply) != time.end + len(_OPERATION_TIME) + 9:
            return None
        in_cursor = raw_bson.document_end(reply, 12) - past
        return cls(reply[time.value_start : time.end], reply[past : time.value_start], len(reply) - past, in_cursor)

    def documents(self, reply: bytes) -> bytes | None:
        """The documents of a reply that is like the last one in all else; ``None``: it is not, or it has none. Raises
        OplogFormatError where they are not BSON."""
        if not _is_usual(reply) or len(reply) < _BATCH_AT + self._rest + 5:
            return None
        past = len(reply) - self._rest
        time = past + len(self._between)
        after = time + len(self.clock)
        is_like = (
            raw_bson.read_int32(reply, _BATCH_AT) == past - _BATCH_AT
            and raw_bson.read_int32(reply, 12) == past + self._in_cursor - 12
            and reply.startswith(self._between, past)
            and reply.startswith(self.clock[:_CLOCK_HEAD], time)
            and reply.startswith(_OPERATION_TIME, after)
        )
        if not is_like:
            return None
        found = _documents(reply, _BATCH_AT)
        self.clock = reply[time:after]
        return found or None


class RawReplyCursor(RawBatchCursor[Any]):
    """``collection.find_raw_batches(...)``, faster: ``RawReplyCursor(collection, ...)``."""

    #: Whether there was more after what ``take_pushed`` has taken.
    has_pushed_more = False
    #: The last pushed reply; ``None`` where PyMongo has read one since.
    _repeated: RepeatedReply | None = None
    #: The member's times in the last reply that was unpacked.
    _times: Mapping[str, Any] = {}

    @property
    def is_pushed(self) -> bool:
        """Whether the server sends the next reply without being asked."""
        return self._sock_mgr is not None and self._sock_mgr.more_to_come

    def wait_at_most(self, milliseconds: int) -> None:
        """How long the server waits for entries from the next reply on; PyMongo's own setter is for unused cursors."""
        self._max_await_time_ms = milliseconds

    def pushed_socket(self) -> socket.socket | None:
        """A second handle of the connection on which the server pushes replies (an exhaust cursor); ``None`` if it does
        not, if the connection is encrypted or compressed, or if somebody listens for each command. The caller
        closes it."""
        manager = self._sock_mgr
        if manager is None or manager.conn is None or not manager.more_to_come or self._killed:
            return None
        if self._collection.database.client._event_listeners.enabled_for_commands:
            return None
        if manager.conn.compression_context is not None:
            return None
        own: Any = manager.conn.conn.sock
        # A handle of its own has no time-out, so looking never waits, and its number stays valid whatever PyMongo does.
        return socket.socket(fileno=os.dup(own.fileno())) if type(own) is socket.socket else None

    def take_pushed(self, view: socket.socket) -> bool | None:
        """Take the next pushed reply without waiting: ``next`` then gives its documents at once. ``None``: nothing has
        come. False: what has come is for ``next`` to read, which may wait: a part of a reply, a long one, one without
        documents, an error, the end of the connection.

        ``view``  what ``pushed_socket`` gave
        """
        try:
            seen = view.recv(PUSHED_BYTES_MAX, _LOOK)
        except BlockingIOError:
            return None
        except OSError:
            return False
        if len(seen) < _HEAD.size:
            return False
        length, _, _, op_code, flags, kind, size = _HEAD.unpack_from(seen)
        is_plain = (op_code, flags, kind, size) == (_OP_MSG, _MORE_TO_COME, 0, length - _BEFORE_DOCUMENT)
        if not is_plain or length > len(seen) or not seen.startswith(_SUCCESS, _HEAD.size):
            return False
        raw = seen[_BEFORE_DOCUMENT:length]
        try:
            # PyMongo's session learns of such a reply's times when one comes that is not like the last.
            documents = None if self._repeated is None or self._data else self._repeated.documents(raw)
            documents = documents or self._of_new(raw)
        except (OplogFormatError, BSONError):
            return False
        if not documents:
            return False
        view.recv(length)
        self.has_pushed_more = length < len(seen)
        self._data.append(documents)
        self._retrieved += 1
        return True

    @property
    def clock(self) -> bytes | None:
        """The ``$clusterTime`` of the last reply, as it came."""
        if self._repeated is not None:
            return self._repeated.clock
        known = self._times.get("$clusterTime")
        return None if known is None else bson.encode(known)

    @property
    def operation_time(self) -> ClusterTime:
        """The ``operationTime`` of the last reply that was unpacked; 0 before the first."""
        known = self._times.get("operationTime")
        return ClusterTime(0) if known is None else ClusterTime.from_timestamp(known)

    def _of_new(self, raw: bytes) -> bytes | None:
        """The documents of a pushed reply; ``None`` if it is for PyMongo."""
        reply = unpacked(raw)
        documents: list[bytes] | None = reply["cursor"].get("nextBatch")
        if not documents or reply["cursor"].get("id") != self._id or reply.get("ok") != 1 or self._data:
            return None
        self._collection.database.client._process_response(reply, self._session)
        self._times = _times_of(reply)
        self._repeated = RepeatedReply.of(raw)
        return documents[0]

    def _send_message(self, operation: Any) -> None:
        # PyMongo treats 43, 175 and 237 of a tailable cursor as the end of the data, and hides them. Here the caller
        # gets the error; the command itself says that the cursor is tailable.
        flags, self._query_flags = self._query_flags, 0
        try:
            super()._send_message(operation)
        finally:
            self._query_flags = flags

    def _unpack_response(self, response: Any, *args: Any, **options: Any) -> Any:
        self._repeated = None
        raw_reply = getattr(response, "raw_command_response", None)
        if raw_reply is None:
            found = super()._unpack_response(response, *args, **options)
        else:
            found = [unpacked(bytes(raw_reply()))]
        self._times = _times_of(found[0])
        return found


def _times_of(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {name: reply[name] for name in ("$clusterTime", "operationTime") if name in reply}


def unpacked(reply: bytes) -> dict[str, Any]:
    """A command's reply, decoded except for the documents of its cursor's batch, which come as one run of bytes. Raises
    OplogFormatError where the reply is not BSON.
    """
    if _is_usual(reply):
        batch_end, end = raw_bson.document_end(reply, _BATCH_AT), raw_bson.document_end(reply, 12)
        if batch_end < end:
            rest = raw_bson.encode_document(reply[batch_end : end - 1])
            return _with_batch(raw_bson.encode_document(_SUCCESS, rest, reply[end:-1]), "nextBatch", reply, _BATCH_AT)
    cursor = raw_bson.find(reply, b"cursor")
    if cursor is None or cursor.type != raw_bson.OBJECT:
        return bson.decode(reply, _CODEC)
    inside = list(raw_bson.elements(reply, cursor.value_start))
    batch = next((element for element in inside if element.name in _BATCHES), None)
    if batch is None:
        return bson.decode(reply, _CODEC)
    others = [reply[element.start : element.end] for element in inside if element is not batch]
    envelope = raw_bson.encode_document(
        reply[4 : cursor.value_start], raw_bson.encode_document(*others), reply[cursor.end : -1]
    )
    return _with_batch(envelope, batch.name.decode(), reply, batch.value_start)


def _is_usual(reply: bytes) -> bool:
    """Whether a reply begins as servers answer a getMore."""
    return reply.startswith(_SUCCESS, 4) and reply.startswith(_NEXT_BATCH, 16)


def _with_batch(envelope: bytes, name: str, reply: bytes, start: int) -> dict[str, Any]:
    """A reply without its batch, decoded, and the batch that stands at ``start`` of the whole reply."""
    decoded = bson.decode(envelope, _CODEC)
    run = _documents(reply, start)
    decoded["cursor"][name] = [run] if run else []
    return decoded


def _documents(reply: bytes, start: int) -> bytes:
    # Compiled where somebody has loaded the kernel; a read must not wait for that.
    compiled = getattr(sys.modules.get("tailrace.core.kernel.reply"), "array_documents", None)
    is_small = raw_bson.read_int32(reply, start) < _COMPILED_BYTES_MIN
    found: bytes | None = None if compiled is None or is_small else compiled(reply, start)
    return raw_bson.array_documents(reply, start) if found is None else found
