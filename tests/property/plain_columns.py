"""Columns made one event at a time from decoded documents: slow, plain, and what the fast ones must equal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import bson
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion

from tailrace import raw_bson
from tailrace.spark import variant

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
    return [{name: value(event, name, documents) for name in columns} for event in events]


def value(event: bytes, column: str, documents: str) -> Any:
    if column == "event":
        return event
    if column in FIELDS:
        return document(event, FIELDS[column], documents)
    fields = bson.decode(event, CODEC)
    namespace = fields.get("ns") or {}
    simple = {
        "token": lambda: (fields.get("_id") or {}).get("_data"),
        "operation_type": lambda: fields.get("operationType"),
        "database": lambda: namespace.get("db"),
        "collection": lambda: namespace.get("coll"),
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


def document(event: bytes, field: str, documents: str) -> Any:
    element = raw_bson.find(event, field.encode())
    if element is None:
        return None
    raw = raw_bson.value(event, element)
    if documents == "bson":
        return raw if element.type == raw_bson.OBJECT else None
    if documents == "json":
        decoded = bson.decode(event, CODEC)[field]
        return json_util.dumps(decoded, json_options=json_util.RELAXED_JSON_OPTIONS)
    encoded, metadata = variant.from_value(element.type, raw)
    return {"value": encoded, "metadata": metadata}
