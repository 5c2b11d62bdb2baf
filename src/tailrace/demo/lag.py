"""How late events arrive in a lake: from their write in MongoDB (wall time) to their commit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.lake.spark.store.snapshot import files
from tailrace.lake.store.commit_log import CommitLog


@dataclass(frozen=True, slots=True)
class Lag:
    """Seconds, over ``events`` events."""

    p50: float
    p99: float
    longest: float
    events: int


def lag_of(path: Path) -> Lag | None:
    """The lag of every event whose commit the log still names, or ``None`` where there is none. An event belongs to the
    first commit that reaches to its token; the files may have been merged since."""
    commits = [commit for commit in CommitLog(path).commits() if commit.batch is not None]
    if not commits:
        return None
    ends = np.array([commit.last_token for commit in commits])
    moments = np.array([_micros(commit.committed_at) for commit in commits])
    first = commits[0].first_token
    lags = []
    for file in files(path):
        table = pq.read_table(file, columns=["token", "wall_time"], partitioning=None)
        tokens = np.array(table.column("token").to_pylist())
        walls = table.column("wall_time").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_numpy()
        known = (tokens >= first) & (tokens <= ends[-1])
        lags.append((moments[np.searchsorted(ends, tokens[known])] - walls[known]) / 1e6)
    every = np.concatenate(lags)
    if not len(every):
        return None
    p50, p99 = np.percentile(every, [50, 99])
    return Lag(float(p50), float(p99), float(every.max()), len(every))


def _micros(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)
