"""Current-state tables: for each collection a Delta table that equals it at a stated cluster time.

``TablesWriter`` writes them, ``as_of`` reads a collection as it was at any time that they keep, and ``read`` gives a
table to Spark without Delta's JARs. Heavy imports happen when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.faces import lazily

if TYPE_CHECKING:
    from tailrace.base.object_place import object_place
    from tailrace.lake.iceberg.settings import IcebergSettings
    from tailrace.lake.spark.tables import read
    from tailrace.lake.tables.as_of import as_of
    from tailrace.lake.tables.schema import TableSchema
    from tailrace.lake.tables.settings import TableRule, TableSettings
    from tailrace.lake.tables.writer import TablesWriter

__all__ = [
    "IcebergSettings",
    "TableRule",
    "TableSchema",
    "TableSettings",
    "TablesWriter",
    "as_of",
    "object_place",
    "read",
]

__getattr__ = lazily(
    __name__,
    {
        "IcebergSettings": "tailrace.lake.iceberg.settings",
        "TableRule": "tailrace.lake.tables.settings",
        "TableSchema": "tailrace.lake.tables.schema",
        "TableSettings": "tailrace.lake.tables.settings",
        "TablesWriter": "tailrace.lake.tables.writer",
        "as_of": "tailrace.lake.tables.as_of",
        "object_place": "tailrace.base.object_place",
        "read": "tailrace.lake.spark.tables",
    },
)
