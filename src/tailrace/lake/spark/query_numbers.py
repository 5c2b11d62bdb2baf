"""What is known about one streaming query."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tailrace.lake.spark.planning.backlog import Backlog


@dataclass
class QueryNumbers:
    """``name`` (or id), micro-batches and rows by operation since they are counted, how far it was behind at the last
    one, how many ``seconds`` that one took, and whether the query runs."""

    name: str
    batches: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    backlog: Backlog | None = None
    seconds: float = 0.0
    active: bool = True
