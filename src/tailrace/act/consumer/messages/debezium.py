"""Changes as the records that Debezium's connector for MongoDB makes, so that its consumers need no change.

The layout is that of Debezium 3.6: the same topics, keys and values, and tombstones after deletes. What it says in
text (``before``, ``after``, ``updatedFields``, keys, ``lsid``) is in the form in which MongoDB's Java driver writes it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import Any, Final, Literal, Protocol

import bson

from tailrace.act.consumer.messages.connect_schema import ConnectSchema, key_schema, value_schema
from tailrace.act.consumer.messages.driver_text import decoded, legacy, relaxed, relaxed_value
from tailrace.act.consumer.messages.making import CloudEvents, RawChange, masked_change
from tailrace.act.consumer.messages.publisher import Message, MessageRefused
from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.core import raw_bson
from tailrace.errors import UsageError
from tailrace.read.source.mask_file import Masks

#: Whose layout it is: the default of ``source.version``.
LAYOUT: Final = "3.6.3.Final"
_OPERATIONS: Final = {b"snapshot": "r", b"insert": "c", b"update": "u", b"replace": "u", b"delete": "d"}
_NOT_IN_TOPICS: Final = re.compile(r"[^A-Za-z0-9._-]")
#: Characters that Connect's JSON has as two units of UTF-16, escaped.
_TWO_UNITS: Final = re.compile("[\U00010000-\U0010ffff]")
_INT32: Final = Struct("<i")
_INT64: Final = Struct("<q")
_TIMESTAMP: Final = Struct("<II")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_Elements = Mapping[bytes, raw_bson.Element]


class RecordConverter(Protocol):
    """Writes the keys or the values of records, as a converter of Kafka Connect does.

    Attributes:
        content_type: the content type of what it writes
    """

    content_type: str

    def convert(self, topic: str, schema: ConnectSchema, value: Mapping[str, Any], *, is_key: bool) -> bytes:
        """The bytes of a key or a value of a topic. Raises PublisherAway if a server that it needs is unreachable."""


class JsonConverter:
    """Connect's converter of that name.

    Args:
        schemas: as ``schemas.enable``: whether each record carries its schema (``schema`` and ``payload``), or is the
            payload alone
    """

    content_type = "application/json"

    def __init__(self, *, schemas: bool = False) -> None:
        self.schemas = schemas
        self._written: dict[str, str] = {}

    def convert(self, topic: str, schema: ConnectSchema, value: Mapping[str, Any], *, is_key: bool) -> bytes:
        """See ``RecordConverter``."""
        payload = compact(value)
        if not self.schemas:
            return payload.encode()
        shown = self._written.get(schema["name"])
        if shown is None:
            shown = self._written[schema["name"]] = compact(schema)
        return f'{{"schema":{shown},"payload":{payload}}}'.encode()


def compact(value: Any) -> str:
    """JSON without spaces, as Connect writes it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else _TWO_UNITS.sub(_as_units, text)


