"""Exactly once into a database with transactions: a table that is written with each batch says which batch is in it.

The table ``tailrace_applied`` has a row for each sink::

    sink      name of the sink, primary key
    query_id  the query whose batch was applied last
    batch     its number
    token     the last resume token that the sink has
    claim     random, of the transaction that wrote the row: shows that no other came between

The contents of the sink and the row are committed together. So a batch that Spark gives again is recognised, a fresh
checkpoint cannot write an event twice, an old one is shut out, and a sink that was restored with its row from a backup
notices that batches are missing. A sink without the row is taken for a new one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple

from tailrace.errors import SinkError, UsageError
from tailrace.lake.spark.batch import MicroBatch
from tailrace.lake.store.layout import cluster_time_of
from tailrace.read.snapshot.event import is_of_copy

TABLE: Final = "tailrace_applied"
#: Everything that becomes part of a statement. No driver's way of writing parameters is like another's.
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
_TOKEN: Final = re.compile(r"[0-9A-F]*")


class _Applied(NamedTuple):
    query: str
    batch: int
    token: str
    claim: str


class AppliedBatches:
    """What the sink named ``sink`` has, according to a row in the database of ``connection``.

    Args:
        connection: of a driver that follows Python's DB-API (psycopg2, DuckDB, sqlite3), outside a transaction
        sink: letters, digits and ``_.:-``; two sinks of one database have two names
        table: the table that holds the rows; it is created if it is missing

    Raises UsageError for names that cannot be used and a connection that commits each statement on its own.
    """

    def __init__(self, connection: Any, sink: str, *, table: str = TABLE) -> None:
        _require(_NAME, sink, "the name of a sink")
        if not isinstance(table, str) or not _IDENTIFIER.fullmatch(table):
            raise UsageError(f"{table!r} cannot be the name of a table", hint="Use letters, digits and _")
        if getattr(connection, "autocommit", False) is True:
            raise UsageError(
                "the connection commits each statement on its own (autocommit), but a batch needs one transaction",
                hint="Turn autocommit off",
            )
        self._connection = connection
        self._sink = sink
        self._table = table

    @contextmanager
    def transaction(self, batch: MicroBatch) -> Iterator[MicroBatch]:
        """Apply ``batch`` in one transaction: gives the part of it that the sink does not have yet, and commits that
        together with the row of the sink when the block ends. If the block raises, everything is rolled back.

        If the sink already has the batch, it gives an empty one, and the block is rolled back. Take all rows of the
        given batch (``rows`` to its end, ``arrow``, or the frame).

        Raises SinkError if another query has taken the sink over, if the sink lacks an earlier batch, if an earlier
        batch arrives with events that the sink lacks, if another process writes to the sink at the same time, and if
        not all rows were taken. What the driver raises is passed on.
        """
        _require(_NAME, batch.query, "the id of a query")
        found = self._begin()
        try:
            new = batch if found is None or not found.token else batch.after(found.token)
            if found is not None and self._has(found, batch) and self._adds_nothing(found, new):
                yield batch.empty()
                self._connection.rollback()
                return
            yield new
            last = max(new.last_token() or "", "" if found is None else found.token)
            self._record(found, _Applied(batch.query, batch.number, last, uuid.uuid4().hex))
            self._connection.commit()
        except BaseException:
            self._give_up()
            raise

    def start(self) -> dict[str, str]:
        """Options of ``format("tailrace")`` with which a fresh checkpoint continues where the sink is; empty if the
        sink has nothing yet. The stream begins at the time of the sink's last event, and ``transaction`` leaves out
        what the sink has.

        Raises SinkError if the sink's last row came from the copy of ``startingFrom=snapshot``.
        """
        found = self._begin()
        self._connection.rollback()
        if found is None or not found.token:
            return {}
        if is_of_copy(found.token):
            raise SinkError(
                f"sink '{self._sink}' is in the middle of a copy: only its checkpoint knows what is left to copy",
                hint="Go on with that checkpoint. If it is lost, empty the sink, remove its row, and begin again with "
                "startingFrom=snapshot",
            )
        time = cluster_time_of(found.token)
        return {"startAtOperationTime": f"{time.seconds},{time.increment}"}

    def _has(self, found: _Applied, batch: MicroBatch) -> bool:
        """Whether the batch is in the sink. Raises where the batch does not follow what the sink has."""
        if found.query == batch.query:
            if batch.number > found.batch + 1:
                raise SinkError(
                    f"sink '{self._sink}' has batch {found.batch}, and the checkpoint goes on with {batch.number}: the "
                    "sink was restored from an older copy, or the handler left batches out",
                    hint="Begin a new checkpoint with the options that AppliedBatches.start() gives",
                )
            return batch.number <= found.batch
        if batch.number > 0:
            # A new checkpoint begins with batch 0, so this one is the older of the two.
            raise SinkError(
                f"sink '{self._sink}' has been taken over by query {found.query}: this checkpoint may not write to it",
                hint="Stop this query, or give it a sink of its own name",
            )
        return False

    def _adds_nothing(self, found: _Applied, again: MicroBatch) -> bool:
        """Whether a batch that the sink has by its number is there by its events too: ``again`` is what of it comes
        after the sink's last token. The number alone is no proof: an old copy of a checkpoint plans its next batches
        anew, and a fresh one under the same name counts from 0."""
        if again.last_token() is None:
            return True
        if again.number < found.batch:
            raise SinkError(
                f"the checkpoint is behind sink '{self._sink}': it gives batch {again.number} with events that the "
                f"sink does not have, and the sink has batch {found.batch}",
                hint="Was an old copy of the checkpoint restored, or a fresh one begun under the same name? Begin a "
                "new checkpoint, under another name, with the options that AppliedBatches.start() gives",
            )
        return False  # the newest batch, and longer than it was: what is new of it follows what the sink has

    # -- statements --------------------------------------------------------------------------------------------------

    def _begin(self) -> _Applied | None:
        self._open()
        try:
            return self._read()
        except Exception:
            # The table is missing (each driver has a class of its own for that), or the database is gone.
            if not self._give_up():
                raise
        self._open()
        self._run(
            f"CREATE TABLE IF NOT EXISTS {self._table} (sink VARCHAR(128) PRIMARY KEY, query_id VARCHAR(128) NOT NULL, "
            "batch BIGINT NOT NULL, token TEXT NOT NULL, claim VARCHAR(32) NOT NULL)"
        )
        self._connection.commit()
        self._open()
        return self._read()

    def _give_up(self) -> bool:
        """Roll back after an error. Returns whether the driver could: without a connection, or after a
        commit that DuckDB could not write, there is nothing to roll back. What it says about that must not hide the
        error itself."""
        try:
            self._connection.rollback()
        except Exception:  # noqa: BLE001  each driver has classes of its own
            return False
        return True

    def _open(self) -> None:
        """Begin a transaction where the driver does not do it on its own with the first statement."""
        if hasattr(self._connection, "begin"):
            self._connection.begin()
        elif getattr(self._connection, "in_transaction", None) is False:  # sqlite3 begins with the first change only
            self._run("BEGIN IMMEDIATE")

    def _read(self) -> _Applied | None:
        row = self._run(
            f"SELECT query_id, batch, token, claim FROM {self._table} WHERE sink = '{self._sink}'", fetch=True
        )
        if row is None:
            return None
        query, number, token, claim = row
        found = _Applied(str(query), int(number), str(token), str(claim))
        if not (_NAME.fullmatch(found.query) and _TOKEN.fullmatch(found.token) and _NAME.fullmatch(found.claim)):
            raise SinkError(f"the row of sink '{self._sink}' in {self._table} is damaged")
        return found

    def _record(self, found: _Applied | None, new: _Applied) -> None:
        _require(_TOKEN, new.token, "a resume token")
        values = f"'{new.query}', {int(new.batch)}, '{new.token}', '{new.claim}'"
        if found is None:
            self._run(f"INSERT INTO {self._table} VALUES ('{self._sink}', {values})")
        else:
            self._run(
                f"UPDATE {self._table} SET query_id = '{new.query}', batch = {int(new.batch)}, token = '{new.token}', "
                f"claim = '{new.claim}' WHERE sink = '{self._sink}' AND claim = '{found.claim}'"
            )
        now = self._read()
        if now != new:
            raise SinkError(
                f"another process has written to sink '{self._sink}' meanwhile; this batch was rolled back",
                hint="One query may write to a sink: stop the other",
            )

    def _run(self, statement: str, *, fetch: bool = False) -> Any:
        if hasattr(self._connection, "execute"):
            # DuckDB's cursors are connections of their own, with another transaction.
            result = self._connection.execute(statement)
            return result.fetchone() if fetch else None
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(statement)
            return cursor.fetchone() if fetch else None


def _require(pattern: re.Pattern[str], text: object, what: str) -> None:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise UsageError(f"{str(text)[:80]!r} cannot be {what}", hint="Use letters, digits and _ . : -")
