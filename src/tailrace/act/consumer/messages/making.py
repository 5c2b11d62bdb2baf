"""Which message a change becomes: the event itself, or what an application put into its outbox."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isnan
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote
from zlib import crc32

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.json_util import RELAXED_JSON_OPTIONS, dumps

from tailrace.act.consumer.messages.publisher import Message, MessageRefused
from tailrace.act.consumer.rules.lane_key import BY_ID, LaneKey, value_in
from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.core import raw_bson
from tailrace.core.event.keystring import encode
from tailrace.errors import UsageError
from tailrace.read.source.mask_file import Masks

CloudEvents = Literal["structured", "binary"]

_JSON: Final = "application/json"
_RAW: Final = "surrogateescape"
_BSON: Final = "application/bson"
_ANY_DATE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    # Strings that are not UTF-8 are carried as the bytes that they are (``_encoded``).
    unicode_decode_error_handler=_RAW,
)
#: Types that have more than one way to write an equal value.
_NUMBERS: Final = frozenset({raw_bson.INT32, raw_bson.INT64, raw_bson.DOUBLE, raw_bson.DECIMAL128})


class RawChange(Protocol):
    """What a message is made of: a change with its event's exact bytes."""

    @property
    def raw(self) -> bytes:
        """The event."""


@dataclass(frozen=True)
class _MaskedChange:
    """A change whose event is masked."""

    raw: bytes
    message_id: str


def masked_change(masks: Masks | None, change: RawChange) -> RawChange:
    """The change that a message is made of."""
    if masks is None:
        return change
    raw = masks.event(change.raw)
    return _MaskedChange(raw, str(getattr(change, "message_id", None) or bson.decode(raw)["_id"]["_data"]))


@dataclass(frozen=True)
class _Payload:
    body: bytes
    content_type: str


def ordering_key(event: bytes) -> str | None:
    """What the messages of one document share, ``None`` for an event that concerns none.

    It is made of ``_id`` alone, so that a new shard key does not change it, and numbers that are equal for the server
    have one key. ObjectIds and strings are readable in it: ``{"$oid": "..."}``, ``"text"``; any other value is shown as
    relaxed extended JSON if no other value is equal to it, and as its key string otherwise.
    """
    key = raw_bson.find(event, b"documentKey")
    if key is None or key.type != raw_bson.OBJECT:
        return None
    element = raw_bson.find(event, b"_id", key.value_start)
    if element is None:
        return None
    value = raw_bson.value(event, element)
    if element.type in _NUMBERS or element.type in (raw_bson.OBJECT, raw_bson.SYMBOL):
        whole = _exact_integer(element.type, value)
        return f"keystring:{encode(element.type, value)[0].hex()}" if whole is None else str(whole)
    return _valid(to_json(bson.decode(raw_bson.encode_document(event[element.start : element.end]), _ANY_DATE)["_id"]))


def _exact_integer(type_: int, value: bytes) -> int | None:
    """A number that is an integer of at most 64 bits."""
    if type_ in (raw_bson.INT32, raw_bson.INT64):
        return int.from_bytes(value, "little", signed=True)
    if type_ not in _NUMBERS:
        return None
    number = bson.decode(raw_bson.encode_document(raw_bson.encode_element(type_, b"n", value)))["n"]
    exact = number if type_ == raw_bson.DOUBLE else number.to_decimal()
    if isnan(exact) or abs(exact) >= 1 << 63 or exact != int(exact):
        return None
    return int(exact)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", _RAW)


def _valid(text: str) -> str:
    """For a key, a header or a topic, which are text: bytes that are not UTF-8 are shown as ``\\xff``."""
    return _encoded(text).decode("utf-8", "backslashreplace")


def to_json(value: Any) -> str:
    """Relaxed Extended JSON, one line."""
    return dumps(value, json_options=RELAXED_JSON_OPTIONS, ensure_ascii=False)


