"""Kafka Connect's schemas of Debezium's records, in the form in which JsonConverter writes them, and as Avro's.

The names, the order and the properties are what Debezium 3.6 and Confluent's converters write (tests/golden,
``test_debezium.py``): a consumer finds the schemas that it knows, and a registry the ones that it has.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: A schema, or a field with its schema: ``type``, ``optional``, and maybe ``fields``, ``items``, ``name``, ``version``,
#: ``parameters``, ``default`` and ``field``.
ConnectSchema = dict[str, Any]

_AVRO_TYPES: Final = {"string": "string", "int32": "int", "int64": "long"}
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.]")


def _field(field: str, type_: str, *, optional: bool = False, **more: Any) -> ConnectSchema:
    return {"type": type_, "optional": optional, **more, "field": field}


def _json(field: str) -> ConnectSchema:
    return _field(field, "string", optional=True, name="io.debezium.data.Json", version=1)


def _struct(name: str, fields: list[ConnectSchema], *, optional: bool = False, **more: Any) -> ConnectSchema:
    return {"type": "struct", "fields": fields, "optional": optional, "name": name, **more}


_TRUNCATED: Final = _struct(
    "io.debezium.connector.mongodb.changestream.truncatedarray",
    [_field("field", "string"), _field("size", "int32")],
    version=1,
)
_UPDATE_DESCRIPTION: Final = _struct(
    "io.debezium.connector.mongodb.changestream.updatedescription",
    [
        {"type": "array", "items": {"type": "string", "optional": False}, "optional": True, "field": "removedFields"},
        _json("updatedFields"),
        {"type": "array", "items": _TRUNCATED, "optional": True, "field": "truncatedArrays"},
    ],
    optional=True,
    version=1,
    field="updateDescription",
)
_SNAPSHOT: Final = {
    "type": "string",
    "optional": True,
    "name": "io.debezium.data.Enum",
    "version": 1,
    "parameters": {"allowed": "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"},
    "default": "false",
    "field": "snapshot",
}
_SOURCE: Final = _struct(
    "io.debezium.connector.mongo.Source",
    [
        _field("version", "string"),
        _field("connector", "string"),
        _field("name", "string"),
        _field("ts_ms", "int64"),
        _SNAPSHOT,
        _field("db", "string"),
        _field("sequence", "string", optional=True),
        _field("ts_us", "int64", optional=True),
        _field("ts_ns", "int64", optional=True),
        _field("collection", "string"),
        _field("ord", "int32"),
        _field("lsid", "string", optional=True),
        _field("txnNumber", "int64", optional=True),
        _field("wallTime", "int64", optional=True),
    ],
    version=1,
    field="source",
)
_TRANSACTION: Final = _struct(
    "event.block",
    [_field("id", "string"), _field("total_order", "int64"), _field("data_collection_order", "int64")],
    optional=True,
    version=1,
    field="transaction",
)


def key_schema(name: str) -> ConnectSchema:
    """The schema of the keys of a topic."""
    return _struct(f"{name}.Key", [_field("id", "string")])


def value_schema(name: str) -> ConnectSchema:
    """The schema of the values of a topic: Debezium's envelope."""
    fields = [
        _json("before"),
        _json("after"),
        _UPDATE_DESCRIPTION,
        _SOURCE,
        _field("op", "string", optional=True),
        _field("ts_ms", "int64", optional=True),
        _TRANSACTION,
    ]
    return _struct(f"{name}.Envelope", fields)


def adjusted_name(name: str) -> str:
    """A schema's name as ``schema.name.adjustment.mode=avro`` writes it: what Avro forbids is ``_``."""
    shown = _NOT_IN_NAMES.sub("_", name)
    return shown if shown[:1].isalpha() or shown[:1] == "_" else f"_{shown[1:]}"


def avro_schema(schema: ConnectSchema, space: str | None = None) -> Any:
    """The schema in Avro, with the properties by which Connect finds its own again.

    Args:
        schema: Connect's
        space: the namespace that a record inherits, and so need not name
    """
    about: dict[str, Any] = {}
    if "version" in schema:
        about["connect.version"] = schema["version"]
    if "parameters" in schema:
        about["connect.parameters"] = schema["parameters"]
    if "default" in schema:
        about["connect.default"] = schema["default"]
    if "name" in schema:
        about["connect.name"] = schema["name"]
    kind = schema["type"]
    if kind == "struct":
        its_space, _, name = schema["name"].rpartition(".")
        fields = []
        for field in schema["fields"]:
            its_type = avro_schema(field, its_space)
            if not field["optional"]:
                fields.append({"name": field["field"], "type": its_type})
            elif "default" in field:
                fields.append({"name": field["field"], "type": [its_type, "null"], "default": field["default"]})
            else:
                fields.append({"name": field["field"], "type": ["null", its_type], "default": None})
        named = {"name": name} if its_space == space else {"name": name, "namespace": its_space}
        return {"type": "record", **named, "fields": fields, **about}
    if kind == "array":
        return {"type": "array", "items": avro_schema(schema["items"], space), **about}
    simple = _AVRO_TYPES[kind]
    return {"type": simple, **about} if about else simple
