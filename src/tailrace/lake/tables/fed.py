"""Tables that are fed by the rows of a query of the user's, and what their state knows of it.

The state of such tables notes, in the transaction that holds a micro-batch's documents, whose micro-batch that was and
which events it had. So a micro-batch that is given again is recognised, and one that does not follow is refused: of
another query, of an older checkpoint, or after others that never came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import OtherHistoryError, SinkError, UsageError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.event_rows import EventRow
from tailrace.lake.tables.state import TableState

ANEW: Final = "begin again: another directory, a new checkpoint, and a stream with startingFrom=snapshot"


@dataclass(frozen=True, slots=True)
class FedBatch:
    """A micro-batch of a query.

    ``query``   the query's id, which its checkpoint keeps; ``number`` counts its micro-batches from 0 on
    ``rows``    its events, in the order of the stream
    ``reached`` the cluster time up to which the query has given all events; ``None`` where it does not say
    ``source``  the deployment that the query reads; ``""`` where it does not say
    """

    query: str
    number: int
    rows: Sequence[EventRow]
    reached: ClusterTime | None = None
    source: str = ""

    @property
    def stream(self) -> list[EventRow]:
        """The rows without the documents of a copy."""
        return [row for row in self.rows if not row.is_copy]


@dataclass(frozen=True, slots=True)
class FedMark:
    """What was applied last. ``token``: the last event that was applied, ``""`` while there is none; ``count``,
    ``first``, ``last``: how many events of the stream the micro-batch had, and which."""

    query: str
    number: int
    token: str = ""
    count: int = 0
    first: str = ""
    last: str = ""
    source: str = ""

    @classmethod
    def of(cls, state: TableState) -> FedMark | None:
        """What the state notes; ``None`` if nothing was applied yet."""
        found = state.fed()
        return None if found is None else cls(**found)

    def to_document(self) -> Mapping[str, Any]:
        """For the state."""
        return asdict(self)

    @classmethod
    def after(cls, before: FedMark | None, batch: FedBatch) -> FedMark:
        """The mark after ``batch``."""
        rows = batch.stream
        first, last = (rows[0].token, rows[-1].token) if rows else ("", "")
        token, source = ("", "") if before is None else (before.token, before.source)
        return cls(batch.query, batch.number, max(last, token), len(rows), first, last, batch.source or source)


def new_rows(mark: FedMark | None, batch: FedBatch, time: ClusterTime) -> Sequence[EventRow] | None:
    """The rows of the batch that the tables, which have reached ``time``, do not have; ``None`` if they have all.
    Raises SinkError where it does not follow what they have."""
    if mark is None:
        if batch.number:
            raise SinkError(
                f"the tables are new, and the checkpoint goes on with micro-batch {batch.number}: what came before is "
                "not in them",
                hint=f"Give the directory that the query wrote before, or {ANEW}",
            )
        return batch.rows
    if mark.source and batch.source and mark.source != batch.source:
        raise OtherHistoryError(
            f"the tables are of another deployment: {mark.source}, and the query reads {batch.source}",
            hint=f"Read that one, or {ANEW}",
        )
    stream = batch.stream
    if batch.query != mark.query:
        return _taken_over(mark, batch, stream)
    if batch.number == mark.number:
        return _again(mark, batch, stream)
    if batch.number != mark.number + 1:
        older = "the checkpoint is an older copy"
        if batch.number > mark.number:
            older = "the tables are an older copy, or the query has written elsewhere meanwhile"
        raise SinkError(
            f"the tables have micro-batch {mark.number} of the query, and the checkpoint goes on with {batch.number}: "
            f"{older}",
            hint=f"Restore the one that is older, or {ANEW}",
        )
    _check_later(mark, batch.rows, time)
    return batch.rows


def _again(mark: FedMark, batch: FedBatch, stream: Sequence[EventRow]) -> Sequence[EventRow] | None:
    """A micro-batch that is given again: it has the same events. Of a copy it may have others, since documents were
    changed meanwhile; before the first event of the stream they are as good."""
    ends = (len(stream), *((stream[0].token, stream[-1].token) if stream else ("", "")))
    if ends != (mark.count, mark.first, mark.last):
        raise SinkError(
            f"micro-batch {batch.number} is given again with other events: {ends[0]}, and it had {mark.count}",
            hint=f"Was an old copy of the checkpoint restored, or the query changed? If so, {ANEW}",
        )
    return None if mark.token else [row for row in batch.rows if row.is_copy] or None


def _taken_over(mark: FedMark, batch: FedBatch, stream: Sequence[EventRow]) -> Sequence[EventRow]:
    """A new checkpoint takes over where its first micro-batch has the last event that was applied: then nothing is
    missing between the two."""
    if batch.number or not mark.token:
        raise SinkError(
            f"the tables are written by query {mark.query}: this checkpoint may not write to them",
            hint="Tables have one query. Stop this one, or give it a directory of its own",
        )
    if all(row.token != mark.token for row in stream) or len(stream) != len(batch.rows):
        time = ClusterTime(int(mark.token[2:18], 16))
        raise SinkError(
            "a new checkpoint has to begin with the last event that the tables have, so that none is missing: its "
            f"first micro-batch does not have the event with the token {mark.token[:80]}",
            hint=f"Begin it with startAtOperationTime={time.seconds},{time.increment}, or {ANEW}",
        )
    return [row for row in stream if row.token > mark.token]


def _check_later(mark: FedMark, rows: Sequence[EventRow], time: ClusterTime) -> None:
    """Raises SinkError unless all rows come after what the tables have."""
    early = next((row for row in rows if mark.token or not row.is_copy), None)
    if early is None:
        return
    if early.is_copy:
        raise SinkError(
            "the stream has a document of a copy after events that the tables have",
            hint=f"A copy comes before the stream. Otherwise {ANEW}",
        )
    if early.token <= mark.token or early.time < time:
        raise SinkError(
            f"the stream has an event that is earlier than what the tables have: {early.shown}, and they are at {time}",
            hint="Give the rows of the stream in its order, each of them once: micro-batch after micro-batch",
        )
    if mark.token and early.time == time:
        raise SinkError(
            f"what happened at {time} is divided between two micro-batches: the tables would show half a transaction",
            hint="Let micro-batches end between two cluster times, as those of format('tailrace') do",
        )


def refuse_fed(root: TablePlace, state: TableState) -> None:
    """Raises UsageError if a query feeds the tables: nobody else may go on with them."""
    if state.fed() is not None:
        raise UsageError(
            f"the tables in {root} are written by a Spark query (tailrace.spark.tables_writer)",
            hint="Start that query again, or give another directory",
        )


def refuse_others(root: TablePlace, state: TableState) -> None:
    """Raises UsageError if something else than a query has written the tables."""
    if state.fed() is None and (state.position() is not None or state.copy_begun() is not None):
        raise UsageError(
            f"the tables in {root} are written by `tailrace tables write`, `tailrace run` or TablesWriter",
            hint="Go on with that, or give another directory",
        )
