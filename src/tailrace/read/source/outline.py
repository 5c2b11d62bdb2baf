"""How much lies in a range of an oplog, and where: counted by the server, a few numbers for each thousand entries.

Planning a micro-batch must not cost what reading it costs. Measured on mongod 6.0.27, 200 thousand entries, CPU of
server and client for each entry: reading 4.4 µs, sizes by projection 1.5 µs, sums by ``$group`` 0.65 µs, a query with
one condition in addition to the cluster time 0.5 µs, skipping 0.2 µs. So the server sums up buckets of at most 1024
cluster times, and only the one bucket in which a limit falls is listed entry by entry. Where an estimate is enough,
entries are skipped (``even_buckets``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

from pymongo.collection import Collection

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SourceError
from tailrace.read.source.connection import Connection

#: ``$tsSecond`` and ``$tsIncrement`` came with 5.1; earlier servers list sizes, which are summed up here.
_TS_OPERATORS_SINCE: Final = (5, 1)
#: Increments of one second that share a bucket.
_BUCKET: Final = 1024
#: Entries that one aggregate looks at: bounds what is counted beyond a limit, and the number of buckets in a reply.
_PAGE: Final = 200_000
#: Entries drawn at random from the whole oplog, and how many of them must lie in a range to speak for it.
_SAMPLE: Final = 1000
_SAMPLE_HITS_MIN: Final = 20
#: Up to how many entries a range is counted in less time than a sample takes.
_SHORT: Final = 4096
#: Even buckets: how many of the least size there are at most in an oplog, the greatest least size, and after how many
#: of a size the next ones are twice as large.
_EVEN_PARTS: Final = 64
_EVEN_MAX: Final = 8192
_EVEN_RUN: Final = 32
#: Part of a range's entries from which on the scope's filter of the oplog query is left out, and counting by it too
#: (measured: 0.9 µs of server CPU to read an entry, 3 more to ask it).
MOST: Final = 0.5

_OPERATIONS: Final = {"$cond": [{"$isArray": "$o.applyOps"}, {"$size": "$o.applyOps"}, 1]}
#: A chain's last entry counts the whole chain, in an int64; anything else under that name is no count.
_OPERATIONS_OF_CHAIN: Final = {
    "$cond": [{"$eq": [{"$type": "$o.count"}, "long"]}, {"$max": ["$o.count", _OPERATIONS]}, _OPERATIONS]
}
#: Only there does ``o`` hold a transaction. In a write's entry it is a user's document, with fields of any name.
_IS_COMMAND_OF_ADMIN: Final = {"$and": [{"$eq": ["$op", "c"]}, {"$eq": ["$ns", "admin.$cmd"]}]}
#: Events of an entry. A transaction's are given with its last entry, whose ``count`` is the whole chain's; its earlier
#: entries and a prepared one give none. (The commit of a prepared one counts as one: only its chain would tell.)
_EVENTS: Final = {
    "$switch": {
        "branches": [
            {"case": {"$not": _IS_COMMAND_OF_ADMIN}, "then": 1},
            {"case": {"$or": [{"$eq": ["$o.partialTxn", True]}, {"$eq": ["$o.prepare", True]}]}, "then": 0},
        ],
        "default": _OPERATIONS_OF_CHAIN,
    }
}


_SIZES: Final = {"events": _EVENTS, "bytes": {"$bsonSize": "$$ROOT"}}


class Bucket(NamedTuple):
    """A run of entries: cluster times of the first and last, how many they are, the events that they give
    at most, and their size in bytes."""

    first: ClusterTime
    last: ClusterTime
    entries: int
    events: int
    bytes: int


class Weights(NamedTuple):
    """Ascending buckets to cut between, and which part of the range's entries matches (0 where that was not asked)."""

    buckets: list[Bucket]
    matching: float


class Outline(Protocol):
    """What is counted of one oplog or of several; ``OplogOutline`` says what each method gives."""

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]: ...

    def even_buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]: ...

    def mostly_matches(self, after: ClusterTime, until: ClusterTime) -> bool: ...

    def weigh(self, after: ClusterTime, until: ClusterTime) -> Weights: ...

    def entries(self, bucket: Bucket) -> list[Bucket]: ...

    def is_smaller_than(self, size: int) -> bool: ...


class OneOutline(Outline, Protocol):
    """That of one oplog, of which more can be asked."""

    def any(self, after: ClusterTime, until: ClusterTime) -> bool: ...

    def first_invalidating(
        self, after: ClusterTime, until: ClusterTime, *, show_migration_events: bool
    ) -> ClusterTime | None: ...


