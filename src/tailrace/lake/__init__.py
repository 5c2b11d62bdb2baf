"""What is kept for queries: lakes of change events, tables of current documents, and Spark, which writes and reads
them.

Here is what users import of the lake, change events as a Delta table of Parquet files, in order, exactly once, readable
without Tailrace. ``write_stream`` runs a stream into a lake; ``read`` and ``files`` read it at one version, and
``quarantine_files`` names the files of what was put aside; ``compact`` and ``verify`` work on an existing lake, without
Spark, and ``change_lake`` gives it columns or a wider stream. Heavy imports happen when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.faces import lazily

if TYPE_CHECKING:
    from tailrace.base.durable import LakeFullError
    from tailrace.base.object_place import object_place
    from tailrace.lake.iceberg.lake_mirror import LakeMirror
    from tailrace.lake.iceberg.settings import IcebergSettings
    from tailrace.lake.spark.store.change import ChangeReport, change_lake
    from tailrace.lake.spark.store.snapshot import files, quarantine_files, read
    from tailrace.lake.spark.store.stream import write_stream
    from tailrace.lake.store.compaction import CompactionResult, compact
    from tailrace.lake.store.compaction_policy import CompactionPolicy
    from tailrace.lake.store.verification import LakeReport, verify

__all__ = [
    "ChangeReport",
    "CompactionPolicy",
    "CompactionResult",
    "IcebergSettings",
    "LakeFullError",
    "LakeMirror",
    "LakeReport",
    "change_lake",
    "compact",
    "files",
    "object_place",
    "quarantine_files",
    "read",
    "verify",
    "write_stream",
]

__getattr__ = lazily(
    __name__,
    {
        "ChangeReport": "tailrace.lake.spark.store.change",
        "CompactionPolicy": "tailrace.lake.store.compaction_policy",
        "CompactionResult": "tailrace.lake.store.compaction",
        "IcebergSettings": "tailrace.lake.iceberg.settings",
        "LakeFullError": "tailrace.base.durable",
        "LakeMirror": "tailrace.lake.iceberg.lake_mirror",
        "LakeReport": "tailrace.lake.store.verification",
        "change_lake": "tailrace.lake.spark.store.change",
        "compact": "tailrace.lake.store.compaction",
        "files": "tailrace.lake.spark.store.snapshot",
        "object_place": "tailrace.base.object_place",
        "quarantine_files": "tailrace.lake.spark.store.snapshot",
        "read": "tailrace.lake.spark.store.snapshot",
        "verify": "tailrace.lake.store.verification",
        "write_stream": "tailrace.lake.spark.store.stream",
    },
)
