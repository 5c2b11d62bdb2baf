"""Debezium's records in Avro and in Protobuf, with their schemas in a schema registry (Confluent's interface).

The client and the serialisers are Confluent's. The schemas are those that Confluent's converters make for Debezium's
records in Kafka Connect, so a registry that Connect has filled knows them already, and consumers need no change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx2
from confluent_kafka.schema_registry import SchemaRegistryClient, topic_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext, SerializationError
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from tailrace.act.consumer.messages.connect_schema import ConnectSchema, adjusted_name, avro_schema
from tailrace.act.consumer.messages.debezium import compact
from tailrace.act.consumer.messages.publisher import MessageRefused, PublisherAway
from tailrace.errors import UsageError
from tailrace.read.source.uri import redact_uri

_PROTOBUF_TYPES: Final = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
}

#: Writes one value of a topic: its key or its value.
_Serialize = Callable[[Mapping[str, Any], SerializationContext], bytes | None]


class _Registered:
    """What both converters share: the registry, and a serialiser for each topic's keys and values."""

    content_type = "application/octet-stream"

    def __init__(self, registry: str | Mapping[str, Any], *, register: bool = True, adjust_names: bool = True) -> None:
        settings = {"url": registry} if isinstance(registry, str) else dict(registry)
        self._settings: dict[str, Any] = {"max.retries": 0, **settings}
        self._register = register
        self._adjust_names = adjust_names
        self._name = f"the schema registry at {redact_uri(str(settings.get('url')))}"
        self._open()

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._serializers: dict[tuple[str, bool], _Serialize] = {}
        try:
            self._client = SchemaRegistryClient.new_client(self._settings)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the settings of {self._name} cannot be used: {redact_uri(str(error))}") from None

    @property
    def client(self) -> SchemaRegistryClient:
        """Confluent's client of the registry."""
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        """For Spark's workers: each opens a client of its own."""
        return {name: value for name, value in vars(self).items() if name not in ("_client", "_lock", "_serializers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def convert(self, topic: str, schema: ConnectSchema, value: Mapping[str, Any], *, is_key: bool) -> bytes:
        """See ``RecordConverter``. Raises PublisherAway where the registry is away or does not take the schema:
        nothing is wrong with the change."""
        context = SerializationContext(topic, MessageField.KEY if is_key else MessageField.VALUE)
        try:
            with self._lock:
                serialize = self._serializers.get((topic, is_key))
                if serialize is None:
                    named = {**schema, "name": adjusted_name(schema["name"])} if self._adjust_names else schema
                    serialize = self._serializers[topic, is_key] = self._serializer(named)
                found = serialize(value, context)
        except SchemaRegistryError as error:
            raise PublisherAway(
                f"{self._name} does not give the schema of the topic {topic!r}: {redact_uri(error.error_message)}"
                f" (HTTP status {error.http_status_code})",
                hint="Check its compatibility settings, its rights and what is registered under this subject",
            ) from None
        except (httpx2.TransportError, OAuthTokenError, OSError) as error:
            raise PublisherAway(
                f"{self._name} cannot be reached: {redact_uri(str(error)) or type(error).__name__}"
            ) from None
        except SerializationError as error:
            raise MessageRefused(f"a record of the topic {topic!r} cannot be written: {error}") from None
        assert found is not None
        return found

    def _serializer(self, schema: ConnectSchema) -> _Serialize:
        raise NotImplementedError

    @property
    def _choices(self) -> dict[str, Any]:
        return {
            "auto.register.schemas": self._register,
            "use.latest.version": False,
            "subject.name.strategy": topic_subject_name_strategy,
        }


class AvroConverter(_Registered):
    """Confluent's converter of that name: five bytes that name the schema in the registry, and the record in Avro. The
    subjects are ``<topic>-key`` and ``<topic>-value``.

    Args:
        registry: its URL, or settings of Confluent's client: ``url``, ``basic.auth.user.info``, ``ssl.ca.location``
            and others
        register: whether schemas that the registry does not have are registered; ``False``: only looked up
        adjust_names: as ``schema.name.adjustment.mode``: ``True``: ``avro``, what Avro forbids in a name becomes ``_``;
            ``False``: ``none``, Debezium's default, which takes names as they are and so may break Avro's rules
    """

    content_type = "application/avro"

    def _serializer(self, schema: ConnectSchema) -> _Serialize:
        serializer: _Serialize = AvroSerializer(self._client, compact(avro_schema(schema)), conf=self._choices)
        return serializer


class ProtobufConverter(_Registered):
    """Confluent's converter of that name, with ``optional.for.nullables=true``: null values are left out, and can be
    told from empty ones. The subjects are ``<topic>-key`` and ``<topic>-value``.

    Args:
        registry: its URL, or settings of Confluent's client: ``url``, ``basic.auth.user.info``, ``ssl.ca.location``
            and others
        register: whether schemas that the registry does not have are registered; ``False``: only looked up

    What Protobuf forbids in the name of a package or a message becomes ``_``.
    """

    content_type = "application/protobuf"

    def __init__(self, registry: str | Mapping[str, Any], *, register: bool = True) -> None:
        super().__init__(registry, register=register, adjust_names=True)

    def _serializer(self, schema: ConnectSchema) -> _Serialize:
        made = message_class(schema)
        serialize = ProtobufSerializer(made, self._client, {**self._choices, "use.deprecated.format": False})

        def fill_and_serialize(value: Mapping[str, Any], context: SerializationContext) -> bytes | None:
            message = made()
            _fill(message, value)
            found: bytes | None = serialize(message, context)
            return found

        return fill_and_serialize


def message_class(schema: ConnectSchema) -> Any:
    """The class of Protobuf's messages of a schema: what is nested is inside of it, fields are numbered from 1."""
    space, _, name = schema["name"].rpartition(".")
    package = ".".join(part if not part[:1].isdigit() else f"_{part}" for part in space.split("."))
    file = FileDescriptorProto(name=f"{schema['name']}.proto", package=package, syntax="proto3")
    _describe(file.message_type.add(name=name), schema, f".{package}.{name}")
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


def _describe(message: DescriptorProto, schema: ConnectSchema, path: str) -> None:
    optional = []
    for number, one in enumerate(schema["fields"], 1):
        is_list = one["type"] == "array"
        kind = one["items"] if is_list else one
        label = FieldDescriptorProto.LABEL_REPEATED if is_list else FieldDescriptorProto.LABEL_OPTIONAL
        field = message.field.add(name=one["field"], number=number, label=label, json_name=one["field"])
        if kind["type"] == "struct":
            name = kind["name"].rpartition(".")[2]
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f"{path}.{name}"
            _describe(message.nested_type.add(name=name), kind, f"{path}.{name}")
        else:
            field.type = _PROTOBUF_TYPES[kind["type"]]
        if one["optional"] and not is_list:
            optional.append(field)
    for field in optional:  # proto3 keeps whether such a field is set as a union of one
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


def _fill(message: Any, value: Mapping[str, Any]) -> None:
    for name, one in value.items():
        if one is None:
            continue
        if isinstance(one, Mapping):
            inside = getattr(message, name)
            inside.SetInParent()
            _fill(inside, one)
        elif isinstance(one, list):
            field = getattr(message, name)
            for item in one:
                if isinstance(item, Mapping):
                    _fill(field.add(), item)
                else:
                    field.append(item)
        else:
            setattr(message, name, one)
