"""A database of the target opened before an ``applyOps`` makes the first collection in it.

A server refuses a database whose name differs from another's only in case (13297). Sent as ``applyOps``, the same ends
the server (measured on 6.0.27). A database keeps its name after its last collection was dropped, and no list shows it
then. So the server is asked first, by a transaction that makes a collection and is given up.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.act.sync.target import MAJORITY, answered, sink_error
from tailrace.core.printable import in_a_line

_DIFFER_IN_CASE: Final = 13297
_OTHER: Final = re.compile(r"already have: \[(.+?)\] trying to create \[")


def open_database(target: MongoClient[Any], database: str, what: str, drop: Callable[[str], object]) -> None:
    """Let the server open a database. Another one that is in its way and has nothing left is dropped by ``drop``, which
    no fence can stand before; it is needed for such names alone. Raises SinkError where that has something left."""
    error = _refusal(target, database)
    if error is None:
        return
    match = _OTHER.search(str(error))
    if match is None or not _is_empty(target, match[1]):
        raise sink_error(what, error) from error
    drop(match[1])


def _refusal(target: MongoClient[Any], database: str) -> OperationFailure | None:
    with target.start_session() as session:
        session.start_transaction(write_concern=MAJORITY)
        try:
            target[database].command({"create": f"tailrace.{secrets.token_hex(8)}"}, session=session)
        except OperationFailure as error:
            return error if error.code == _DIFFER_IN_CASE else None  # of others, what follows says more
        except PyMongoError:
            return None
        finally:
            with suppress(PyMongoError):
                session.abort_transaction()
    return None


def _is_empty(target: MongoClient[Any], database: str) -> bool:
    return not answered(f"list {in_a_line(database)}", lambda: list(target[database].list_collections()))