class ChangeMessages:
    """Every change becomes a message that carries its event.

    Args:
        topic: the topic, or a function of the event (a dict) that returns it; if it returns ``None``, there is no
            message
        body: "json": relaxed Extended JSON; "bson": the event's exact bytes
        cloud_events: wrap the event as a CloudEvent: "structured" (a JSON document around the event) or "binary"
            (headers); ``None``: the event alone
        source: the CloudEvent's source; by default ``/<database>/<collection>``
        masks: what is masked in every event before it becomes a message
    """

    def __init__(
        self,
        topic: str | Callable[[Mapping[str, Any]], str | None],
        *,
        body: Literal["json", "bson"] = "json",
        cloud_events: CloudEvents | None = None,
        source: str | None = None,
        masks: Masks | None = None,
    ) -> None:
        if body not in ("json", "bson"):
            raise UsageError(f"a message's body must be json or bson, not {body!r}")
        self._topic = topic
        self._body = body
        self._cloud_events = _checked(cloud_events)
        self._source = source
        self._masks = masks

    def __call__(self, change: RawChange) -> Message | None:
        """The message for a change. Raises MaskRefusedError if a mask reaches a value that cannot be masked."""
        change = masked_change(self._masks, change)
        event = _decoded(change.raw)
        topic = self._topic if isinstance(self._topic, str) else self._topic(event)
        if topic is None:
            return None
        refuse_unrun(topic, "the topic's function")
        payload = _Payload(change.raw, _BSON) if self._body == "bson" else _Payload(_encoded(to_json(event)), _JSON)
        kind = f"tailrace.change.{event.get('operationType', 'unknown')}"
        about = _attributes(change, event, kind, self._source)
        return _sealed(
            topic, ordering_key(change.raw), payload, headers={}, about=about, cloud_events=self._cloud_events
        )


class Outbox:
    """The inserts of an outbox collection become messages: an application writes its documents and what it has to
    announce in one transaction, and the message follows the commit.

    The parameters name the fields of an outbox document, with dots into what is nested: ``topic``, ``payload`` (text,
    bytes, or any value: relaxed Extended JSON), ``key`` and ``headers`` (both may be missing from a document), ``type``
    of the CloudEvent. ``fixed_topic`` is for an outbox whose documents name none. The message id is the change's, and
    the document's ``_id`` is in the header ``outbox-id``. Changes other than inserts give no message.

    ``lane_key``: in a listener with partitions, the messages of one key stay in one lane, and so in order.
    """

    def __init__(
        self,
        *,
        topic: str = "topic",
        payload: str = "payload",
        key: str = "key",
        headers: str = "headers",
        type: str = "type",
        fixed_topic: str | None = None,
        cloud_events: CloudEvents | None = None,
        source: str | None = None,
    ) -> None:
        self._paths = {"topic": topic, "payload": payload, "key": key, "headers": headers, "type": type}
        self._fixed_topic = fixed_topic
        self._cloud_events = _checked(cloud_events)
        self._source = source
        self.lane_key = LaneKey(f"outbox:{key}", self._lane_hash)

    def _lane_hash(self, event: bytes) -> int | None:
        """By the key of the message; of a change that makes none, by the document's ``_id``."""
        kind = raw_bson.find(event, b"operationType")
        if kind is None or raw_bson.value(event, kind)[4:-1] != b"insert":
            return BY_ID.hash_of(event)
        value = value_in(event, [b"fullDocument", *self._paths["key"].encode().split(b".")])
        if value is not None and value[0] == raw_bson.STRING:
            return crc32(_valid(value[1][4:-1].decode("utf-8", _RAW)).encode())
        key = None if value is None else self._value(_decoded(event)["fullDocument"], "key")
        chosen = ordering_key(event) if key is None else _text(key)
        return None if chosen is None else crc32(chosen.encode())

    def __call__(self, change: RawChange) -> Message | None:
        """The message for a change. Raises MessageRefused if the document lacks what a message needs."""
        event = _decoded(change.raw)
        if event.get("operationType") != "insert":
            return None
        document = event["fullDocument"]
        topic = self._fixed_topic or self._value(document, "topic")
        if not isinstance(topic, str) or not topic:
            raise self._unfit(document, f"its field {self._paths['topic']!r} names no topic")
        value = self._value(document, "payload", _MISSING)
        if value is _MISSING:
            raise self._unfit(document, f"it has no field {self._paths['payload']!r}")
        key = self._value(document, "key")
        headers = self._value(document, "headers")
        if not isinstance(headers, (dict, type(None))):
            raise self._unfit(document, f"its field {self._paths['headers']!r} is not a document")
        shown = {_valid(name): _text(item) for name, item in (headers or {}).items()}
        shown["outbox-id"] = _text(document["_id"])
        about = _attributes(
            change, event, _valid(str(self._value(document, "type") or "tailrace.outbox")), self._source
        )
        chosen = ordering_key(change.raw) if key is None else _text(key)
        return _sealed(topic, chosen, _payload(value), headers=shown, about=about, cloud_events=self._cloud_events)

    def _value(self, document: Mapping[str, Any], what: str, missing: Any = None) -> Any:
        value: Any = document
        for name in self._paths[what].split("."):
            if not isinstance(value, dict) or name not in value:
                return missing
            value = value[name]
        return value

    def _unfit(self, document: Mapping[str, Any], why: str) -> MessageRefused:
        return MessageRefused(f"the outbox document {to_json(document['_id'])} makes no message: {why}")


