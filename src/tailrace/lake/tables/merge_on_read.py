"""Tables that are merged on read: a micro-batch marks rows as gone, and rewrites no file for that.

What is saved at writing is paid at reading, so files are merged in time. This module says which: pure arithmetic over
what the log knows of each file. Three bounds hold after each merge that is small enough for one micro-batch:

* Of all rows that a reader has to read, at most ``GONE_MAX`` are gone. Where there are more, the files with the largest
  shares are written anew without them, together with all small files of their folder: so new rows are written once
  more, and not once for each size on the way.
* No file is larger than a ``PARTS``-th of its table (or ``LARGE_BYTES``) when it is written. Then files have different
  ages, and the oldest one has lost far more of its rows than the table has on average. A table that is one file is
  written anew as a whole to be rid of a sixth of its rows.
* Of small files of about one size, fewer than ``TOGETHER`` lie in a folder. That many are merged into one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from deltalake import DeltaTable

from tailrace.lake.store import delta
from tailrace.lake.tables.delta_commit import TableFile
from tailrace.lake.tables.live_files import FEATURE

#: After a merge, at most this share of the rows in a table's files are gone: a reader reads at most 1.18 rows for each
#: that is there. Less of them would be more bytes to write: 0.12 is 5.2 times those of the changed rows, 0.15 4.3, 0.18
#: 3.75.
GONE_MAX: Final = 0.15
#: How many small files of about one size are merged. With fewer, the same rows are written more often.
TOGETHER: Final = 6
#: Into about so many files a table is divided. With fewer, more bytes are written; with more, hardly fewer.
PARTS: Final = 6
#: Merged files have no more bytes than this, nor fewer than that where a table is divided.
LARGE_BYTES, LEAST_BYTES = 32 << 20, 256 << 10
#: A file of less than this share of a merged one is small.
_SMALL: Final = 0.5
#: About how many bytes are merged after one micro-batch: a table with more to do goes on after the next.
_AT_ONCE: Final = 64 << 20


class _WeighedFile(NamedTuple):
    """A file: its bytes, its rows, how many are gone, and the bytes of those that are not."""

    file: TableFile
    folder: str
    rows: int
    gone: int
    live: float

    @classmethod
    def of(cls, file: TableFile) -> _WeighedFile:
        rows = file.rows or 0
        live = file.size * (1 - file.gone / rows) if rows else file.size
        return cls(file, file.name.rpartition("/")[0], rows, file.gone, live)


def part_rows(files: Iterable[TableFile]) -> int:
    """How many rows a merged file is to have."""
    pieces = [*map(_WeighedFile.of, files)]
    live, rows = sum(one.live for one in pieces), sum(one.rows - one.gone for one in pieces)
    return max(1, math.ceil(rows * _part_bytes(pieces) / live)) if live else 1


def _part_bytes(pieces: Sequence[_WeighedFile]) -> float:
    return max(LEAST_BYTES, min(LARGE_BYTES, sum(one.live for one in pieces) / PARTS))


def to_merge(files: Iterable[TableFile], *, divided: bool = False) -> list[list[str]]:
    """The names of files that are to be merged now, those of each new file together. ``divided``: files that lie in no
    folder are another program's, and a compaction of the whole table divides them."""
    pieces = [one for one in map(_WeighedFile.of, files) if one.folder or not divided]
    small = [one for one in pieces if one.live < _SMALL * _part_bytes(pieces)]
    groups, used, size = [], set[str](), 0.0
    for group in [*_worn(pieces, small), *_of_one_size(small)]:
        names = [one.file.name for one in group]
        if used.isdisjoint(names) and size < _AT_ONCE:
            groups.append(names)
            used.update(names)
            size += sum(one.live for one in group)
    return groups


def _worn(pieces: Sequence[_WeighedFile], small: Sequence[_WeighedFile]) -> Iterator[list[_WeighedFile]]:
    """The files with the largest shares of rows that are gone, each with the small ones of its folder."""
    rows, gone, size = sum(one.rows for one in pieces), sum(one.gone for one in pieces), 0.0
    chosen: dict[str, list[_WeighedFile]] = {}
    for one in sorted(pieces, key=lambda one: one.gone / max(1, one.rows), reverse=True):
        if gone <= GONE_MAX * rows or size >= _AT_ONCE or not one.gone:
            break
        chosen.setdefault(one.folder, []).append(one)
        rows, gone, size = rows - one.gone, gone - one.gone, size + one.file.size
    for folder, worn in chosen.items():
        beside = [one for one in small if one.folder == folder and one not in worn]
        yield from _bins([*worn, *sorted(beside, key=lambda one: one.live)])


def _of_one_size(small: Sequence[_WeighedFile]) -> Iterator[list[_WeighedFile]]:
    """Small files of which there are too many."""
    sizes: dict[tuple[str, int], list[_WeighedFile]] = {}
    for one in small:
        sizes.setdefault((one.folder, int(math.log(max(1.0, one.live), TOGETHER))), []).append(one)
    for group in sizes.values():
        if len(group) >= TOGETHER:
            yield from (found for found in _bins(group) if len(found) > 1)


def _bins(pieces: Iterable[_WeighedFile]) -> Iterator[list[_WeighedFile]]:
    """The files in groups that are merged in memory."""
    found: list[_WeighedFile] = []
    for one in pieces:
        if found and sum(each.live for each in found) + one.live > _AT_ONCE:
            yield found
            found = []
        found.append(one)
    if found:
        yield found


class _Described(Protocol):
    """A table that says which protocol it has."""

    def protocol(self) -> Any: ...


def has_vectors(table: _Described | DeltaTable | None) -> bool:
    """Whether a table's protocol has deletion vectors."""
    return table is not None and FEATURE in (table.protocol().reader_features or ())


def next_protocol(table: _Described | DeltaTable | None, *, merges: bool, feeds: bool) -> dict[str, Any] | None:
    """The protocol that a commit gives a table which is merged on read from then on, or no longer; ``None`` if it keeps
    what it has, or gets what every table gets. ``feeds``: it has a change feed."""
    if merges:
        known = () if table is None else table.protocol().writer_features or ()
        done = has_vectors(table) and (not feeds or "changeDataFeed" in known)
        return None if done else delta.naming_protocol([FEATURE], feeds=feeds)
    return delta.plain_protocol(feeds=feeds) if has_vectors(table) else None
