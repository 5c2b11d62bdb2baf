"""A reply that is read in a thread, without a server."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from tailrace.errors import UsageError
from tailrace.read.source.next_reply import AHEAD_BYTES_MIN, Replies


class Cursor:
    """Gives a reply once it may."""

    alive = True

    def __init__(self) -> None:
        self.may_give = threading.Event()
        self.closed = threading.Event()

    def __next__(self) -> bytes:
        assert self.may_give.wait(60)
        return b"reply"

    def close(self) -> None:
        self.closed.set()


def following() -> tuple[Any, Replies]:
    """A cursor, and its replies after a long one was given."""
    cursor: Any = Cursor()
    replies = Replies(cursor, ahead=True)
    replies.given(bytes(AHEAD_BYTES_MIN))
    return cursor, replies


def test_a_forked_process_is_told_that_it_has_no_such_stream() -> None:
    """Only the parent has the thread: the child would wait for a reply for ever, or get a wrong one."""
    cursor, replies = following()
    child = os.fork()
    if not child:
        try:
            replies.next()
        except UsageError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    cursor.may_give.set()
    assert replies.next() == b"reply"


def test_the_cursor_is_closed_after_the_reply_that_is_on_its_way() -> None:
    cursor, replies = following()
    replies.close()
    assert not cursor.closed.is_set()
    cursor.may_give.set()
    assert cursor.closed.wait(60)


@pytest.mark.parametrize("size", [0, AHEAD_BYTES_MIN - 1])
def test_nothing_is_read_ahead_of_a_short_reply(size: int) -> None:
    cursor: Any = Cursor()
    replies = Replies(cursor, ahead=True)
    replies.given(bytes(size))
    replies.close()
    assert cursor.closed.is_set()