_MISSING: Final = object()


def _checked(cloud_events: Any) -> CloudEvents | None:
    if cloud_events not in (None, "structured", "binary"):
        raise UsageError(f"cloud_events must be structured or binary, not {cloud_events!r}")
    return cloud_events  # type: ignore[no-any-return]


def _decoded(event: bytes) -> dict[str, Any]:
    return bson.decode(event, _ANY_DATE)


def _text(value: Any) -> str:
    return _valid(value if isinstance(value, str) else to_json(value))


def _payload(value: Any) -> _Payload:
    if isinstance(value, bytes):
        return _Payload(bytes(value), "application/octet-stream")
    if isinstance(value, str):
        return _Payload(_encoded(value), "text/plain; charset=utf-8")
    return _Payload(_encoded(to_json(value)), _JSON)


def _attributes(change: RawChange, event: Mapping[str, Any], kind: str, source: str | None) -> dict[str, str]:
    """The CloudEvent's attributes that say what happened."""
    identifier = str(getattr(change, "message_id", event["_id"]["_data"]))
    namespace = event.get("ns") or {}
    names = [quote(str(namespace[part]), safe="") for part in ("db", "coll") if part in namespace]
    time = event.get("wallTime")
    if not isinstance(time, datetime):  # before 6.0, or out of Python's range
        stamp = event.get("clusterTime")
        time = None if stamp is None else datetime.fromtimestamp(stamp.time, UTC)
    found = {
        "specversion": "1.0",
        "id": identifier,
        "source": source or "/" + "/".join(names),
        "type": kind,
    }
    if time is not None:
        found["time"] = time.isoformat().replace("+00:00", "Z")
    return found


def _sealed(
    topic: str,
    key: str | None,
    payload: _Payload,
    *,
    headers: Mapping[str, str],
    about: Mapping[str, str],
    cloud_events: CloudEvents | None,
) -> Message:
    identifier = about["id"]
    if cloud_events is None:
        return Message(identifier, topic, payload.body, key, {"content-type": payload.content_type, **headers})
    attributes = dict(about) if key is None else {**about, "partitionkey": key}
    if cloud_events == "binary":
        named = {f"ce-{name}": value for name, value in attributes.items()}
        return Message(identifier, topic, payload.body, key, {"content-type": payload.content_type, **named, **headers})
    outside = {**attributes, "datacontenttype": payload.content_type}
    if payload.content_type == _JSON:
        # The payload is JSON already.
        text = f'{json.dumps(outside, ensure_ascii=False)[:-1]}, "data": {payload.body.decode("utf-8", _RAW)}}}'
    elif payload.content_type.startswith("text/"):
        text = json.dumps({**outside, "data": payload.body.decode("utf-8", _RAW)}, ensure_ascii=False)
    else:
        text = json.dumps({**outside, "data_base64": base64.b64encode(payload.body).decode()}, ensure_ascii=False)
    content_type = "application/cloudevents+json; charset=utf-8"
    return Message(identifier, topic, _encoded(text), key, {"content-type": content_type, **headers})
