"""What every source of oplog entries offers. ``mongod``, ``dump`` and (later) ``archive`` give the same entries to the
same stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.plan.request import DocumentLookup, OplogBatch, PreImageKey


class OplogSource(Protocol):
    """One oplog, of one replica set, shard or dump."""

    @property
    def name(self) -> str:
        """The replica set's or shard's name, or the dump's path: what errors and offsets call it."""
        ...

    def oldest(self) -> tuple[ClusterTime, bool]:
        """The cluster time of the oldest entry, and whether history is complete from there: true when that entry is
        the replica set's ``initiating set`` no-op, before which nothing was ever written."""
        ...

    def newest(self) -> ClusterTime:
        """The cluster time of the newest majority-committed entry."""
        ...

    def read(
        self, after: ClusterTime, until: ClusterTime, *, batch_bytes_max: int = ..., oplog_filter: bytes | None = ...
    ) -> Iterator[OplogBatch]:
        """The majority-committed entries with ``after`` < ts <= ``until``, in oplog order, and then the end.

        ``oplog_filter``  a query's BSON: entries that it does not pass need not be given. A source that cannot ask its
                          store such a question gives them all; the high water moves as if it had.

        The last batch's ``high_water`` is ``until``. Waits until ``until`` is majority-committed where it is not yet.
        Raises ChangeStreamHistoryLost (286) where the oplog no longer reaches back to ``after``.
        """
        ...

    def tail(
        self, after: ClusterTime, *, await_ms: int = ..., oplog_filter: bytes | None = ...
    ) -> Iterator[OplogBatch]:
        """The majority-committed entries with ts > ``after``, for ever. When none came for ``await_ms``, an empty batch
        with the high water known by then, so that the caller gets control back. Survives elections and cut
        connections by going on after the last entry given. Closing the iterator closes the server's cursor."""
        ...

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]: ...

    def pre_images(self, keys: Sequence[PreImageKey]) -> list[bytes | None]: ...

    def documents(self, lookups: Sequence[DocumentLookup]) -> list[bytes | None]: ...

    def close(self) -> None: ...
