"""What a reader does whose place in an oplog is gone: the source says where the oplog begins, and the reader says how
to start again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.core.oplog.history import history_lost
from tailrace.errors import ChangeStreamHistoryLost


@contextmanager
def told_how_to_begin(anew: str) -> Iterator[None]:
    """History that is lost in the body is reported with ``anew``, which is the end of a sentence: "remove the
    directory"."""
    try:
        yield
    except ChangeStreamHistoryLost as error:
        raise history_lost(". ".join(filter(None, (error.hint, f"To start again, {anew}")))) from None
