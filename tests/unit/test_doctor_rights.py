"""What ``tailrace doctor`` says about rights, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.cli import doctor_rights


@pytest.mark.parametrize(
    ("count", "says"),
    [(3, "this user may read every database"), (101, "this user may read each of the 100 databases tried, of 101")],
)
def test_of_what_was_not_tried_nothing_is_said(monkeypatch: pytest.MonkeyPatch, count: int, says: str) -> None:
    """The message was "every database", whatever the hundred-and-first would have answered."""
    monkeypatch.setattr(doctor_rights, "database_names", lambda _: [f"d{number}" for number in range(count)])
    monkeypatch.setattr(doctor_rights, "Connection", lambda client: client)
    monkeypatch.setattr(doctor_rights, "_may_find", lambda *_: True)
    source: Any = SimpleNamespace(client=None)
    assert doctor_rights.look_ups(source).found == says
