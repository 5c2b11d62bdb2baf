"""Small files of a table merged into larger ones, in the order of their keys or along a Z-order curve.

Nothing changes in the table except the files that hold its rows. One merged file is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import SinkError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.data_files import FILE_BYTES, Writers, key_range, opened, with_columns, without
from tailrace.lake.tables.deletion_vector import NONE, RowNumbers
from tailrace.lake.tables.delta_commit import NewFile
from tailrace.lake.tables.names import KEY

#: The most bytes of rows (before compression) that a merged file is made from.
_MERGED_MAX: Final = 2 * FILE_BYTES
_TARGET: Final = 128 << 20


class _Piece(NamedTuple):
    """A file: name relative to the table, bytes on disk, bytes of its rows, its smallest key."""

    name: str
    size: int
    rows: int
    first: bytes


@dataclass(frozen=True)
class Layout:
    """How a table's files are laid out. ``schema``: the columns that merged files have."""

    root: TablePlace
    schema: pa.Schema
    divide_by: Sequence[str]
    bounds: Sequence[str]
    z_order: Sequence[str] = ()
    #: By the names of files, the rows that are gone from them: merged files are without these.
    gone: Mapping[str, RowNumbers] = field(default_factory=dict)


def compacted(
    layout: Layout,
    files: Sequence[tuple[str, int]],
    *,
    target_bytes: int | None = None,
    everything: bool = False,
    groups: Sequence[Sequence[str]] | None = None,
    part_rows: int | None = None,
) -> tuple[list[NewFile], list[str]]:
    """The files that take the place of others, and these. ``files``: names and sizes of the table's files now.

    ``target_bytes``  files of less than half of that are small; a merged file has about this many bytes
    ``everything``    merge large files too: with a Z-order, to arrange all rows
    ``groups``        the files that are merged, those of each new file together, and no others. Those whose rows are
                      too many to be in memory at once are divided
    ``part_rows``     a merged file of more rows is divided into files of about so many
    """
    unknown = next((name for name in layout.z_order if name not in layout.schema.names), None)
    if unknown is not None:
        raise SinkError(f"the table {layout.root} cannot be compacted: it has no column '{unknown}'")
    target = target_bytes or _TARGET
    writers = Writers(layout.root, layout.divide_by, layout.bounds)
    removed: list[str] = []
    try:
        for names in (
            _groups(layout, files, target, everything=everything) if groups is None else _fitting(layout, groups)
        ):
            for table in _arranged(layout, names):
                for part in _parts(table, part_rows):
                    writers.write(part)
                    # What has been merged is a file: the next rows begin another one.
                    writers.next_file()
            removed += names
        return writers.finish(), removed
    except BaseException:
        writers.abandon()
        raise


def _groups(layout: Layout, files: Sequence[tuple[str, int]], target: int, *, everything: bool) -> Iterator[list[str]]:
    """Files that are merged into one. In a divided table they are of one folder; files outside of the folders are
    another program's, and are divided again."""
    folders: dict[str, list[_Piece]] = {}
    for name, size in files:
        folder = name.rpartition("/")[0]
        stray = bool(layout.divide_by) and not folder
        worn = name in layout.gone
        if not (everything or stray or worn or size < target // 2):
            continue
        with opened(layout.root, name) as file:
            metadata, keys = file.metadata, key_range(file)
            rows = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        if everything or stray or worn or rows < FILE_BYTES:
            folders.setdefault(folder, []).append(_Piece(name, size, rows, keys[0] if keys else b""))
    for folder, pieces in folders.items():
        if everything:
            yield [one.name for one in pieces]
            continue
        alone = bool(layout.divide_by) and not folder
        for group in _bins(sorted(pieces, key=lambda one: one.first), target):
            if len(group) > 1 or alone or group[0].name in layout.gone:
                yield [one.name for one in group]


def _fitting(layout: Layout, groups: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """The same groups, of files whose rows are in memory together. A file alone is written anew if that is without rows
    that are gone."""
    for names in groups:
        pieces = [_Piece(name, 0, _size(layout, name), b"") for name in names]
        for group in _bins(pieces, 0):
            if len(group) > 1 or group[0].name in layout.gone:
                yield [one.name for one in group]


def _bins(pieces: Sequence[_Piece], target: int) -> Iterator[list[_Piece]]:
    found: list[_Piece] = []
    for piece in pieces:
        size, rows = sum(one.size for one in found), sum(one.rows for one in found)
        if found and (size + piece.size > target or rows + piece.rows > _MERGED_MAX):
            yield found
            found = []
        found.append(piece)
    if found:
        yield found


def _arranged(layout: Layout, names: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of these files in their new order, a table for each new file."""
    if not layout.z_order:
        yield pa.concat_tables([_read(layout, name) for name in names]).sort_by(KEY)
        return
    ordered = [_read(layout, name, layout.z_order) for name in names]
    curve = _z_order(pa.concat_tables(ordered), layout.z_order)
    ends = np.cumsum([table.num_rows for table in ordered])
    size = sum(_size(layout, name) for name in names)
    place = np.argsort(np.argsort(curve, kind="stable"), kind="stable")
    parts = max(1, -(-size // FILE_BYTES))
    part = place * parts // max(1, len(place))
    for number in range(parts):
        pieces, places = [], []
        for name, end, table in zip(names, ends, ordered, strict=True):
            rows = np.flatnonzero(part[end - table.num_rows : end] == number)
            if len(rows):
                pieces.append(_read(layout, name).take(pa.array(rows)))
                places.append(place[end - table.num_rows + rows])
        if pieces:
            yield pa.concat_tables(pieces).take(pa.array(np.argsort(np.concatenate(places))))


def _parts(table: pa.Table, part_rows: int | None) -> Iterator[pa.Table]:
    """The rows in parts of equal size, in their order."""
    number = 1 if part_rows is None else max(1, round(table.num_rows / part_rows))
    ends = [table.num_rows * part // number for part in range(number + 1)]
    for begin, end in pairwise(ends):
        yield table.slice(begin, end - begin)


def _size(layout: Layout, name: str) -> int:
    with opened(layout.root, name) as file:
        return sum(file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups))


def _read(layout: Layout, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """A file's rows with the columns of the table: those that are younger than the file are NULL."""
    wanted = [one for one in layout.schema if columns is None or one.name in columns]
    with opened(layout.root, name) as file:
        found = with_columns(file, wanted)
    return without(found, layout.gone.get(name, NONE))


def _z_order(table: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Each row's place on the curve: the bits of its ranks in all columns, interleaved."""
    bits = min(16, 64 // len(columns))
    curve = np.zeros(table.num_rows, np.uint64)
    for number, name in enumerate(columns):
        values = table.column(name)
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        try:
            rank = pc.rank(values, sort_keys="ascending", tiebreaker="dense").to_numpy()
        except pa.ArrowNotImplementedError as error:
            raise SinkError(f"rows cannot be arranged by '{name}': {error}") from error
        most = int(rank.max(initial=1))
        scaled = (rank.astype(np.uint64) - np.uint64(1)) * np.uint64((1 << bits) - 1) // np.uint64(max(1, most - 1))
        for bit in range(bits):
            curve |= (scaled >> np.uint64(bit) & np.uint64(1)) << np.uint64(bit * len(columns) + number)
    return curve
