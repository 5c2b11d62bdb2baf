"""A committed position: the document in which a listener's place in its stream is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bson.timestamp import Timestamp

from tailrace.consumer.rules.errors import LeaseDocumentError
from tailrace.errors import InvalidResumeToken
from tailrace.event.resume_token import ResumeToken
from tailrace.oplog.cluster_time import ClusterTime

#: So many gaps are kept in the position; older ones make room.
GAPS_MAX: Final = 20
_FIELDS: Final = {"token", "startAfter", "at", "gaps", "snapshot"}


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a stream goes on. Exactly one of ``token`` and ``at`` is set.

    ``token``        the resume token of the last change that was handled, or a high-water mark after it
    ``start_after``  the token is that of an invalidate: the stream goes on in a new one (``startAfter``)
    ``at``           before the first token: the cluster time that the listener starts at, that time included
    ``gaps``         the times that were given up after history was lost: ``{"from", "to"}``, oldest first
    ``snapshot``     how far a snapshot has come, where one is under way: a document of ``tailrace.snapshot``
    """

    token: Mapping[str, Any] | None = None
    start_after: bool = False
    at: Timestamp | None = None
    gaps: tuple[Mapping[str, Any], ...] = ()
    snapshot: Mapping[str, Any] | None = None

    @property
    def cluster_time(self) -> ClusterTime:
        """The cluster time that everything before was handled."""
        if self.token is not None:
            # Every token begins with it: one byte for its type, then eight. Parsing the rest takes 60 µs.
            return ClusterTime(int(self.token["_data"][2:18], 16))
        return ClusterTime.from_timestamp(self.at) if self.at is not None else ClusterTime(0)

    def moved_to(self, token: Mapping[str, Any], *, start_after: bool = False) -> StreamPosition:
        """The position after the change with ``token``; gaps stay written down."""
        return StreamPosition(token, start_after, None, self.gaps, self.snapshot)

    def jumped_to(self, time: Timestamp) -> StreamPosition:
        """The position at ``time``, with what lies between written down as a gap."""
        gap = {"from": self.cluster_time.to_timestamp(), "to": time}
        return replace(self, token=None, start_after=False, at=time, snapshot=None, gaps=(*self.gaps, gap)[-GAPS_MAX:])

    def watch_arguments(self) -> dict[str, Any]:
        """The arguments of ``watch()`` that a stream is opened with."""
        if self.token is not None:
            return {"start_after" if self.start_after else "resume_after": self.token}
        return {"start_at_operation_time": self.at}

    def to_document(self) -> dict[str, Any]:
        """The document to commit."""
        document: dict[str, Any] = {"at": self.at} if self.token is None else {"token": dict(self.token)}
        if self.start_after:
            document["startAfter"] = True
        if self.gaps:
            document["gaps"] = [dict(gap) for gap in self.gaps]
        if self.snapshot is not None:
            document["snapshot"] = dict(self.snapshot)
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any], resource: str) -> StreamPosition:
        """Read a committed position. Raises LeaseDocumentError where it is not one."""
        try:
            if not isinstance(document, Mapping) or set(document) - _FIELDS:
                raise ValueError("it has other fields")
            token, at = document.get("token"), document.get("at")
            if (token is None) == (at is None):
                raise ValueError("it needs one of token and at")
            if token is not None:
                ResumeToken.parse(token)
            elif not isinstance(at, Timestamp):
                raise ValueError("at is not a timestamp")
            snapshot, gaps = document.get("snapshot"), document.get("gaps", [])
            if not isinstance(gaps, (list, tuple)) or not all(isinstance(gap, Mapping) for gap in gaps):
                raise ValueError("gaps is not a list of documents")
            return cls(token, bool(document.get("startAfter", False)), at, tuple(gaps), snapshot)
        except (ValueError, TypeError, InvalidResumeToken) as error:
            raise LeaseDocumentError(
                f"the position in the lease on {resource!r} cannot be read: {error}",
                hint="Put the token of the last handled change there, {token: {_data: ...}}, or use another resource",
            ) from None
