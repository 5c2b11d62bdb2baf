"""A streaming reader driven as Spark drives it, but without Spark: with offsets as JSON, and with crashes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.source.stream_reader import TailraceStreamReader


class WorkerDiedError(Exception):
    """A worker has died in the middle of its slice."""


@dataclass
class Checkpoint:
    """Offsets as Spark keeps them: the end of each micro-batch, written before it runs; and how many have run."""

    planned: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0


class CrashingQuery:
    """Runs micro-batches of a stream; with a ``chance`` it crashes before or after each step, and goes on from its
    checkpoint with a reader of its own. ``rows`` are those of micro-batches that have run, each replacing itself."""

    def __init__(
        self, options: Mapping[str, str], *, seed: int = 0, chance: float = 0.0, crashes_max: int = 20
    ) -> None:
        self._options = parse({"columns": "event,token", **options})
        self._random = random.Random(seed)
        self._chance, self._left = chance, crashes_max
        self.crashes = 0
        self.checkpoint = Checkpoint()
        self.batches: list[list[dict[str, Any]]] = []
        self._reader = TailraceStreamReader(self._options)
        self._start: dict[str, Any] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch]

    @property
    def offset(self) -> dict[str, Any]:
        """Where the stream stands."""
        return self.checkpoint.planned[-1]

    def close(self) -> None:
        self._reader.stop()

    def step(self) -> bool:
        """Run one micro-batch. Returns False if there was none, or a crash."""
        kept = self.checkpoint
        if self._crashes():
            return False
        if len(kept.planned) == kept.done:
            if self._start is None and not kept.planned:
                self._start = kept_by_spark(self._reader.initialOffset())
            start = kept.planned[-1] if kept.planned else self._start
            assert start is not None
            end = kept_by_spark(self._reader.latestOffset(start, self._reader.getDefaultReadLimit()))
            if kept.planned and end == start:
                return False
            kept.planned.append(end)
            if self._crashes():
                return False
        if self._start is None and not kept.done:
            self._start = kept_by_spark(self._reader.initialOffset())  # Spark keeps no initial offset
        start = kept.planned[kept.done - 1] if kept.done else self._start
        assert start is not None
        try:
            rows = list(self._read(start, kept.planned[kept.done]))
        except WorkerDiedError:
            return False
        if self._crashes():
            return False
        del self.batches[kept.done :]
        self.batches.append(rows)
        if self._crashes():
            return False
        kept.done += 1
        return True

    def _read(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for partition in self._reader.partitions(start, end):
            for batch in TailraceStreamReader(self._options).read(partition):
                yield from batch.to_pylist()
                if self._left > 0 and self._random.random() < self._chance / 8:
                    self._left -= 1
                    self.crashes += 1
                    raise WorkerDiedError

    def _crashes(self) -> bool:
        if self._left <= 0 or self._random.random() >= self._chance:
            return False
        self._left -= 1
        self.crashes += 1
        self.begin_again()
        return True

    def begin_again(self) -> None:
        """Go on from the checkpoint with another reader."""
        self._reader.stop()
        self._reader = TailraceStreamReader(self._options)
        self._start = None


def kept_by_spark(offset: dict[str, Any]) -> dict[str, Any]:
    """An offset after being written and read. Spark compares texts, so keys must have a fixed order."""
    text = json.dumps(offset)
    assert text == json.dumps(offset, sort_keys=True)
    found: dict[str, Any] = json.loads(text)
    return found
