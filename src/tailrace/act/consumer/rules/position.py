"""A committed position: the document in which a listener's place in its stream is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.errors import LeaseDocumentError
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark, marks_from_json, marks_to_json
from tailrace.errors import InvalidResumeToken

#: How many gaps are kept in the position; of more, those that are nearest to each other become one.
GAPS_MAX: Final = 20
_FIELDS: Final = {"token", "startAfter", "at", "gaps", "snapshot", "deployment", "entries", "began"}


def join_gaps(*several: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Gaps of several positions as those of one, oldest first: what adjoins or overlaps is one gap, and nothing that
    one of them covers is left out."""
    gaps: list[dict[str, Any]] = []
    for gap in sorted(chain(*several), key=lambda one: (one["from"], one["to"])):
        if gaps and gap["from"] <= gaps[-1]["to"]:
            gaps[-1]["to"] = max(gaps[-1]["to"], gap["to"])
        else:
            gaps.append({"from": gap["from"], "to": gap["to"]})
    while len(gaps) > GAPS_MAX:
        at = min(range(1, len(gaps)), key=lambda n: _ticks(gaps[n]["from"]) - _ticks(gaps[n - 1]["to"]))
        gaps[at - 1]["to"] = gaps.pop(at)["to"]
    return tuple(gaps)


def _ticks(time: Timestamp) -> int:
    return int(ClusterTime.from_timestamp(time))


def _is_gap(gap: object) -> bool:
    return isinstance(gap, Mapping) and all(isinstance(gap.get(name), Timestamp) for name in ("from", "to"))


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a stream continues. Exactly one of ``token`` and ``at`` is set.

    Attributes:
        token: the resume token of the last change that was handled, or a high-water mark after it
        start_after: the token is that of an invalidate: the stream continues as a new one (``startAfter``)
        at: before the first token: the cluster time that the listener starts at, that time included
        gaps: the ranges of time that were given up after history was lost: ``{"from", "to"}``, oldest first
        snapshot: how far a snapshot has come, if one is under way: a document of ``tailrace.read.snapshot``
        deployment: what the stream was read from (``DeploymentIdentity.name_and_id``); ``None`` where that is unknown
        entries: marks of oplog entries at or before the position, by the oplog's name: they show whether the deployment
            still has the history that the position belongs to
        began: when the listener began, as long as the position is before that: a drop from before then does not end it
    """

    token: Mapping[str, Any] | None = None
    start_after: bool = False
    at: Timestamp | None = None
    gaps: tuple[Mapping[str, Any], ...] = ()
    snapshot: Mapping[str, Any] | None = None
    deployment: str | None = None
    entries: Mapping[str, EntryMark] = field(default_factory=dict)
    began: Timestamp | None = None

    @property
    def cluster_time(self) -> ClusterTime:
        """The cluster time before which everything was handled."""
        if self.token is not None:
            # Every token begins with it: one byte for its type, then eight. Parsing the rest takes 60 µs.
            return ClusterTime(int(self.token["_data"][2:18], 16))
        return ClusterTime.from_timestamp(self.at) if self.at is not None else ClusterTime(0)

    def move_to(self, token: Mapping[str, Any], *, start_after: bool = False) -> StreamPosition:
        """The position after the change with ``token``; the record of gaps is kept."""
        moved = StreamPosition(token, start_after, None, self.gaps, self.snapshot, self.deployment, self.entries)
        if self.began is None or moved.cluster_time > ClusterTime.from_timestamp(self.began):
            return moved
        return replace(moved, began=self.began)

    def jump_to(self, time: Timestamp) -> StreamPosition:
        """The position at ``time``, with what lies between written down as a gap."""
        gap = {"from": self.cluster_time.to_timestamp(), "to": time}
        return replace(self, token=None, start_after=False, at=time, snapshot=None, gaps=join_gaps(self.gaps, [gap]))

    def sought(self, target: StreamPosition) -> StreamPosition:
        """The position at ``target``, where an operator puts it. If that is further on, what lies between is recorded
        as a gap; if it is further back, what will be read again no longer counts as one."""
        begin, end = self.cluster_time.to_timestamp(), target.cluster_time.to_timestamp()
        kept = [{"from": gap["from"], "to": min(gap["to"], end)} for gap in self.gaps if gap["from"] < end]
        passed = [{"from": begin, "to": end}] if begin < end else []
        return replace(target, gaps=join_gaps(kept, passed), deployment=self.deployment)

    def watch_arguments(self) -> dict[str, Any]:
        """The arguments of ``watch()`` with which a stream is opened."""
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
        if self.deployment is not None:
            document["deployment"] = self.deployment
        if self.entries:
            document["entries"] = marks_to_json(self.entries)
        if self.began is not None:
            document["began"] = self.began
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any], resource: str) -> StreamPosition:
        """Read a committed position. Raises LeaseDocumentError if the document is not one."""
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
            deployment = document.get("deployment")
            if deployment is not None and not isinstance(deployment, str):
                raise ValueError("deployment is not a string")
            if not isinstance(gaps, (list, tuple)) or not all(map(_is_gap, gaps)):
                raise ValueError("gaps is not a list of documents with two times")
            entries, began = marks_from_json(document.get("entries", {})), document.get("began")
            if began is not None and not isinstance(began, Timestamp):
                raise ValueError("began is not a timestamp")
            start_after = bool(document.get("startAfter", False))
            return cls(token, start_after, at, tuple(gaps), snapshot, deployment, entries, began)
        except (ValueError, TypeError, LookupError, AttributeError, InvalidResumeToken) as error:
            raise LeaseDocumentError(
                f"the position in the lease on {resource!r} cannot be read: {error}",
                hint="Put the token of the last handled change there, {token: {_data: ...}}, or use another resource",
            ) from None
