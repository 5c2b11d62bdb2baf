"""A handler's error names the user's own line that raised, wherever the user's files lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.act.consumer.rules import handler_failure
from tailrace.act.consumer.rules.handler_failure import handler_failed
from tailrace.act.consumer.rules.need import Pulled


def failing(at: str, calls: Callable[[], Any] | None = None) -> Callable[[], None]:
    """A function of a file ``at``: it fails in its second line, or calls what does."""
    found: dict[str, Any] = {"calls": calls}
    exec(compile("def work():\n    " + ("calls()" if calls else "1 / 0"), at, "exec"), found)
    work: Callable[[], None] = found["work"]
    return work


def words_of(work: Callable[[], None]) -> str:
    try:
        work()
    except ZeroDivisionError as error:
        return str(handler_failed("orders", Pulled({}, {"_data": "82"}), error))
    raise AssertionError("it has not failed")


@pytest.mark.parametrize("folder", ["/srv/shop", "/srv/tailrace", "/opt/tailrace/src"])
def test_the_line_of_a_project_of_any_name(folder: str) -> None:
    assert "in orders.py, line 2," in words_of(failing(f"{folder}/orders.py"))


def test_the_caller_of_our_own_line_and_of_one_that_was_installed_is_named() -> None:
    ours = str(Path(handler_failure.__file__).with_name("listener.py"))
    for called in (ours, "/usr/lib/python3/site-packages/pymongo/pool.py"):
        said = words_of(failing("/srv/tailrace/orders.py", failing(called)))
        assert "in orders.py, line 2," in said
