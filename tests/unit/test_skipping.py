"""Which change a listener may leave out if an operator asks for it: never one without a position to move to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.act.consumer.rules.skipping import SkippingLogic


class Standing(SkippingLogic):
    """A listener whose position is ``position``. Anything else that it asked for would fail."""

    def __init__(self, position: Any) -> None:
        self._position = position


@pytest.mark.parametrize(
    ("position", "of_change"),
    [(None, None), (SimpleNamespace(snapshot={"_id": 1}), None), (SimpleNamespace(snapshot=None), "of a snapshot")],
    ids=["no position yet", "inside a snapshot", "the change ends a snapshot"],
)
def test_a_change_without_a_position_to_move_to_is_not_left_out(position: Any, of_change: Any) -> None:
    """If this said that the change was left out, it would be neither handled nor kept. Only one test came here."""
    asked = Standing(position)._skip(Any, SimpleNamespace(position=of_change), {})  # type: ignore[arg-type]
    with pytest.raises(StopIteration) as ended:
        next(asked)
    assert ended.value.value is False


def test_what_is_no_change_to_a_driver_is_not_left_out_and_counts_for_nothing() -> None:
    """A lane that stands at a barrier has none: the driver says so."""
    listener = Standing(SimpleNamespace(snapshot=None))
    asked: list[Any] = []

    def ask(need: Any) -> Any:
        asked.append(need)
        return False
        yield

    listener._again = 2
    listener._changes = lambda owned, batch: ["the change"]  # type: ignore[method-assign, assignment]
    listener._ask = ask  # type: ignore[method-assign]
    with pytest.raises(StopIteration) as ended:
        next(listener._skip(Any, SimpleNamespace(position=None, error=None), {"letters": "a.b"}))  # type: ignore[arg-type]
    assert ended.value.value is False
    assert [need.change for need in asked] == ["the change"]
    assert listener._again == 2
