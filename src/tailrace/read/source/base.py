"""The contract of a source: what a stream's driver may ask of an oplog, and what it may rely on.

``MongodSource`` reads a running replica set or shard, ``DumpSource`` a file, ``ArchiveSource`` an archive;
``tests/conformance`` holds all to this page. To write another source, start here. What can also be asked of a source
that reads a running deployment is in ``tailrace.read.source.live``.

**Threads.** A source serves one thread at a time. Methods that only look something up (``entries``, ``pre_images``,
``documents``) may be called while an iterator of ``read`` or ``tail`` is open and suspended in the same thread.

**Errors.** What the caller can do decides the class. ``SourceError``: the store cannot be read now, or this user may
not read it (the server's code where it gave one, such as 13). ``ChangeStreamHistoryLost`` (286): what was asked for is
no longer there, so a new stream is needed. ``OplogFormatError``: the store holds something that is not an oplog entry;
the message says where. ``ServerError``: the server's own refusal, with its code, to be passed on as it is. Iterators
raise at ``next``, never when they are made, and whatever they have given before stays valid. After an error an iterator
has ended; the source itself may be asked again.

**Waiting.** A method waits only where its description says so. A caller's time limit (``pymongo.timeout``) ends a wait
with ``TimeLimitError``, after which the same call may be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey


@runtime_checkable
class OplogSource(Protocol):
    """One oplog: that of a replica set, of a shard, or in a dump."""

    @property
    def name(self) -> str:
        """The replica set's or shard's name, or the dump's path: what errors and offsets call it. Never a URI, so it
        holds no password. Raises SourceError where only the store can tell and it cannot be read."""
        ...

    def oldest(self) -> tuple[ClusterTime, bool]:
        """The cluster time of the oldest entry, and whether history is complete from there: true if that entry is the
        replica set's ``initiating set`` no-op, before which nothing was ever written.

        Of a live oplog the answer is out of date as soon as it is given; ``read`` and ``tail`` check for themselves.
        Raises SourceError where there is no entry at all.
        """
        ...

    def newest(self) -> ClusterTime:
        """The cluster time of the newest entry that a majority has committed: what ``read`` gives without waiting.
        Another member may have answered before, so an answer can be smaller than the last one."""
        ...

    def operation_time(self) -> ClusterTime:
        """The cluster time of the last operation that the store has seen, whether a majority has it or not. A stream
        without a starting point begins one tick later. Of one member it is not smaller than ``newest`` was before."""
        ...

    def read(
        self, after: ClusterTime, until: ClusterTime, *, batch_bytes_max: int = ..., oplog_filter: bytes | None = ...
    ) -> Iterator[OplogBatch]:
        """The majority-committed entries with ``after`` < ts <= ``until``, in oplog order, each once; then it ends.

        ``batch_bytes_max``  no batch is larger, except one that holds a single entry
        ``oplog_filter``     the BSON of a query on entries. Entries that do not pass it may be left out; those that
                             pass never are. A source that cannot ask its store gives all entries, so a caller that
                             passes a filter has to look at the entries again.

        The high water of a batch is the time of its last entry or later, and never goes back. That of the last batch is
        ``until``; the batch may be empty for that. With ``until`` <= ``after`` there is no batch.

        Waits until ``until`` is majority-committed; a dump does not grow, and gives what it has. Elections and cut
        connections are survived, by going on after the last entry given, for as long as the source tries. Closing the
        iterator closes the server's cursor.

        Raises ChangeStreamHistoryLost where the oplog does not reach back to ``after``: its oldest entry is more than a
        tick later and history is not complete from there. It is raised later too, if the oplog is truncated while it
        is read.
        """
        ...

    def tail(
        self, after: ClusterTime, *, await_ms: int = ..., oplog_filter: bytes | None = ...
    ) -> Iterator[OplogBatch]:
        """The majority-committed entries with ts > ``after``, in oplog order, each once, as they come.

        ``await_ms``      when nothing came for this long, an empty batch with the high water known by then, so that the
                          caller gets control back
        ``oplog_filter``  as for ``read``

        Ends only where the store cannot grow (a dump). An ``after`` in the future is waited for. Elections and cut
        connections are survived without an end: an empty batch is given after each attempt. Errors as for ``read``.
        Closing the iterator closes the server's cursor.
        """
        ...

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        """The entries at exactly these times, in the order asked; ``None`` for a time at which the oplog holds none
        (any more). Times may repeat."""
        ...

    def pre_images(self, keys: Sequence[PreImageKey]) -> Sequence[bytes | None]:
        """The documents before these operations, as BSON, in the order asked; ``None`` for one that was not kept, or
        is kept no longer. Keys may repeat. Raises SourceError 13 where this user may not read them."""
        ...

    def documents(self, lookups: Sequence[DocumentLookup]) -> Sequence[bytes | None]:
        """The current documents, as BSON, in the order asked: each at least as new as its event (``after``). ``None``
        for one that is not there, or where the collection is another by now. Lookups may repeat. A source without
        current documents answers ``None`` to all.

        Raises ServerError 166 where the name belongs to a view by now, SourceError 13 where this user may not read the
        collection.
        """
        ...

    def refuse_view(self, database: str, collection: str) -> None:
        """Raises ServerError 166 where the name is a view or a time-series collection now: the server opens no stream
        on those. Nothing where it is a collection, where nothing has the name, or where the source cannot know."""
        ...

    def close(self) -> None:
        """Let go of everything that the source opened. May be called again; afterwards nothing else may be. Iterators
        that are still open end with an error."""
        ...
