"""What a cursor asks of its driver: values, never calls. The needs of its stream pass through among them.

Times of the clock are milliseconds of one monotonic clock that the driver chooses; the cursor only compares them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.stream import ONE_OPLOG, Need


@dataclass(frozen=True, slots=True)
class NeedStart:
    """Asked when a stream is opened. Answer: ``StreamStart``."""

    scope: Scope


class StreamStart(NamedTuple):
    """``operation_time``  of the last entry applied: a stream without a start begins one tick later
    ``kind``            what the namespace of a collection scope is now; an absent one is a "collection"
    ``shards``          of a sharded cluster the names in ``config.shards``; ``None`` over a single oplog
    ``config_after``    of a cluster a time known before ``shards`` was read, after which the config server's oplog
                        is read too (``tailrace.core.stream.merge.CONFIG_SHARDS``); ``None``: no shard is added
    ``knows_past``      the driver knows who was a shard when: a stream with a start asks for its ``Members``
    """

    operation_time: ClusterTime
    kind: Literal["collection", "view", "timeseries"] = "collection"
    shards: tuple[str, ...] | None = None
    config_after: ClusterTime | None = None
    knows_past: bool = False


@dataclass(frozen=True, slots=True)
class NeedMembers:
    """Asked of a driver that ``knows_past`` for a stream over a cluster that reads after a time of the caller's.
    Answer: ``Members``."""

    after: ClusterTime


class Members(NamedTuple):
    """``shards``        those that a stream begins with, and from when on each is read: shards that have gone too
    ``config_after``  as in ``StreamStart``
    """

    shards: tuple[tuple[str, ClusterTime], ...]
    config_after: ClusterTime | None


@dataclass(frozen=True, slots=True)
class NeedOldest:
    """Asked once of each participant, before a stream with a start reads its oplog for the first time. Answer:
    ``OldestEntry``."""

    participant: str = ONE_OPLOG


class OldestEntry(NamedTuple):
    """The oldest entry's cluster time, and whether nothing was ever written before it (``OplogSource.oldest``)."""

    time: ClusterTime
    history_complete: bool


class Position(NamedTuple):
    """Where a participant's oplog is read on: after ``after``."""

    participant: str
    after: ClusterTime


@dataclass(frozen=True, slots=True)
class ReadOplog:
    """Ask for majority-committed entries after any of these positions, in oplog order. Answer: ``OplogRead``.

    ``positions``    one where the stream is over a single oplog; else of those participants that may bring it forward
    ``deadline_ms``  ``None``: answer at once. Else, where there is no entry yet, the answer may wait until that time of
                     the clock; it comes as soon as there is an entry, and at the deadline at the latest
    ``awaited``      an event waits for all these participants to be past this time; a batch without entries may say so
    ``oplog_filter`` a query that every entry meets which the stream needs, joined with conditions on ``ts``; others may
                     be given or not. ``None``: all are needed
    ``events``, ``event_bytes``  what the entries that were given since the last ``ReadOplog`` have become

    A driver that finds the history gone throws ``ChangeStreamHistoryLost`` into the generator, and whatever keeps it
    from reading as the TailraceError that it is.
    """

    positions: tuple[Position, ...]
    deadline_ms: int | None
    awaited: ClusterTime | None = None
    oplog_filter: bytes | None = None
    events: int = 0
    event_bytes: int = 0

    @property
    def after(self) -> ClusterTime:
        """The first position's."""
        return self.positions[0].after


class OplogRead(NamedTuple):
    """``batch``        a run of entries; empty when there was none in time
    ``at_end``       nothing stood after the batch when it was read; over several oplogs: in none of them
    ``now_ms``       the clock when the answer was given
    ``participant``  whose entries they are
    """

    batch: OplogBatch
    at_end: bool
    now_ms: int
    participant: str = ONE_OPLOG


Action: TypeAlias = NeedStart | NeedMembers | NeedOldest | ReadOplog | Need
#: A command being carried out; its value is the reply's BSON.
Acting: TypeAlias = Generator[Action, Any, bytes]
