"""The columns of the data source as Spark types. Needs no Arrow, so that the driver's planner starts fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

#: Cluster time as two numbers: structs compare field by field, so its order is the cluster's, also after 2038 (packed
#: into one signed 64-bit number it would turn negative then), and Parquet keeps minimum and maximum of both.
CLUSTER_TIME: Final = StructType([StructField("t", LongType(), False), StructField("i", LongType(), False)])
#: Session (the UUID of ``lsid.id`` as text) and number; NULL for events outside transactions.
TRANSACTION_ID: Final = StructType(
    [StructField("lsid", StringType(), True), StructField("txn_number", LongType(), True)]
)
DOCUMENT_COLUMNS: Final = ("document_key", "full_document", "full_document_before_change", "update_description")
_DOCUMENT_TYPES: Final[dict[str, DataType]] = {
    "variant": VariantType(),
    "json": StringType(),
    "bson": BinaryType(),
}
_TYPES: Final[dict[str, DataType]] = {
    "event": BinaryType(),
    "token": StringType(),
    "operation_type": StringType(),
    "cluster_time": CLUSTER_TIME,
    "wall_time": TimestampType(),
    "database": StringType(),
    "collection": StringType(),
    "to_database": StringType(),
    "to_collection": StringType(),
    "transaction_id": TRANSACTION_ID,
}


def spark_schema(columns: Sequence[str], documents: str) -> StructType:
    """The Spark schema of the columns named, in their order; ``documents`` is ``variant``, ``json`` or ``bson``."""
    document_type = _DOCUMENT_TYPES[documents]
    return StructType(
        [
            StructField(name, document_type if name in DOCUMENT_COLUMNS else _TYPES[name], name != "event")
            for name in columns
        ]
    )
