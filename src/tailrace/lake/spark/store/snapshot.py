"""Read a lake: its files at one version, as the log names them, and those of its quarantine. The log's files stay, so a
reader misses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.identity import partitioning_of, read_identity
from tailrace.lake.store.lake_root import LakeRoot, rooted
from tailrace.lake.store.quarantine import directory_fault, files_of
from tailrace.lake.store.quarantine_index import checked_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def files(path: LakeRoot | str, *, version: int | None = None) -> list[str]:
    """The Parquet files that the lake at ``path`` consists of, in the order of the stream: absolute names, or
    URIs of a lake in an object store, for any program that reads a list of Parquet files. ``version`` is a commit's
    number (default: the newest); the log keeps the last few hundred.

    Raises UsageError if ``path`` is not a lake, SinkError if its log is damaged or does not have that version.
    """
    root = rooted(path).absolute()
    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    return [str(root / file.name) for file in CommitLog(root).state(version).in_order]


def quarantine_files(path: LakeRoot | str) -> list[str]:
    """The Parquet files with the events that the lake at ``path`` has put aside (``on_error="quarantine"``), in the
    order of the stream: absolute names, or URIs of a lake in an object store. Only these count. For a while there may
    be others in ``_quarantine``, of running or interrupted work. The list is empty where nothing was put aside.

    The quarantine has no versions: compaction, ``erase`` and ``expire`` replace its files, and remove them at once. A
    reader that does not find one lists them again. Waits for a commit that is being made.

    Raises UsageError if ``path`` is not a lake. Raises SinkError if its log is damaged, if a file of the quarantine is
    missing, or if what names these (in a store the index, in a directory the ledger) is damaged, was lost or set back.
    """
    root = rooted(path).absolute()
    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    log = CommitLog(root)
    if isinstance(root, ObjectPlace):
        return [str(file) for file in checked_files(log.layout, lambda: log.newest_batch(log.head()), log.commits)]
    with log.reading() as head:
        newest = log.newest_batch(head)
        if (fault := directory_fault(log.layout, lambda: newest, log.commits)) is not None:
            raise SinkError(fault[0], hint=fault[1])
        return [str(file) for file in files_of(log.layout, newest)]


def read(spark: SparkSession, path: LakeRoot | str, *, version: int | None = None) -> DataFrame:
    """The lake at ``path`` as a Spark DataFrame: all its columns, ``day`` and (if it is divided by hour) ``hour``, at
    one version, without Delta's JARs.

    The files are those that the log names now (or at ``version``); they stay for the compaction's retention, so the
    DataFrame may be used while the lake grows and is compacted. Order by ``token`` for the order of the stream.
    A lake in an object store needs no JARs either: the tasks read it with the keys that are in their environment.
    Raises what ``files`` raises.
    """
    root = rooted(path)
    if isinstance(root, ObjectPlace):
        return _stored(spark, root, version)
    names = files(root, version=version)
    if names:
        return spark.read.option("basePath", str(root.absolute())).parquet(*names)
    from pyspark.sql.types import StructType  # noqa: PLC0415  with a session only

    from tailrace.lake.spark.query.schema import spark_schema  # noqa: PLC0415

    known = read_identity(root) or {}
    schema = spark_schema(known["stream"]["columns"], known["stream"]["documents"])
    divided = StructType.fromJson({"type": "struct", "fields": partitioning_of(known).fields()})
    return spark.createDataFrame([], StructType([*schema.fields, *divided.fields]))


def _stored(spark: SparkSession, root: ObjectPlace, version: int | None) -> DataFrame:
    from tailrace.lake.spark.runtime.session import register  # noqa: PLC0415  with a session only
    from tailrace.lake.spark.store.stored_rows import (  # noqa: PLC0415  the same
        COLUMNS,
        FILES,
        LAKE,
        StoredRows,
        columns_and_files,
        packed,
    )

    columns, named = columns_and_files(root, version)
    register(spark, StoredRows)
    reader = spark.read.format(StoredRows.name()).option(LAKE, str(root))
    return reader.option(COLUMNS, columns.json()).option(FILES, packed(named)).load()
