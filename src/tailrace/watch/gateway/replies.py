"""Our own replies, as the server would send them: with its times, or merged from two parts. No I/O."""

from __future__ import annotations

from typing import Final

from tailrace.core import raw_bson
from tailrace.core.cursor.reply import kill_reply
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import ARRAY, BINARY, INT32, INT64, OBJECT, TIMESTAMP, encode_element
from tailrace.errors import OplogFormatError

#: The key's number in a signature of nobody: deployments without keys send it, and so do others to those who may set
#: the clock.
_NO_KEY: Final = bytes(8)


class ServerClock:
    """The newest times that the server has sent, for replies that it did not make itself.

    Times are passed on as they were received, signature included: drivers send them back, and a server with users
    accepts only signed ones. It sends unsigned times to users who may set its clock; they are not passed on to others.

    ``signed``  the server has users: only signed times are passed on
    """

    def __init__(self, *, signed: bool = False) -> None:
        self.signed = signed
        #: An error of 4.4 has ``operationTime`` before ``ok``.
        self.operation_time_first = False
        self._document: bytes | None = None
        self._time = ClusterTime(0)

    @property
    def document(self) -> bytes | None:
        """The ``$clusterTime`` that is passed on; ``None`` if none is known."""
        return self._document

    @property
    def time(self) -> ClusterTime:
        """The newest time; 0 if none is known."""
        return self._time

    def saw(self, document: bytes) -> None:
        """Note a ``$clusterTime`` document that the server sent."""
        if document == self._document:
            return
        try:
            time = raw_bson.find(document, b"clusterTime")
            if time is None or time.type != TIMESTAMP or (self.signed and not _is_signed(document)):
                return
            seen = ClusterTime.from_bytes_le(raw_bson.value(document, time))
        except OplogFormatError:
            return
        if self._document is None or seen > self._time:
            self._time, self._document = seen, bytes(document)

    def saw_reply(self, reply: bytes) -> None:
        """Note the time in a reply of the server, if it carries one."""
        element = raw_bson.find(reply, b"$clusterTime")
        if element is not None and element.type == OBJECT:
            self.saw(raw_bson.value(reply, element))

    def stamp(self, reply: bytes, operation_time: ClusterTime) -> bytes:
        """The reply with ``$clusterTime`` and ``operationTime`` at its end, where times are known.

        ``operation_time``  up to where the reply's stream was read; cut to the cluster time if it is beyond that
        """
        if self._document is None:
            return reply
        time = min(operation_time, self._time) or self._time
        reached = encode_element(TIMESTAMP, b"operationTime", time.to_bytes_le())
        cluster = encode_element(OBJECT, b"$clusterTime", self._document)
        if self.operation_time_first and (ok := raw_bson.find(reply, b"ok")) is not None and not is_ok(reply):
            return raw_bson.encode_document(reply[4 : ok.start], reached, reply[ok.start : -1], cluster)
        return raw_bson.encode_document(reply[4:-1], cluster, reached)


def _is_signed(document: bytes) -> bool:
    signature = raw_bson.find(document, b"signature")
    if signature is None or signature.type != OBJECT:
        return False
    inner = raw_bson.value(document, signature)
    key, digest = raw_bson.find(inner, b"keyId"), raw_bson.find(inner, b"hash")
    if key is None or digest is None or key.type != INT64 or digest.type != BINARY:
        return False
    return raw_bson.value(inner, key) != _NO_KEY


def is_ok(reply: bytes) -> bool:
    """Whether a command succeeded."""
    element = raw_bson.find(reply, b"ok")
    return element is not None and any(raw_bson.value(reply, element))


def code_of(reply: bytes) -> int | None:
    """An error's code; ``None`` if the reply is not an error."""
    code = None if is_ok(reply) else raw_bson.find(reply, b"code")
    return None if code is None or code.type != INT32 else raw_bson.read_int32(reply, code.value_start)


def merged_kills(wanted: list[int], killed: set[int], theirs: bytes | None) -> bytes:
    """The reply to a killCursors command of which ``killed`` were ours and the server has answered the rest."""
    gone = set(killed)
    killed_there = None if theirs is None else raw_bson.find(theirs, b"cursorsKilled")
    if theirs is not None and killed_there is not None and killed_there.type == ARRAY:
        array = raw_bson.value(theirs, killed_there)
        gone |= {raw_bson.read_int64(array, each.value_start) for each in raw_bson.elements(array)}
    done: list[int] = []
    missing: list[int] = []
    for one in wanted:  # the server does not find an id the second time
        (done if one in gone else missing).append(one)
        gone.discard(one)
    return kill_reply(done, missing)