class _Counted(NamedTuple):
    """``buckets`` hold the matching entries with ``after`` < ts <= ``until``."""

    after: ClusterTime
    until: ClusterTime
    buckets: tuple[Bucket, ...]

    def covers(self, after: ClusterTime, until: ClusterTime) -> bool:
        return self.after <= after and until <= self.until


class _Even(NamedTuple):
    """The even buckets after ``after`` as far as they were asked for, and those that were not yet."""

    after: ClusterTime
    until: ClusterTime
    made: list[Bucket]
    rest: Iterator[Bucket]


class _Drawn(NamedTuple):
    """What is known about a range without counting it: which part of a sample matches, and a cluster time somewhere in
    the middle; 0 and ``None`` where the range is short."""

    after: ClusterTime
    until: ClusterTime
    matching: float
    middle: ClusterTime | None


#: Transactions, whatever they wrote to.
_TRANSACTIONS: Final[dict[str, Any]] = {
    "op": "c",
    "ns": "admin.$cmd",
    "$or": [{"o.applyOps": {"$exists": True}}, {"o.commitTransaction": {"$exists": True}}],
}


def scope_filter(scope: Scope | Selection) -> dict[str, Any]:
    """A query that passes every entry which could give an event in ``scope``, and not much more: entries of its
    namespaces, commands on its databases, and transactions."""
    if isinstance(scope, Selection):
        return {"$or": [{"ns": {"$regex": scope.expression}}, _TRANSACTIONS]}
    if scope.kind == "collection":
        namespace: object = {"$in": [f"{scope.database}.{scope.collection}", f"{scope.database}.$cmd"]}
    elif scope.kind == "database":
        namespace = {"$regex": f"^{re.escape(scope.database or '')}\\."}
    else:
        namespace = {"$regex": r"^(?!(admin|config|local)\.)[^.]+\."}
    return {"$or": [{"ns": namespace}, _TRANSACTIONS]}


def _range(after: ClusterTime, until: ClusterTime) -> dict[str, Any]:
    # Conditions on ts at the top of the query let the server begin at the right record instead of the first one.
    return {"ts": {"$gt": after.to_timestamp(), "$lte": until.to_timestamp()}}


