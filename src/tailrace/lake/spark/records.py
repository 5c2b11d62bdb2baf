"""Events as Kafka records: the columns that Spark's own Kafka sink takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from tailrace.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_EVENT: Final = "event"
#: As Spark's sink for Kafka names them.
RECORD_SCHEMA: Final = "topic string, key binary, value binary, headers array<struct<key: string, value: binary>>"


class _Record(Protocol):
    """What is asked of a message (``tailrace.consumer.messages.Message``)."""

    topic: str
    body: bytes | None

    def kafka_key(self) -> bytes | None: ...

    def kafka_headers(self) -> list[tuple[str, bytes]]: ...


@dataclass(frozen=True)
class _RowChange:
    """An event in a row, for what makes messages of changes."""

    raw: bytes


def kafka_records(frame: DataFrame, make: Callable[[Any], Any]) -> DataFrame:
    """The rows of ``frame`` as Kafka records, in their order within each partition: the columns ``topic``, ``key``,
    ``value`` (null: a tombstone) and ``headers``, byte for byte what ``KafkaPublisher`` publishes.

    Args:
        frame: with the column ``event``
        make: makes the messages for a change, such as ``DebeziumMessages`` or ``ChangeMessages``; it runs in Spark's
            workers, so it must be picklable, and must be able to reach a schema registry from there

    What ``make`` raises, MessageRefused included, fails the query. Raises UsageError if the frame has no column
    ``event``.
    """
    if _EVENT not in frame.columns:
        raise UsageError("kafka_records needs the column 'event', which messages are made of")

    def convert(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield _records(batch.column(0), make)

    return frame.select(_EVENT).mapInArrow(convert, RECORD_SCHEMA)


def _records(events: pa.Array, make: Callable[[Any], Any]) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415

    made: list[_Record] = []
    for event in events:
        if (raw := event.as_py()) is not None:
            made += _several(make(_RowChange(raw)))
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    headers = [[{"key": name, "value": value} for name, value in one.kafka_headers()] for one in made]
    columns = [
        pa.array([one.topic for one in made], pa.string()),
        pa.array([one.kafka_key() for one in made], pa.binary()),
        pa.array([one.body for one in made], pa.binary()),
        pa.array(headers, pa.list_(header)),
    ]
    return pa.RecordBatch.from_arrays(columns, ["topic", "key", "value", "headers"])


def _several(made: _Record | Sequence[_Record] | None) -> Sequence[_Record]:
    if made is None:
        return ()
    return made if isinstance(made, (list, tuple)) else (made,)
