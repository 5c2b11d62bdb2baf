"""Columns made one event at a time from decoded documents: slow and plain, for comparison with the fast ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import bson
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion

from tailrace.core import raw_bson
from tailrace.lake.spark.reading import variant

CODEC: CodecOptions[dict[str, Any]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, tz_aware=True, unicode_decode_error_handler="replace"
)
FIELDS = {
    "document_key": "documentKey",
    "full_document": "fullDocument",
    "full_document_before_change": "fullDocumentBeforeChange",
    "update_description": "updateDescription",
}


def rows(events: Sequence[bytes], columns: Sequence[str], documents: str) -> list[dict[str, Any]]:
    """What ``RecordBatch.to_pylist`` must give."""
    made = []
    for event in events:
        fields = bson.decode(event, CODEC)
        made.append({name: value(event, fields, name, documents) for name in columns})
    return made


def value(event: bytes, fields: dict[str, Any], column: str, documents: str) -> Any:
    if column == "event":
        return event
    if column in FIELDS:
        return document(event, FIELDS[column], documents)
    namespace = fields.get("ns") or {}
    simple = {
        "token": lambda: (fields.get("_id") or {}).get("_data"),
        "operation_type": lambda: fields.get("operationType"),
        "database": lambda: namespace.get("db"),
        "collection": lambda: namespace.get("coll"),
        "to_database": lambda: (fields.get("to") or {}).get("db"),
        "to_collection": lambda: (fields.get("to") or {}).get("coll"),
        "cluster_time": lambda: cluster_time(fields.get("clusterTime")),
        "wall_time": lambda: wall_time(fields.get("wallTime")),
        "transaction_id": lambda: transaction(fields),
    }
    return simple[column]()


def cluster_time(time: bson.Timestamp | None) -> dict[str, int] | None:
    return None if time is None else {"t": time.time, "i": time.inc}


def wall_time(time: Any) -> datetime | None:
    return time if isinstance(time, datetime) else None


def transaction(fields: dict[str, Any]) -> dict[str, Any] | None:
    if "lsid" not in fields and "txnNumber" not in fields:
        return None
    session = fields.get("lsid")
    lsid = None if session is None else str(UUID(bytes=bytes(session["id"])))
    return {"lsid": lsid, "txn_number": fields.get("txnNumber")}


def extended(kind: int, value: bytes) -> Any:
    """A BSON value as relaxed Extended JSON, by ``json_util`` except for the three types that its codec loses."""
    if kind in (raw_bson.OBJECT, raw_bson.ARRAY):
        inner = {
            element.name.decode(errors="replace"): extended(element.type, raw_bson.value(value, element))
            for element in raw_bson.elements(value)
        }
        return inner if kind == raw_bson.OBJECT else [*inner.values()]
    if kind == raw_bson.SYMBOL:
        return {"$symbol": value[4:-1].decode(errors="replace")}
    if kind == raw_bson.UNDEFINED:
        return {"$undefined": True}
    if kind == raw_bson.DB_POINTER:
        return {"$dbPointer": {"$ref": value[4:-13].decode(errors="replace"), "$id": {"$oid": value[-12:].hex()}}}
    if kind == raw_bson.CODE_WITH_SCOPE:
        scope = 8 + raw_bson.read_int32(value, 4)
        code = value[8 : scope - 1].decode(errors="replace")
        return {"$code": code, "$scope": extended(raw_bson.OBJECT, value[scope:])}
    decoded = bson.decode(raw_bson.encode_document(raw_bson.encode_element(kind, b"", value)), CODEC)[""]
    return json.loads(json_util.dumps(decoded, json_options=json_util.RELAXED_JSON_OPTIONS))


def document(event: bytes, field: str, documents: str) -> Any:
    element = raw_bson.find(event, field.encode())
    if element is None:
        return None
    raw = raw_bson.value(event, element)
    if documents == "bson":
        return raw if element.type in (raw_bson.OBJECT, raw_bson.NULL) else None
    if documents == "json":
        return json.dumps(extended(element.type, raw))
    encoded, metadata = variant.from_value(element.type, raw)
    return {"value": encoded, "metadata": metadata}
