"""The rows of a lake that is being changed: rebuilt with other columns, or compared with those that a wider stream
gives.

A change adds events and columns; it takes no event away, and changes none. So every row of the lake must be among the
new ones, in its place and with the same bytes. That also shows that the history that the new rows were read from is the
lake's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.changing import LakeBefore
from tailrace.lake.store.lake_root import LakeRoot
from tailrace.lake.store.layout import merged_name
from tailrace.lake.store.manifest import FileEntry, StagedFile
from tailrace.lake.store.part_writer import TOKEN, FileLimits, PartWriter, equal_tokens_in, opened_checked

EVENT: Final = "event"
_READ_ROWS: Final = 4096

#: Makes the new rows of some old ones.
RowMaker = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is to be exchanged, and what was made for nothing, since the lake's own files hold the same. ``added``
    counts the rows that are new."""

    gone: tuple[FileEntry, ...]
    made: tuple[StagedFile, ...]
    unneeded: tuple[StagedFile, ...]
    added: int


def rewritten(
    before: LakeBefore, read: Sequence[str], rows: RowMaker, metadata: dict[bytes, bytes]
) -> Iterator[StagedFile]:
    """Each file of the lake anew, in its order: ``rows`` makes the new rows of its columns ``read``. Raises SinkError
    where a file does not hold the rows that the log says."""
    for file in before.state.in_order:
        equal = equal_tokens_in(before.root, file)
        writer = PartWriter(
            before.root,
            f"merge-{uuid.uuid4().hex}",
            limits=FileLimits(file_bytes=1 << 62),
            metadata=metadata,
            name=lambda *_, file=file: merged_name(file.name),
            one_token=1 + equal,
        )
        made = writer.write_all(rows(_batches(before.root, [file], read)))
        yield from (replace(one, collection=file.collection) for one in made)
        found = [(one.rows, one.first_token, one.last_token, writer.equal_tokens) for one in made]
        if found != [(file.rows, file.first_token, file.last_token, equal)]:
            raise SinkError(f"{before.root / file.name} does not hold the {file.rows} rows that the log says")


def compared(
    before: LakeBefore, old: Sequence[FileEntry], new: Sequence[StagedFile], common: Sequence[str], *, keep: bool
) -> Exchange:
    """Compare the rows of the lake's files ``old`` with those of the files ``new``, in the columns ``common``.

    ``keep``: where nothing was added, the old files stay. Raises UsageError where a row of the lake is not among the
    new ones.
    """
    theirs, ours = _lanes(new), _lanes(old)
    gone: list[FileEntry] = []
    made: list[StagedFile] = []
    unneeded: list[StagedFile] = []
    added = 0
    for lane in sorted({*theirs, *ours}, key=repr):
        files, held = theirs.get(lane, []), ours.get(lane, [])
        more = _added(_rows(before.root, held, common), _rows(before.root, files, common))
        added += more
        if keep and not more:
            unneeded += files
        else:
            gone += held
            made += files
    return Exchange(tuple(gone), tuple(made), tuple(unneeded), added)


def first_row(before: LakeBefore, column: str) -> Any:
    """The first event's value of a column."""
    with opened_checked(before.root, before.state.in_order[0]) as file:
        return next(file.iter_batches(batch_size=1, columns=[column])).column(0)[0].as_py()


def _added(old: Iterator[tuple[Any, ...]], new: Iterator[tuple[Any, ...]]) -> int:
    """How many of ``new`` are not in ``old``, whose rows must all be in ``new``, in the same order."""
    added = 0
    for row in old:
        for other in new:
            if other == row:
                break
            added += 1
            if other[0] > row[0]:
                _refuse(row[0])
        else:
            _refuse(row[0])
    return added + sum(1 for _ in new)


def _refuse(token: str) -> None:
    raise UsageError(
        f"the lake's event with the token {token} is not among those of the new stream, or is another one there",
        hint="A change adds events and columns, and takes none away: widen the stream, and leave the events that it "
        "has as they are. To take events out, use tailrace lake erase; for another stream, begin another lake. If the "
        "stream is wider, the history that was read is not the lake's own",
    )


def _lanes(files: Sequence[FileEntry]) -> dict[object, list[FileEntry]]:
    found: dict[object, list[FileEntry]] = {}
    for file in sorted(files, key=lambda one: one.first_token):
        found.setdefault((file.period, file.lane), []).append(file)
    return found


def _rows(root: LakeRoot, files: Sequence[FileEntry], columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """RowMaker as tuples, the token first."""
    for batch in _batches(root, files, columns):
        values = [batch.column(name) for name in (TOKEN, *(one for one in columns if one != TOKEN))]
        parts = [one.cast(pa.int64()) if pa.types.is_timestamp(one.type) else one for one in values]
        yield from zip(*(part.to_pylist() for part in parts), strict=True)


def _batches(root: LakeRoot, files: Sequence[FileEntry], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for entry in files:
        with opened_checked(root, entry) as file:
            yield from file.iter_batches(batch_size=_READ_ROWS, columns=list(columns))
