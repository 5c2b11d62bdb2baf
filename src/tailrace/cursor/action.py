"""What a cursor asks of its driver: values, never calls. The pipeline's own requests pass through beside them.

Times of the clock are milliseconds of one monotonic clock that the driver chooses; the cursor only compares them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.request import OplogBatch, Request


@dataclass(frozen=True, slots=True)
class NeedStart:
    """Asked when a stream is opened. Answer: ``StreamStart``."""

    scope: Scope


class StreamStart(NamedTuple):
    """``operation_time``  of the last entry applied: a stream without a start begins one tick later
    ``kind``            what the namespace of a collection scope is now; an absent one is a "collection"
    """

    operation_time: ClusterTime
    kind: Literal["collection", "view", "timeseries"] = "collection"


@dataclass(frozen=True, slots=True)
class NeedOldest:
    """Asked once, before a stream with a start reads for the first time. Answer: ``OldestEntry``."""


class OldestEntry(NamedTuple):
    """The oldest entry's cluster time, and whether nothing was ever written before it (``OplogSource.oldest``)."""

    time: ClusterTime
    history_complete: bool


@dataclass(frozen=True, slots=True)
class ReadOplog:
    """Ask for majority-committed entries with ts > ``after``, in oplog order. Answer: ``OplogRead``.

    ``deadline_ms``  ``None``: answer at once. Else, where there is no entry yet, the answer may wait until that time of
                     the clock; it comes as soon as there is an entry, and at the deadline at the latest

    A driver that finds the history gone throws ``ChangeStreamHistoryLost`` into the generator, and whatever keeps it
    from reading as the TailraceError that it is.
    """

    after: ClusterTime
    deadline_ms: int | None


class OplogRead(NamedTuple):
    """``batch``   a run of entries; empty when there was none in time
    ``at_end``  nothing stood behind the batch when it was read
    ``now_ms``  the clock when the answer was given
    """

    batch: OplogBatch
    at_end: bool
    now_ms: int


Action: TypeAlias = NeedStart | NeedOldest | ReadOplog | Request
#: A command being carried out; its value is the reply's BSON.
Acting: TypeAlias = Generator[Action, Any, bytes]
