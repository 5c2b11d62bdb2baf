"""Read a lake as a stranger would, and compare it with what its log says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.errors import UsageError
from tailrace.spark.lake.commit_log import CommitLog
from tailrace.spark.lake.identity import read_identity
from tailrace.spark.lake.layout import LakeLayout, cluster_time_of, day_of
from tailrace.spark.lake.manifest import FileEntry
from tailrace.spark.lake.part_writer import TOKEN, footer_range

_PROBLEMS_MAX = 100


@dataclass(slots=True)
class LakeReport:
    """``problems`` are sentences, at most 100; the lake is sound when there is none. ``rows`` were read, in ``files``
    files of ``days`` days, from ``first_token`` to ``last_token``."""

    files: int = 0
    rows: int = 0
    days: int = 0
    first_token: str | None = None
    last_token: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems

    def add(self, problem: str) -> None:
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(problem)


def verify(path: Path | str) -> LakeReport:
    """Check the lake at ``path``: files against the log, footers and rows against both, the order of every token (so
    that a doubled event shows too), each file's day. Reads the tokens of every row; changes nothing but what a crash
    left undone. Raises UsageError where ``path`` is no lake, SinkError where its log is damaged."""
    root = Path(path)
    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    log = CommitLog(root)
    report = LakeReport()
    with log.locked() as head:
        live = log.live_files()
        present = _present(log.layout)
    report.days = len({file.day for file in live})
    names = {file.name for file in live}
    for name in sorted(present - names):
        report.add(f"{name} is not in the log")
    for file in live:
        if file.name not in present:
            report.add(f"{file.name} is in the log and missing in the directory")
            continue
        _check_file(root, file, report)
    if head.last_token is not None and report.last_token != head.last_token and report.sound:
        report.add(f"the last event is {report.last_token}, and the log says {head.last_token}")
    return report


def _present(layout: LakeLayout) -> set[str]:
    return {f"{day.name}/{file.name}" for day in layout.day_directories() for file in day.iterdir()}


def _check_file(root: Path, entry: FileEntry, report: LakeReport) -> None:
    report.files += 1
    try:
        with pq.ParquetFile(root / entry.name) as file:
            if footer_range(file.metadata.metadata) != (entry.first_token, entry.last_token):
                report.add(f"{entry.name}: its footer and the log name different tokens")
            rows = 0
            for tokens in _tokens(file):
                rows += len(tokens)
                _check_tokens(entry, tokens, report)
    except (OSError, pa.ArrowException) as error:
        report.add(f"{entry.name} cannot be read: {error}")
        return
    report.rows += rows
    if rows != entry.rows:
        report.add(f"{entry.name} has {rows} rows, and the log says {entry.rows}")
    if report.last_token != entry.last_token:
        report.add(f"{entry.name} ends with token {report.last_token}, and the log says {entry.last_token}")


def _tokens(file: pq.ParquetFile) -> Iterator[pa.Array]:
    for batch in file.iter_batches(batch_size=65_536, columns=[TOKEN]):
        if batch.num_rows:
            yield batch.column(0)


def _check_tokens(entry: FileEntry, tokens: pa.Array, report: LakeReport) -> None:
    first, last = tokens[0].as_py(), tokens[-1].as_py()
    if report.last_token is not None and first <= report.last_token:
        report.add(f"{entry.name}: token {first} does not follow {report.last_token}")
    if pc.all(pc.less(tokens.slice(0, len(tokens) - 1), tokens.slice(1))).as_py() is False:
        report.add(f"{entry.name}: its tokens do not ascend, or one is there twice")
    for token in (first, last):
        if day_of(cluster_time_of(token)) != entry.day:
            report.add(f"{entry.name}: token {token} is of day {day_of(cluster_time_of(token))}")
    report.first_token = report.first_token or first
    report.last_token = last
