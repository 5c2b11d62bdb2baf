"""What ``erase`` would take out of a lake, without taking it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.core.event.quarantined import namespace_of
from tailrace.lake.store import quarantine
from tailrace.lake.store.erasure import EVENT, READ_ROWS, erasable, matcher_of
from tailrace.lake.store.lake_root import LakeRoot
from tailrace.lake.store.part_writer import parquet_file


@dataclass(frozen=True, slots=True)
class FileShare:
    """``rows`` of a file's ``of`` rows would go."""

    name: str
    rows: int
    of: int


@dataclass(frozen=True, slots=True)
class ErasurePreview:
    """``rows`` of the ``searched`` events would go: how many from which ``files``, and from which ``collections`` (by
    the ``ns`` of the events); ``quarantined`` events would go from the quarantine."""

    rows: int
    searched: int
    files: tuple[FileShare, ...]
    collections: Mapping[str, int]
    quarantined: int = 0


def preview(path: LakeRoot | str, match: Mapping[str, Any]) -> ErasurePreview:
    """Search the lake at ``path`` for the events that ``erase`` would take out. Nothing is written, and a
    ``$match`` that selects everything is allowed. Otherwise raises as ``erase`` does."""
    matches = matcher_of(match, everything=True)
    files: list[FileShare] = []
    collections: Counter[str] = Counter()
    searched = 0
    with erasable(path) as (log, _):
        for file in log.state().in_order:
            chosen = [event for event in _events(log.layout.root / file.name, file.size) if matches(event)]
            searched += file.rows
            collections.update(namespace_of(event) or "(no namespace)" for event in chosen)
            if chosen:
                files.append(FileShare(file.name, len(chosen), file.rows))
        with log.locked() as head:
            newest = log.newest_batch(head)
        aside = sum(map(matches, quarantine.events_in(quarantine.files_of(log.layout, newest))))
    return ErasurePreview(sum(file.rows for file in files), searched, tuple(files), dict(collections), aside)


def _events(path: LakeRoot, size: int) -> Iterator[bytes]:
    with parquet_file(path, size) as parquet:
        for batch in parquet.iter_batches(batch_size=READ_ROWS, columns=[EVENT]):
            yield from batch.column(0).to_pylist()
