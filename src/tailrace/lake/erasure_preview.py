"""What ``erase`` would take out of a lake, without taking it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from tailrace import raw_bson
from tailrace.lake.erasure import EVENT, READ_ROWS, erasable, matcher_of

_NAMES: Final = (b"db", b"coll")


@dataclass(frozen=True, slots=True)
class FileShare:
    """``rows`` of a file's ``of`` rows would go."""

    name: str
    rows: int
    of: int


@dataclass(frozen=True, slots=True)
class ErasurePreview:
    """``rows`` of the ``searched`` events would go: how many from which ``files``, and from which ``collections`` (by
    the ``ns`` of the events)."""

    rows: int
    searched: int
    files: tuple[FileShare, ...]
    collections: Mapping[str, int]


def preview(path: Path | str, match: Mapping[str, Any]) -> ErasurePreview:
    """Search the lake at ``path`` for the events that ``erase`` would take out. Nothing is written; also a ``$match``
    that selects everything is answered. Raises as ``erase`` does."""
    matches = matcher_of(match, everything=True)
    files: list[FileShare] = []
    collections: Counter[str] = Counter()
    searched = 0
    with erasable(path) as (log, _):
        for file in log.state().in_order:
            chosen = [event for event in _events(log.layout.root / file.name) if matches(event)]
            searched += file.rows
            collections.update(map(_namespace, chosen))
            if chosen:
                files.append(FileShare(file.name, len(chosen), file.rows))
    return ErasurePreview(sum(file.rows for file in files), searched, tuple(files), dict(collections))


def _events(path: Path) -> Iterator[bytes]:
    with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
        for batch in parquet.iter_batches(batch_size=READ_ROWS, columns=[EVENT]):
            yield from batch.column(0).to_pylist()


def _namespace(event: bytes) -> str:
    """The event's namespace; what it has of one, if a pipeline has changed it."""
    found = raw_bson.find(event, b"ns")
    if found is None or found.type != raw_bson.OBJECT:
        return "(no namespace)"
    names = {
        element.name: raw_bson.read_string(event, element.value_start).decode("utf-8", "replace")
        for element in raw_bson.elements(event, found.value_start)
        if element.name in _NAMES and element.type == raw_bson.STRING
    }
    return ".".join(names[name] for name in _NAMES if name in names) or "(no namespace)"
