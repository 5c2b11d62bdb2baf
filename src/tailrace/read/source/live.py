"""The contract of a live source: what a stream may ask of one that reads a running deployment.

``MongodSource`` fulfils it directly. A ``RelayedSource`` passes every question on to another live source; classes that
change some of the answers (an archive before the oplog, images computed from it) derive from it and override those.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey
from tailrace.read.source.base import OplogSource

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pymongo.errors import PyMongoError

    from tailrace.core.oplog.witness import EntryMark
    from tailrace.read.source.failure import Backoff

#: Decides what follows a failed command.
OnFailedCommand: TypeAlias = "Callable[[PyMongoError], None]"


@runtime_checkable
class LiveSource(OplogSource, Protocol):
    """The oplog of a replica set or shard that runs, and its deployment."""

    @property
    def client(self) -> MongoClient[Any]:
        """The PyMongo client that the source reads with."""
        ...

    @property
    def server_version(self) -> str:
        """The version whose change streams a client of this deployment would get now, such as "6.0.27"."""
        ...

    def expect_version(self, version: str | Sequence[int] | None) -> None:
        """Read from members alone that give the events of this version: ``tail`` and ``read`` raise OtherVersionError
        where they come to another, before they give anything of its entries. ``None``: from members of any version."""
        ...

    def expect_present_version(self) -> None:
        """As ``expect_version``, of the version that the member to be read has now."""
        ...

    def version_read(self) -> str:
        """The server version whose change streams a client would get where this source reads."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why nothing can be read at the moment: the members and the state of each. ``None`` while reading goes
        well."""
        ...

    @property
    def clock_document(self) -> Mapping[str, Any] | None:
        """The ``$clusterTime`` of the last reply to ``tail``, with its signature as the member sent it."""
        ...

    def tail(
        self,
        after: ClusterTime,
        *,
        await_ms: int = ...,
        batch_bytes_max: int = ...,
        oplog_filter: bytes | None = ...,
        batch_size: int | None = ...,
        comment: Any = ...,
        on_error: OnFailedCommand | None = ...,
    ) -> Generator[OplogBatch, None, None]:
        """See OplogSource.

        ``batch_size``  bounds the entries of a reply
        ``comment``     marks the commands of the oplog cursor
        ``on_error``    is called in place of waiting when a command has failed: where it returns, an empty batch is
                        given, and the read is opened again when the next one is asked for; what it raises ends the
                        iterator
        """
        ...

    def await_time(self, until: ClusterTime) -> None:
        """The caller of ``tail`` waits for everything up to ``until``, and wants a batch that says so, an empty one
        too."""
        ...

    def mark_between(self, after: ClusterTime, until: ClusterTime) -> EntryMark | None:
        """The mark of the entry at ``until``; where there is none, that of the first after ``after``. ``None`` where
        nothing lies between the two."""
        ...

    def confirm_readable(self, database: str, collection: str) -> None:
        """Raises SourceError where this user may not read the collection, whether it exists or not."""
        ...

    def endure(self, error: PyMongoError, backoff: Backoff) -> None:
        """Wait after an error of ``tail``, so that it may be tried again, and say so in the log and in ``trouble``.
        Raises SourceError where waiting cannot help."""
        ...

    def wait_until_reachable(self) -> None:
        """Wait for a member that can be read, for as long as the source tries or until ``interrupt``. Raises
        SourceError as ``name`` does."""
        ...

    @property
    def interrupted(self) -> bool:
        """Whether ``interrupt`` was called."""
        ...

    def interrupt(self) -> None:
        """End ``tail`` and ``read`` for good, from any thread: they end or raise SourceError as soon as their wait is
        over."""
        ...


class RelayedSource:
    """A live source that answers what ``live`` answers. Its methods are those of ``LiveSource``."""

    def __init__(self, live: LiveSource) -> None:
        self._live = live

    @property
    def name(self) -> str:
        return self._live.name

    @property
    def client(self) -> MongoClient[Any]:
        return self._live.client

    @property
    def server_version(self) -> str:
        return self._live.server_version

    def expect_version(self, version: str | Sequence[int] | None) -> None:
        self._live.expect_version(version)

    def expect_present_version(self) -> None:
        self._live.expect_present_version()

    def version_read(self) -> str:
        return self._live.version_read()

    @property
    def trouble(self) -> str | None:
        return self._live.trouble

    @property
    def clock_document(self) -> Mapping[str, Any] | None:
        return self._live.clock_document

    def oldest(self) -> tuple[ClusterTime, bool]:
        return self._live.oldest()

    def newest(self) -> ClusterTime:
        return self._live.newest()

    def operation_time(self) -> ClusterTime:
        return self._live.operation_time()

    def read(self, after: ClusterTime, until: ClusterTime, **options: Any) -> Iterator[OplogBatch]:
        return self._live.read(after, until, **options)

    def tail(self, after: ClusterTime, **options: Any) -> Generator[OplogBatch, None, None]:
        return self._live.tail(after, **options)

    def await_time(self, until: ClusterTime) -> None:
        self._live.await_time(until)

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        return self._live.entries(times)

    def mark_between(self, after: ClusterTime, until: ClusterTime) -> EntryMark | None:
        return self._live.mark_between(after, until)

    def pre_images(self, keys: Sequence[PreImageKey]) -> Sequence[bytes | None]:
        return self._live.pre_images(keys)

    def documents(self, lookups: Sequence[DocumentLookup]) -> Sequence[bytes | None]:
        return self._live.documents(lookups)

    def confirm_readable(self, database: str, collection: str) -> None:
        self._live.confirm_readable(database, collection)

    def refuse_view(self, database: str, collection: str) -> None:
        self._live.refuse_view(database, collection)

    def endure(self, error: PyMongoError, backoff: Backoff) -> None:
        self._live.endure(error, backoff)

    def wait_until_reachable(self) -> None:
        self._live.wait_until_reachable()

    @property
    def interrupted(self) -> bool:
        return self._live.interrupted

    def interrupt(self) -> None:
        self._live.interrupt()

    def close(self) -> None:
        self._live.close()
