"""Which line of a failing handler is named: the user's own, wherever their project is."""

from __future__ import annotations

from pathlib import Path

import pytest

import tailrace
from tailrace.act.consumer.rules.handler_failure import handler_failed
from tailrace.act.consumer.rules.need import Pulled

PULLED = Pulled({}, {"_data": "82AB"})
RAISING = "\n\ndef handle(change):\n    raise ValueError('no such customer')\n"


def message_of(path: Path) -> str:
    """The message for a handler in a file at ``path`` that raises on its fourth line."""
    names: dict[str, object] = {}
    exec(compile(RAISING, str(path), "exec"), names)
    handler = names["handle"]
    assert callable(handler)
    try:
        handler(None)
    except ValueError as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without the line of this file
        return handler_failed("orders", PULLED, error).message
    raise AssertionError("it did not raise")


@pytest.mark.parametrize("folder", ["shop", "tailrace", "tailrace/src", "src/tailrace"])
def test_the_line_of_a_user_s_file_is_named_though_the_project_is_called_tailrace(tmp_path: Path, folder: str) -> None:
    said = "the handler of 'orders' raised ValueError in handlers.py, line 4, at the change with token 82AB: "
    assert message_of(tmp_path / folder / "handlers.py") == said + "no such customer"


def test_lines_of_this_package_and_of_installed_ones_are_not_the_handler_s(tmp_path: Path) -> None:
    ours = Path(tailrace.__file__).parent / "act" / "consumer" / "listener.py"
    installed = tmp_path / "lib" / "site-packages" / "broker" / "send.py"
    for path in (ours, installed):
        assert "raised ValueError at the change" in message_of(path)
