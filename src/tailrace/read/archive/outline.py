"""How much lies in a range of an archive, and where: ``source.outline`` asks a server, this module asks segments.

A range that begins before the oplog does is outlined by the archive up to its end, and by the server from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

import bson
import numpy as np
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.read.archive.hybrid import HybridSource
from tailrace.read.archive.passing import passing
from tailrace.read.archive.segment import SegmentReader
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.outline import Bucket, OneOutline, Weights, invalidating, scope_filter

_CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)
_TRANSACTIONS: Final = ("c", "admin.$cmd")


class ArchiveOutline:
    """Counts and questions about one archived oplog, for one scope. A bucket is a row group, or a part of one."""

    def __init__(self, archive: ArchiveSource, scope: Scope | Selection) -> None:
        self._archive = archive
        self._scope = scope
        self._passes = passing(bson.encode(scope_filter(scope)))

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The entries of the scope with ``after`` < ts <= ``until`` in ascending buckets. Sizes are by the segment's
        average entry."""
        for reader, group in self._groups(after, until):
            found = self._found(reader, group, after, until)
            average = max(1, int(reader.about["bytes"]) // max(1, int(reader.about["entries"])))
            if found:
                events = sum(count for _, count in found)
                yield Bucket(found[0][0], found[-1][0], len(found), events, len(found) * average)

    def entries(self, bucket: Bucket) -> list[Bucket]:
        """The entries of ``bucket`` one by one."""
        after = ClusterTime(bucket.first - 1)
        average = max(1, bucket.bytes // max(1, bucket.entries))
        return [
            Bucket(time, time, 1, events, average)
            for reader, group in self._groups(after, bucket.last)
            for time, events in self._found(reader, group, after, bucket.last)
        ]

    def first_invalidating(
        self, after: ClusterTime, until: ClusterTime, *, show_migration_events: bool
    ) -> ClusterTime | None:
        """The cluster time of the first entry in the range that ends a stream of the scope, or ``None``."""
        if isinstance(self._scope, Selection) or invalidating(self._scope) is None:
            return None
        commands = f"{self._scope.database}.$cmd"
        for reader, group in self._groups(after, until):
            codes, named = reader.pairs(group)
            if ("c", commands) not in named:
                continue
            rows = np.flatnonzero(codes.to_numpy() == named.index(("c", commands)))
            times, entries = reader.times(group), reader.column(group, "entry")
            for row in rows:
                time = ClusterTime(int(times[row]))
                if after < time <= until and ends_stream(
                    entries[int(row)].as_py(), self._scope, show_migration_events=show_migration_events
                ):
                    return time
        return None

    def _groups(self, after: ClusterTime, until: ClusterTime) -> Iterator[tuple[SegmentReader, int]]:
        for reader in self._archive.readers(after, until):
            for group in range(reader.row_groups):
                low, high = reader.bounds(group)
                if high > after and low <= until:
                    yield reader, group

    def _found(
        self, reader: SegmentReader, group: int, after: ClusterTime, until: ClusterTime
    ) -> list[tuple[ClusterTime, int]]:
        """The entries of the scope in a row group: each one's time, and how many events it gives at most."""
        codes, named = reader.pairs(group)
        passes = self._passes
        wanted = np.array([passes is None or passes(*pair) for pair in named], np.bool_)
        times, numbers = reader.times(group), codes.to_numpy()
        rows = np.flatnonzero(wanted[numbers] & (times > np.uint64(after)) & (times <= np.uint64(until)))
        transactions = named.index(_TRANSACTIONS) if _TRANSACTIONS in named else -1
        entries = reader.column(group, "entry") if (numbers[rows] == transactions).any() else None
        return [
            (
                ClusterTime(int(times[row])),
                1 if entries is None or numbers[row] != transactions else events_of(entries[int(row)].as_py()),
            )
            for row in rows
        ]


class HybridOutline:
    """An outline of a range that may begin in the archive. See ``source.outline.OplogOutline`` for the methods."""

    def __init__(self, source: HybridSource, live: OneOutline, scope: Scope | Selection) -> None:
        self._source = source
        self._live = live
        self._scope = scope

    def _parts(self, after: ClusterTime, until: ClusterTime) -> tuple[ArchiveOutline | None, ClusterTime]:
        """The archive's outline, if the range begins there, and the time up to which it answers."""
        if not self._source.is_archived(after):
            return None, after
        archive = self._source.archive()
        return ArchiveOutline(archive, self._scope), min(until, max(after, archive.newest()))

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        archived, edge = self._parts(after, until)
        if archived is None:
            return self._live.buckets(after, until)
        rest = self._live.buckets(edge, until) if edge < until else iter(())
        return chain(archived.buckets(after, edge), rest)

    def even_buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        return self.buckets(after, until) if self._source.is_archived(after) else self._live.even_buckets(after, until)

    def mostly_matches(self, after: ClusterTime, until: ClusterTime) -> bool:
        return not self._source.is_archived(after) and self._live.mostly_matches(after, until)

    def weigh(self, after: ClusterTime, until: ClusterTime) -> Weights:
        """In the archive a filter skips whole row groups, so it is always used."""
        if self._source.is_archived(after):
            return Weights(list(self.buckets(after, until)), 0.0)
        return self._live.weigh(after, until)

    def entries(self, bucket: Bucket) -> list[Bucket]:
        archived, _ = self._parts(ClusterTime(bucket.first - 1), bucket.last)
        return self._live.entries(bucket) if archived is None else archived.entries(bucket)

    def is_smaller_than(self, size: int) -> bool:
        """Never known: the archive sets no bound."""
        return False

    def any(self, after: ClusterTime, until: ClusterTime) -> bool:
        """Whether an entry in the range could give an event. For archived entries always true, without looking."""
        return self._source.is_archived(after) or self._live.any(after, until)

    def first_invalidating(
        self, after: ClusterTime, until: ClusterTime, *, show_migration_events: bool
    ) -> ClusterTime | None:
        archived, edge = self._parts(after, until)
        if archived is not None:
            found = archived.first_invalidating(after, edge, show_migration_events=show_migration_events)
            if found is not None:
                return found
        return self._live.first_invalidating(edge, until, show_migration_events=show_migration_events)


def events_of(entry: bytes) -> int:
    """How many events a command of ``admin.$cmd`` gives at most: those of a transaction come with its last entry, whose
    ``count`` is the whole chain's; the earlier ones and a prepared one give none."""
    body = _body(entry)
    operations = body.get("applyOps")
    if body.get("partialTxn") is True or body.get("prepare") is True:
        return 0
    count = len(operations) if isinstance(operations, list) else 1
    chain_count = body.get("count")
    return max(chain_count, count) if isinstance(chain_count, bson.Int64) else count


def ends_stream(entry: bytes, scope: Scope, *, show_migration_events: bool) -> bool:
    """Whether a command on the scope's database ends the stream of the scope (see ``source.outline.invalidating``)."""
    body = _body(entry)
    if "applyOps" in body or (not show_migration_events and _decoded(entry).get("fromMigrate") is True):
        return False
    if scope.kind == "database":
        return "dropDatabase" in body
    names = (scope.collection, f"{scope.collection}\n")
    namespaces = [f"{scope.database}.{name}" for name in names]
    return body.get("drop") in names or any(body.get(name) in namespaces for name in ("renameCollection", "to"))


def _body(entry: bytes) -> Mapping[str, Any]:
    body = _decoded(entry).get("o")
    return body if isinstance(body, dict) else {}


def _decoded(entry: bytes) -> dict[str, Any]:
    try:
        return bson.decode(entry, _CODEC)
    except (BSONError, ValueError, OverflowError, RecursionError):
        return {}
