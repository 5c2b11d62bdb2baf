"""``foreachBatch`` with what a sink of your own needs: which batch it is, the order of its rows, and what is new.

Spark calls a ``foreachBatch`` function again with the same batch when the driver died before Spark had noted that the
function had ended. The number of a batch is the same then, and so is the id of the query, which lies in the
checkpoint. ``tailrace.lake.spark.applied`` keeps both in a sink that has transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from tailrace.core import raw_bson
from tailrace.errors import SinkError, UsageError
from tailrace.read.window.sortable_key import sortable_key

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, Row

_TOKEN: Final = "token"
_EVENT: Final = "event"
_DOCUMENT: Final = "_tailrace_document"
_QUERY: Final = "sql.streaming.queryId"  # Spark's own name for it, in the thread that runs the batch

MicroBatchHandler = Callable[["MicroBatch"], object]


def foreach_batch(handler: MicroBatchHandler, *, query: str | None = None) -> Callable[[DataFrame, int], None]:
    """The function for ``writeStream.foreachBatch`` that calls ``handler`` with a ``MicroBatch``.

    Args:
        query: this text and the number of the batch are a batch's identity. By default it is the id of the query, which
            the checkpoint keeps; Spark Connect does not give that id, so there ``query`` is required

    What ``handler`` raises ends the query; its batch is given again at the next start. Raises UsageError for a handler
    that cannot be called; the query fails with UsageError if the frame has no column ``token``.
    """
    if not callable(handler):
        raise UsageError(
            f"foreach_batch needs a function that takes a batch, found {type(handler).__name__}",
            hint="Give it as foreach_batch(handler)",
        )

    def apply(frame: DataFrame, number: int) -> None:
        handler(MicroBatch(query_of(frame) if query is None else query, number, frame))

    return apply


def query_of(frame: DataFrame) -> str:
    """The id of the query whose micro-batch ``frame`` is. Raises UsageError where Spark does not say it."""
    context = getattr(frame.sparkSession, "_sc", None)
    found = context.getLocalProperty(_QUERY) if context is not None else None
    if not found:
        raise UsageError(
            "Spark does not say which query this batch belongs to",
            hint="Name it with query='a name that stays with the checkpoint'",
        )
    return str(found)


class MicroBatch:
    """A micro-batch of a query, as ``foreach_batch`` gives it to a handler.

    Args:
        query: the id of the query: the same for as long as its checkpoint exists, across restarts
        number: the number of the micro-batch: 0, 1, 2, ... ; a batch that is given again has the same number
        frame: its rows, one for each event. Each action reads the source again: ``persist()`` it for more than one
            action
    """

    def __init__(self, query: str, number: int, frame: DataFrame) -> None:
        if _TOKEN not in frame.columns:
            raise UsageError(
                "foreach_batch needs the column 'token', which shows the order and what is repeated",
                hint="Keep it among the source's columns and in every select",
            )
        self.query = query
        self.number = number
        self.frame = frame
        self._last: str | None = None
        self._begun = self._taken = False

    @property
    def identity(self) -> str:
        """Query and number as one text: the same when the batch is given again, and never that of another batch."""
        return f"{self.query}/{self.number}"

    def rows(self) -> Iterator[Row]:
        """Every row, in the order of the stream, at the driver; at most two of its slices are in memory at a time.

        Raises SinkError if the rows do not ascend by token because the query has shuffled them.
        """
        self._begun, self._taken, last = True, False, None
        for row in self.frame.toLocalIterator(prefetchPartitions=True):
            token = row[_TOKEN]
            # Rows that a query makes of one event have one token.
            if token is None or (last is not None and token < last):
                raise _shuffled()
            last = token
            yield row
        self._taken, self._last = True, last

    def arrow(self) -> pa.Table:
        """Every row, in the order of the stream, as one Arrow table at the driver: all of the batch is in memory, which
        ``maxEventsPerTrigger`` bounds. Raises SinkError as ``rows`` does."""
        import pyarrow.compute as pc  # noqa: PLC0415

        table = self.frame.toArrow()
        tokens = table.column(_TOKEN).combine_chunks()
        if tokens.null_count or pc.any(pc.greater(tokens[:-1], tokens[1:])).as_py():
            raise _shuffled()
        self._begun, self._taken, self._last = True, True, tokens[-1].as_py() if len(tokens) else None
        return table

    def by_document(self, partitions: int | None = None) -> DataFrame:
        """The rows divided so that those of one document are in one partition, in the order of the stream: for
        ``foreachPartition`` and writers that work in parallel. Documents are told apart by namespace and ``_id``, as
        the server compares it (1 and 1.0 are one document).

        Events about a whole collection (drop, rename, ...) are together in one partition, in no order relative to
        documents in other partitions: use ``rows`` where that matters. Needs the column ``event``.
        """
        if _EVENT not in self.frame.columns:
            raise UsageError("by_document needs the column 'event': it tells documents apart by their _id")
        keyed = self.frame.withColumn(_DOCUMENT, _document_column())
        divided = keyed.repartition(_DOCUMENT) if partitions is None else keyed.repartition(partitions, _DOCUMENT)
        return divided.sortWithinPartitions(_TOKEN).drop(_DOCUMENT)

    def after(self, token: str) -> MicroBatch:
        """The same batch without the rows up to and including ``token``."""
        return MicroBatch(self.query, self.number, self.frame.where(self.frame[_TOKEN] > token))

    def empty(self) -> MicroBatch:
        """The same batch without any row."""
        return MicroBatch(self.query, self.number, self.frame.where("false"))

    def last_token(self) -> str | None:
        """The token of the last row; ``None`` for an empty batch. Costs a read of the source if neither ``rows`` nor
        ``arrow`` has run to its end. Raises SinkError if ``rows`` was begun and then abandoned: the rest of the batch
        would be lost."""
        if self._begun and not self._taken:
            raise SinkError(
                f"the handler has not taken all rows of batch {self.number}",
                hint="Go through batch.rows() to its end; skip rows inside the loop",
            )
        if not self._taken:
            found = cast(Any, self.frame.agg({_TOKEN: "max"}).first())[0]
            self._last, self._begun, self._taken = found, True, True
        return self._last


def _shuffled() -> SinkError:
    return SinkError(
        "the rows of the batch do not ascend by token: the query has shuffled them, or changed the column",
        hint="Join, group and repartition inside the handler, or order the frame by token",
    )


def _document_column() -> Column:
    import pyarrow as pa  # noqa: PLC0415
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # noqa: PLC0415

    def keys(events: pa.Array) -> pa.Array:
        return pa.array([document_of(event) for event in events.to_pylist()], pa.binary())

    # Written out: Spark would look for types in the annotations, which are texts here.
    keys.__annotations__ = {"events": pa.Array, "return": pa.Array}
    return cast("Column", arrow_udf(keys, "binary")(_EVENT))


def document_of(event: bytes) -> bytes:
    """Bytes that are equal for two events exactly if both concern one document; empty if ``event`` concerns none."""
    place, key = raw_bson.find(event, b"ns"), raw_bson.find(event, b"documentKey")
    if place is None or key is None:
        return b""
    document = raw_bson.value(event, key)
    element = raw_bson.find(document, b"_id")
    if element is None:
        return b""
    return raw_bson.value(event, place) + sortable_key(element.type, raw_bson.value(document, element))
