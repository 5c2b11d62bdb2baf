"""Many streams wait for one shard's promise at the same moment: it is asked for once."""

from __future__ import annotations

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source import promise
from tailrace.read.source.promise import AskedLately


def test_what_was_asked_for_lately_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(promise.time, "monotonic", lambda: now[0])
    asked: list[int] = []
    lately = AskedLately()
    for number, until in enumerate((5, 5, 3, 6)):
        lately.once(ClusterTime(until), lambda number=number: asked.append(number))
    assert asked == [0, 3]
    now[0] += 1.0  # a member that is voted out may take its no-op back
    lately.once(ClusterTime(6), lambda: asked.append(9))
    assert asked == [0, 3, 9]


def test_an_asking_that_failed_is_asked_again() -> None:
    lately = AskedLately()
    with pytest.raises(ZeroDivisionError):
        lately.once(ClusterTime(5), lambda: 1 / 0)
    asked: list[int] = []
    lately.once(ClusterTime(5), lambda: asked.append(1))
    assert asked == [1]
