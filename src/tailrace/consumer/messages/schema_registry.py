"""Debezium's records in Avro and Protobuf, with their schemas in a schema registry: the extra ``schema-registry``."""

from tailrace.act.consumer.messages.schema_registry import AvroConverter, ProtobufConverter

__all__ = [
    "AvroConverter",
    "ProtobufConverter",
]
