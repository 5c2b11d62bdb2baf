"""Code that reads on by itself waits out passing failures, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.errors import ChangeStreamFatal, ChangeStreamHistoryLost, SourceError, TailraceError
from tailrace.watch.client import patience
from tailrace.watch.client.patience import try_next_patiently


class Failing:
    alive = True

    def __init__(self, error: TailraceError) -> None:
        self.error = error

    def try_next(self) -> Any:
        raise self.error


def test_an_error_that_passes_is_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_PAUSE_S", 0.0)
    assert try_next_patiently(Failing(SourceError("away"))) is None


@pytest.mark.parametrize("error", [ChangeStreamHistoryLost("gone"), ChangeStreamFatal("not there")])
def test_an_error_that_no_resume_mends_is_raised_though_the_stream_is_open(error: TailraceError) -> None:
    """A stream that was read together with others stayed open after its history was lost, and lanes read on for ever:
    no test had lost the history of a second stream."""
    with pytest.raises(type(error)):
        try_next_patiently(Failing(error))