class OplogOutline:
    """Counts and questions about one replica set's oplog, for one scope. Only majority-committed entries are seen."""

    def __init__(self, connection: Connection, scope: Scope | Selection, server_version: tuple[int, ...]) -> None:
        self._connection = connection
        self._scope = scope
        self._groups_by_increment = server_version >= _TS_OPERATORS_SINCE
        self._counted: _Counted | None = None
        self._even: _Even | None = None
        self._drawn: _Drawn | None = None

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The matching entries with ``after`` < ts <= ``until`` in ascending buckets, counted a page at a time.

        What was counted is remembered: a micro-batch asks twice, for its end and for its slices, and the next one asks
        for what lies after its end. (Majority-committed entries do not change.)
        """
        while after < until:
            if self._counted is not None and self._counted.after <= after < self._counted.until:
                yield from self._remembered(self._counted, after, until)
                after = self._counted.until
                continue
            page = self._page(after, until)
            is_last = sum(bucket.entries for bucket in page) < _PAGE
            self._counted = _Counted(after, until if is_last else page[-1].last, tuple(page))
            yield from page
            if is_last:
                return
            after = page[-1].last

    def _remembered(self, counted: _Counted, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The remembered buckets of the range; those that it cuts through are counted again, in part."""
        for bucket in counted.buckets:
            if after < bucket.first and bucket.last <= until:
                yield bucket
            elif after < bucket.last and bucket.first <= until:
                yield from self._page(max(after, ClusterTime(bucket.first - 1)), min(until, bucket.last))

    def weigh(self, after: ClusterTime, until: ClusterTime) -> Weights:
        """Where the range is best cut, and whether asking its entries for the scope is worth it.

        Exact buckets where the range is short or counted already, and where little of it matches. Where most of it
        does, buckets of the same number of entries, which are found three times as fast.
        """
        drawn = self._draw(after, until)
        if drawn.matching < MOST or (self._counted is not None and self._counted.covers(after, until)):
            return Weights(list(self.buckets(after, until)), drawn.matching)
        return Weights(list(self.even_buckets(after, until)), drawn.matching)

    def mostly_matches(self, after: ClusterTime, until: ClusterTime) -> bool:
        """Whether the range is long and most of its entries match, as far as a sample tells."""
        return self._draw(after, until).matching >= MOST

    def _draw(self, after: ClusterTime, until: ClusterTime) -> _Drawn:
        """Look at a sample of the whole oplog (10-30 ms, however long it is), unless the range is short.

        It says which part of the range matches, and no more: drawn entries lie where pages are small, not where entries
        are, so their median is somewhere in the middle only.
        """
        if self._drawn is not None and self._drawn[:2] == (after, until):
            return self._drawn
        query = _range(after, until)
        read = self._oplog().find_one
        past_short = self._connection.retrying(lambda: read(query, {"_id": 0, "ts": 1}, skip=_SHORT))
        if past_short is None:
            self._drawn = _Drawn(after, until, matching=0.0, middle=None)
            return self._drawn
        facets = {"own": [self._matches(), {"$count": "n"}], "all": [{"$project": {"_id": 0, "ts": 1}}]}
        stages: list[Mapping[str, Any]] = [{"$sample": {"size": _SAMPLE}}, {"$match": query}, {"$facet": facets}]
        (found,) = self._connection.retrying(lambda: list(self._oplog().aggregate(stages)))
        own, times = sum(row["n"] for row in found["own"]), sorted(row["ts"] for row in found["all"])
        enough = len(times) >= _SAMPLE_HITS_MIN
        matching = own / len(times) if enough else 0.0
        middle = ClusterTime.from_timestamp(times[len(times) // 2]) if enough else None
        self._drawn = _Drawn(after, until, matching=matching, middle=middle)
        return self._drawn

    def _matches(self) -> dict[str, Any]:
        return {"$match": scope_filter(self._scope)}

    def even_buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The whole range, matching or not, in ascending buckets of known numbers of entries, found one by one as they
        are asked for. Sizes are by the oplog's average, and an entry counts as one event.

        What was found after ``after`` is remembered: a micro-batch asks twice, for its end and for its slices.
        """
        known = self._even
        if known is None or known.after != after or known.until < until:
            known = self._even = _Even(after, until, [], self._skipped(after, until))
        place = 0
        while True:
            if place == len(known.made):
                found = next(known.rest, None)
                if found is None:
                    return
                known.made.append(found)
            bucket = known.made[place]
            place += 1
            if bucket.last > until:
                # It was made for a range that went on.
                if bucket.first <= until:
                    yield self._last_even(ClusterTime(bucket.first - 1), until, bucket.bytes // bucket.entries)
                return
            yield bucket

    def _skipped(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        stats = self._stats()
        total, size = (0, 0) if stats is None else (int(stats["count"]), int(stats["size"]))
        average = max(1, size // max(1, total))
        least = max(1, min(_EVEN_MAX, total // _EVEN_PARTS)) if total else _EVEN_MAX
        find = self._oplog().find_one
        edge, made = after, 0
        while edge < until:
            step = least << (made // _EVEN_RUN)
            # With no other bound the server asks the first entry only.
            query = {"ts": {"$gt": edge.to_timestamp()}}
            found = self._connection.retrying(lambda q=query, n=step - 1: find(q, {"_id": 0, "ts": 1}, skip=n))  # type: ignore[misc]
            last = until if found is None else ClusterTime.from_timestamp(found["ts"])
            if found is None or last > until:
                yield self._last_even(edge, until, average)
                return
            yield Bucket(edge.tick(), last, step, step, step * average)
            edge, made = last, made + 1

    def _last_even(self, after: ClusterTime, until: ClusterTime, average: int) -> Bucket:
        """What is left of a range after the last whole bucket. It may have no entry: one is assumed then."""
        count = self._oplog().count_documents
        entries = max(1, self._connection.retrying(lambda: count(_range(after, until))))
        return Bucket(after.tick(), until, entries, entries, entries * average)

    def is_smaller_than(self, size: int) -> bool:
        """Whether the whole oplog has at most ``size`` bytes: then so has any range of it, and nothing need be
        counted. False also where the user may not ask."""
        stats = self._stats()
        return stats is not None and int(stats["size"]) <= size

    def _stats(self) -> Mapping[str, Any] | None:
        """Number and bytes of all entries; ``None`` where the user may not ask."""
        ask = self._connection.client["local"].command
        try:
            return self._connection.retrying(lambda: ask("collStats", "oplog.rs"))
        except SourceError:
            return None

    def entries(self, bucket: Bucket) -> list[Bucket]:
        """The entries of ``bucket`` one by one."""
        return self._ask(
            ClusterTime(bucket.first - 1), bucket.last, {"$project": {"_id": 0, "ts": 1, **_SIZES}}, _entry
        )

    def any(self, after: ClusterTime, until: ClusterTime) -> bool:
        """Whether an entry in the range could give an event."""
        query = {**_range(after, until), **scope_filter(self._scope)}
        return self._first(query) is not None

    def first_invalidating(
        self, after: ClusterTime, until: ClusterTime, *, show_migration_events: bool
    ) -> ClusterTime | None:
        """The cluster time of the first entry in the range that ends a stream of the scope (semantics 2.2, branch 3),
        or ``None``."""
        cause = invalidating(self._scope)
        if cause is None or until <= after:
            return None
        if not show_migration_events:
            cause["fromMigrate"] = {"$ne": True}
        drawn = self._draw(after, until)
        edges = [after, until] if drawn.middle is None else [after, min(drawn.middle, until), until]
        queries = [{**_range(low, high), "op": "c", **cause} for low, high in pairwise(edges)]
        if len(queries) == 1:
            return self._first(queries[0])
        with ThreadPoolExecutor(len(queries), "tailrace-outline") as pool:
            return next((time for time in pool.map(self._first, queries) if time is not None), None)

    def _oplog(self) -> Collection[Any]:
        return self._connection.majority("local", "oplog.rs")

    def _first(self, query: Mapping[str, Any]) -> ClusterTime | None:
        def ask() -> Mapping[str, Any] | None:
            found: Mapping[str, Any] | None = self._oplog().find_one(query, {"_id": 0, "ts": 1})
            return found

        found = self._connection.retrying(ask)
        return None if found is None else ClusterTime.from_timestamp(found["ts"])

    def _page(self, after: ClusterTime, until: ClusterTime) -> list[Bucket]:
        if not self._groups_by_increment:
            entries = self._ask(after, until, {"$project": {"_id": 0, "ts": 1, **_SIZES}}, _entry)
            return [_sum(entries[start : start + _BUCKET]) for start in range(0, len(entries), _BUCKET)]
        key = {"t": {"$tsSecond": "$ts"}, "i": {"$floor": {"$divide": [{"$tsIncrement": "$ts"}, _BUCKET]}}}
        sums = {name: {"$sum": size} for name, size in _SIZES.items()}
        times = {"first": {"$min": "$ts"}, "last": {"$max": "$ts"}, "entries": {"$sum": 1}}
        return self._ask(after, until, {"$group": {"_id": key, **times, **sums}}, _bucket)

    def _ask(
        self,
        after: ClusterTime,
        until: ClusterTime,
        stage: Mapping[str, Any],
        made: Callable[[Mapping[str, Any]], Bucket],
    ) -> list[Bucket]:
        stages: list[Mapping[str, Any]] = [
            {"$match": {**_range(after, until), **scope_filter(self._scope)}},
            {"$limit": _PAGE},
            stage,
        ]
        return sorted(self._connection.retrying(lambda: [made(row) for row in self._oplog().aggregate(stages)]))


def _bucket(row: Mapping[str, Any]) -> Bucket:
    first, last = ClusterTime.from_timestamp(row["first"]), ClusterTime.from_timestamp(row["last"])
    return Bucket(first, last, int(row["entries"]), int(row["events"]), int(row["bytes"]))


def _entry(row: Mapping[str, Any]) -> Bucket:
    time = ClusterTime.from_timestamp(row["ts"])
    return Bucket(time, time, 1, int(row["events"]), int(row["bytes"]))


def _sum(entries: Sequence[Bucket]) -> Bucket:
    events, size = sum(entry.events for entry in entries), sum(entry.bytes for entry in entries)
    return Bucket(entries[0].first, entries[-1].last, len(entries), events, size)


def invalidating(scope: Scope | Selection) -> dict[str, Any] | None:
    """A query for the commands that end a stream of ``scope``; ``None`` where nothing does.

    The command applyOps is logged with whatever fields its user sent with it, ``drop`` among them, and ends nothing.
    """
    if isinstance(scope, Selection) or scope.kind == "cluster":
        return None
    commands = {"ns": f"{scope.database}.$cmd", "o.applyOps": {"$exists": False}}
    if scope.kind == "database":
        return {**commands, "o.dropDatabase": {"$exists": True}}
    # The server's pattern for a name takes the name with a line break at its end too.
    names = [scope.collection, f"{scope.collection}\n"]
    namespaces = {"$in": [f"{scope.database}.{name}" for name in names]}
    causes = [{"o.drop": {"$in": names}}, {"o.renameCollection": namespaces}, {"o.to": namespaces}]
    return {**commands, "$or": causes}
