"""What a pipeline asks of its driver, and what it gives: values, never calls.

A pipeline is a generator. It yields one of the requests below and is sent the answer, or yields an ``Emit`` and is sent
``None``. So the core does no I/O, and the in-process cursor, the gateway and Spark drive the same stages; a driver may
answer in bulk, from a server, an archive or a test's dictionary. ``tailrace.read.source.drive`` is the plain driver.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.image import DocumentLookup, PreImageKey
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError

__all__ = [
    "Answer",
    "AnswerTooLargeError",
    "DocumentLookup",
    "Emit",
    "NeedDocuments",
    "NeedEntries",
    "NeedPreImages",
    "NeedShard",
    "NeedShardKeys",
    "OplogBatch",
    "PreImageKey",
    "Request",
    "Running",
]


class OplogBatch(NamedTuple):
    """A run of oplog entries in oplog order, and the promise that comes with it.

    ``raw``         the entries' BSON, one after another (what one reply of the server carries); may be empty
    ``high_water``  nothing at or before this cluster time will ever appear that was not given already: the time of the
                    last entry read, matching or not
    ``images``      the documents before the entries' operations, if the reader of the entries computes them (exact
                    images); ``None``: stages ask for them
    """

    raw: bytes
    high_water: ClusterTime
    images: Mapping[PreImageKey | tuple[bytes, int, int], bytes] | None = None


@dataclass(frozen=True, slots=True)
class NeedEntries:
    """Ask for single oplog entries by cluster time (the earlier members of a transaction's chain).

    Answer: ``list[bytes | None]``, one for each time in the order asked; ``None`` where the oplog no longer has it.
    """

    times: tuple[ClusterTime, ...]


@dataclass(frozen=True, slots=True)
class NeedPreImages:
    """Ask for pre-images. Answer: ``Sequence[bytes | None]``, the ``preImage`` documents in the order asked; a
    ``FoundDocuments`` where many come together."""

    keys: Sequence[PreImageKey]


@dataclass(frozen=True, slots=True)
class NeedDocuments:
    """Ask for current documents. Answer: ``Sequence[bytes | None]`` in the order asked, as for pre-images."""

    lookups: Sequence[DocumentLookup]


@dataclass(frozen=True, slots=True)
class NeedShardKeys:
    """Ask for the shard keys of collections as they are now (servers before 5.3 do not log an insert's document key).

    ``uuids``  of the collections, 16 bytes each

    Answer: ``list[bytes | None]`` in the order asked: the key pattern (``key`` of ``config.collections``, BSON such as
    ``{region: 1, _id: 1}``), or ``None`` for a collection that is not sharded or no longer exists.
    """

    uuids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NeedShard:
    """A shard was added to the cluster: read its oplog too. Answer: ``None``.

    The merge has opened the shard by then, and lets nothing that is later pass before the shard is read. If a shard of
    that name is being read, it was removed meanwhile and added again: stop reading it, and begin again here.

    ``name``   its ``_id`` in ``config.shards``
    ``host``   where it is, ``<replica set>/<host:port>,...``
    ``start``  the cluster time of the first entry that counts, inclusive: one tick after the shard was added
    """

    name: str
    host: str
    start: ClusterTime

    @property
    def read_after(self) -> ClusterTime:
        """Read the entries with ts greater than this."""
        return ClusterTime(self.start - 1)


@dataclass(frozen=True, slots=True)
class Emit:
    """Finished events in stream order. Answer: ``None``."""

    events: list[ChangeEvent]


class AnswerTooLargeError(TailraceError):
    """The documents that the kernel has asked for together are too many bytes to be held. It never leaves a stream,
    which then asks for fewer."""

    def __init__(self) -> None:
        super().__init__("the documents that are asked for together are too many bytes to be held")

    def __reduce__(self) -> tuple[object, ...]:
        return (AnswerTooLargeError, ())


Request: TypeAlias = NeedEntries | NeedPreImages | NeedDocuments | NeedShardKeys | NeedShard
Answer: TypeAlias = "Sequence[bytes | None] | None"
Running: TypeAlias = Generator[Request | Emit, Answer, None]