def _as_units(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be").hex().upper()
    return f"\\u{units[:4]}\\u{units[4:]}"


def _now() -> int:
    return time.time_ns() // 1_000_000


class DebeziumMessages:
    """Every change of a document becomes a record as Debezium 3.6 writes it, and a delete two: its record and a
    tombstone.

    Args:
        topic_prefix: Debezium's ``topic.prefix``, which is also ``source.name``
        converter: writes keys and values: ``JsonConverter``, or ``AvroConverter`` or ``ProtobufConverter`` of the
            module ``schema_registry``
        key_converter: writes the keys, if they need another converter
        tombstones: as ``tombstones.on.delete``: whether a delete's record is followed by one with its key and no value
        cloud_events: ``"structured"``: as Debezium's CloudEventsConverter writes values; ``"binary"``: the same
            attributes in headers next to the unchanged record; ``None``: no CloudEvents
        topic: a function of database and collection that names the topic, or ``None`` for no record; by default
            ``<topic_prefix>.<database>.<collection>``. What Kafka forbids in a name becomes ``_``, as Debezium has it
        others: what becomes of a change that Debezium has no record for (drop, rename, invalidate, ...): ``"skip"``,
            as it does; ``"refuse"``: MessageRefused, so that it becomes a dead letter
        version: what ``source.version`` says
        masks: what is masked in every event before a record is made of it
        clock: gives ``ts_ms``, when the record was made: milliseconds since 1970
    """

    def __init__(
        self,
        topic_prefix: str,
        *,
        converter: RecordConverter | None = None,
        key_converter: RecordConverter | None = None,
        tombstones: bool = True,
        cloud_events: CloudEvents | None = None,
        topic: Callable[[str, str], str | None] | None = None,
        others: Literal["skip", "refuse"] = "skip",
        version: str = LAYOUT,
        masks: Masks | None = None,
        clock: Callable[[], int] = _now,
    ) -> None:
        if not isinstance(topic_prefix, str) or not topic_prefix or _NOT_IN_TOPICS.search(topic_prefix):
            raise UsageError(
                f"topic_prefix must be the beginning of a topic's name, not {topic_prefix!r}",
                hint="Use letters, digits, dots, dashes and underscores",
            )
        if others not in ("skip", "refuse"):
            raise UsageError(f"others must be skip or refuse, not {others!r}")
        if cloud_events not in (None, "structured", "binary"):
            raise UsageError(f"cloud_events must be structured or binary, not {cloud_events!r}")
        self._prefix = topic_prefix
        self._converter = JsonConverter() if converter is None else converter
        self._key_converter = self._converter if key_converter is None else key_converter
        if cloud_events == "structured" and (not isinstance(self._converter, JsonConverter) or self._converter.schemas):
            raise UsageError(
                "structured CloudEvents are JSON documents without Connect's schemas",
                hint="JsonConverter(), or cloud_events='binary'",
            )
        self._tombstones = tombstones
        self._cloud_events = cloud_events
        self._topic = topic
        self._others = others
        self._version = version
        self._masks = masks
        self._clock = clock
        self._schemas: dict[str, tuple[ConnectSchema, ConnectSchema]] = {}

    def __call__(self, change: RawChange) -> tuple[Message, ...]:
        """The messages of a change: none, one, or a delete's two.

        Raises MessageRefused for a change whose record could not be right: a string that is not UTF-8, a field that is
        there twice, an event without what a record needs, which a pipeline has taken away; MaskRefusedError where a
        mask reaches what cannot be masked.
        """
        change = masked_change(self._masks, change)
        event = change.raw
        elements = {element.name: element for element in raw_bson.elements(event)}
        operation = _OPERATIONS.get(_string_bytes(event, elements, b"operationType"))
        if operation is None:
            if self._others == "skip":
                return ()
            kind = _string_bytes(event, elements, b"operationType").decode("utf-8", "backslashreplace")
            raise MessageRefused(f"Debezium has no record of a change of the type {kind!r}")
        database, collection = _namespace(event, elements)
        topic = self._topic_of(database, collection)
        if topic is None:
            return ()
        key, value = self._schemas_of(topic)
        identifier = str(getattr(change, "message_id", None) or _token(event))
        record = self._record(event, elements, operation, database, collection)
        its_key = self._key_converter.convert(topic, key, {"id": _document_id(event, elements)}, is_key=True)
        shown = its_key if not isinstance(self._key_converter, JsonConverter) else its_key.decode()
        headers = {"content-type": self._converter.content_type}
        if self._cloud_events is not None:
            about = self._attributes(record)
        if self._cloud_events == "structured":
            data = {name: record[name] for name in ("before", "after", "updateDescription")}
            body = compact({**about, "data": data}).encode()
            headers = {"content-type": "application/cloudevents+json; charset=utf-8"}
        else:
            body = self._converter.convert(topic, value, record, is_key=False)
        if self._cloud_events == "binary":
            del about["datacontenttype"]  # the header content-type says it
            headers |= {f"ce-{name.lower()}": str(one) for name, one in about.items() if one is not None}
        made = Message(identifier, topic, body, shown, headers)
        if operation == "d" and self._tombstones:
            return made, Message(f"{identifier}-tombstone", topic, None, shown)
        return (made,)

    def _topic_of(self, database: str, collection: str) -> str | None:
        if self._topic is None:
            topic: str | None = f"{self._prefix}.{database}.{collection}"
        else:
            topic = self._topic(database, collection)
            refuse_unrun(topic, "the topic's function")
        # Java counts in units of UTF-16.
        return None if topic is None else _NOT_IN_TOPICS.sub(lambda one: "_" * (1 + (one[0] > "\uffff")), topic)

    def _schemas_of(self, topic: str) -> tuple[ConnectSchema, ConnectSchema]:
        found = self._schemas.get(topic)
        if found is None:
            found = self._schemas[topic] = (key_schema(topic), value_schema(topic))
        return found

    def _record(
        self, event: bytes, elements: _Elements, operation: str, database: str, collection: str
    ) -> dict[str, Any]:
        description = None
        kind = _string_bytes(event, elements, b"operationType")
        if kind == b"update" and (found := _document(elements, b"updateDescription")) is not None:
            description = _update_description(event, found)
        return {
            "before": _text(event, elements, b"fullDocumentBeforeChange"),
            "after": None if operation == "d" else _text(event, elements, b"fullDocument"),
            "updateDescription": description,
            "source": self._source(event, elements, database, collection, is_snapshot=operation == "r"),
            "op": operation,
            "ts_ms": self._clock(),
            "transaction": None,
        }

    def _source(
        self, event: bytes, elements: _Elements, database: str, collection: str, *, is_snapshot: bool
    ) -> dict[str, Any]:
        stamp = elements.get(b"clusterTime")
        if stamp is None or stamp.type != raw_bson.TIMESTAMP:
            raise _lacking("clusterTime")
        _, seconds = _TIMESTAMP.unpack_from(event, stamp.value_start)
        wall = elements.get(b"wallTime")  # servers from 6.0 on
        wall_time = (
            None if wall is None or wall.type != raw_bson.DATE else _INT64.unpack_from(event, wall.value_start)[0]
        )
        number = elements.get(b"txnNumber")
        if number is not None and number.type != raw_bson.INT64:
            raise _lacking("txnNumber as the server makes it")
        milliseconds = seconds * 1000 if wall_time is None else wall_time
        return {
            "version": self._version,
            "connector": "mongodb",
            "name": self._prefix,
            "ts_ms": milliseconds,
            "snapshot": "true" if is_snapshot else "false",
            "db": database,
            "sequence": None,
            "ts_us": milliseconds * 1_000,
            "ts_ns": milliseconds * 1_000_000,
            "collection": collection,
            "ord": _INT32.unpack_from(event, stamp.value_start)[0],
            "lsid": _text(event, elements, b"lsid"),
            "txnNumber": None if number is None else _INT64.unpack_from(event, number.value_start)[0],
            "wallTime": wall_time,
        }

    def _attributes(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A CloudEvent's, as Debezium's converter names and orders them: numbers of 64 bits are text in them."""
        source = record["source"]
        found = {
            "id": f"name:{self._prefix};ts:{source['ts_ms']};ord:{source['ord']}",
            "source": f"/debezium/mongodb/{self._prefix}",
            "specversion": "1.0",
            "type": "io.debezium.connector.mongodb.DataChangeEvent",
            "time": _moment(source["ts_ms"]),
            "datacontenttype": "application/json",
            "iodebeziumop": record["op"],
        }
        for name, value in source.items():
            shown = str(value) if value is not None and name != "ord" else value
            found[f"iodebezium{name.replace('_', '')}"] = shown
        return {
            **found,
            "iodebeziumtxid": None,
            "iodebeziumtxtotalorder": None,
            "iodebeziumtxdatacollectionorder": None,
        }


def _lacking(name: str) -> MessageRefused:
    return MessageRefused(
        f"the event has no {name}, which a record of Debezium's needs",
        hint="Does a stage of the pipeline remove it?",
    )


def _string_bytes(event: bytes, elements: _Elements, name: bytes) -> bytes:
    element = elements.get(name)
    if element is None or element.type != raw_bson.STRING:
        raise _lacking(name.decode())
    return event[element.value_start + 4 : element.end - 1]


def _document(elements: _Elements, name: bytes) -> int | None:
    """Where the document called ``name`` starts; ``None`` where there is none, or null."""
    element = elements.get(name)
    return element.value_start if element is not None and element.type == raw_bson.OBJECT else None


def _text(event: bytes, elements: _Elements, name: bytes) -> str | None:
    start = _document(elements, name)
    return None if start is None else legacy(event, start)


def _namespace(event: bytes, elements: _Elements) -> tuple[str, str]:
    start = _document(elements, b"ns")
    inside = {} if start is None else {one.name: one for one in raw_bson.elements(event, start)}
    if b"db" not in inside or b"coll" not in inside:
        raise _lacking("ns")
    return decoded(_string_bytes(event, inside, b"db")), decoded(_string_bytes(event, inside, b"coll"))


def _document_id(event: bytes, elements: _Elements) -> str:
    start = _document(elements, b"documentKey")
    element = None if start is None else raw_bson.find(event, b"_id", start)
    if element is None:
        raise _lacking("documentKey._id")
    return relaxed_value(event, element)


def _update_description(event: bytes, start: int) -> dict[str, Any]:
    inside = {element.name: element for element in raw_bson.elements(event, start)}
    updated = _document(inside, b"updatedFields")
    removed = inside.get(b"removedFields")
    truncated = inside.get(b"truncatedArrays")
    try:
        fields = [] if removed is None else list(bson.decode(raw_bson.value(event, removed)).values())
        arrays = [] if truncated is None else list(bson.decode(raw_bson.value(event, truncated)).values())
    except bson.errors.InvalidBSON:
        raise MessageRefused("a name of updateDescription is not UTF-8") from None
    shortened = [(one.get("field"), one.get("newSize")) for one in arrays if isinstance(one, dict)]
    is_whole = len(shortened) == len(arrays) and all(isinstance(size, int) for _, size in shortened)
    if not is_whole or not all(isinstance(name, str) for name in [*fields, *(name for name, _ in shortened)]):
        raise _lacking("updateDescription as the server makes it")
    return {
        "removedFields": fields or None,
        "updatedFields": None if updated is None else relaxed(event, updated),
        "truncatedArrays": [{"field": name, "size": size} for name, size in shortened] or None,
    }


def _token(event: bytes) -> str:
    token = raw_bson.find(event, b"_id")
    data = None if token is None or token.type != raw_bson.OBJECT else raw_bson.find(event, b"_data", token.value_start)
    if data is None or data.type != raw_bson.STRING:
        raise _lacking("_id")
    return event[data.value_start + 4 : data.end - 1].decode()


def _moment(milliseconds: int) -> str:
    try:
        moment = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        raise MessageRefused(f"a CloudEvent cannot show the time {milliseconds}, in milliseconds since 1970") from None
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"
