"""An event that cannot be given, put aside with the reason so that the stream goes on without it."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.core import raw_bson
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError, invariant


@dataclass(frozen=True, slots=True)
class QuarantinedEvent:
    """``event`` is the event's BSON before the user's stages, and before the image that could not be looked up; it may
    be larger than a BSON document of the server can be. ``token`` is its resume token, as hexadecimal digits.

    ``code``  the server's, where the stream would have ended with one
    """

    token: str
    namespace: str
    event: bytes
    reason: str
    code: int | None = None

    @property
    def cluster_time(self) -> ClusterTime:
        """The event's."""
        return ClusterTime(int(self.token[2:18], 16))  # a copy's tokens begin in the same way

    @classmethod
    def of(cls, event: ChangeEvent, error: TailraceError) -> QuarantinedEvent:
        """An event at which a stage raised ``error``."""
        event.replaced_by = None
        names = [name for name in (event.database, event.collection) if name is not None]
        return cls(event.token.data, ".".join(names), event.to_bson(), error.message, error.code)

    @classmethod
    def of_document(cls, event: bytes, reason: str, code: int | None = None) -> QuarantinedEvent:
        """A finished event, as bytes."""
        token = raw_bson.find(event, b"_id")
        data = None if token is None else raw_bson.find(event, b"_data", token.value_start)
        invariant(data is not None and data.type == raw_bson.STRING, "an event without a resume token")
        assert data is not None
        text = raw_bson.read_string(event, data.value_start).decode("ascii")
        return cls(text, namespace_of(event), event, reason, code)


def namespace_of(event: bytes) -> str:
    """The namespace that an event shows; empty where a pipeline has taken it away."""
    found = raw_bson.find(event, b"ns")
    if found is None or found.type != raw_bson.OBJECT:
        return ""
    names = {
        element.name: raw_bson.read_string(event, element.value_start).decode("utf-8", "replace")
        for element in raw_bson.elements(event, found.value_start)
        if element.type == raw_bson.STRING
    }
    return ".".join(names[name] for name in (b"db", b"coll") if name in names)
