"""The data source that Spark knows as ``tailrace``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

import tailrace
from tailrace.errors import UsageError
from tailrace.lake.spark.query.options import ReadOptions, parse
from tailrace.lake.spark.query.schema import spark_schema
from tailrace.lake.spark.source.batch_reader import TailraceBatchReader, TailraceFilteringReader
from tailrace.lake.spark.source.stream_reader import TailraceStreamReader


class TailraceDataSource(DataSource):
    """MongoDB change events, in batch and in streaming. Options: ``tailrace.lake.spark.query.options``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        _refuse_table(options)
        self._parsed: ReadOptions = parse(options)

    @classmethod
    def name(cls) -> str:
        return "tailrace"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Spark starts the streaming source's process without the files of --py-files and addPyFile (seen in 4.3; the
        # other processes get them), so the way to this package travels with the instance. All it unpickles is names.
        root = str(Path(tailrace.__file__).parent.parent)
        return _restore, (root, type(self).__module__, type(self).__qualname__, dict(self.options))

    def schema(self) -> StructType:
        return spark_schema(self._parsed.columns, self._parsed.documents)

    def reader(self, schema: StructType) -> DataSourceReader:
        self._require_own(schema)
        if self._parsed.exact:
            raise UsageError(
                "exact images are for streams: a batch read is repeated whenever Spark needs its rows again, and the "
                "images would be computed again from the documents of its start",
                hint="Use spark.readStream with trigger(availableNow=True), and read what it has written",
            )
        return (TailraceFilteringReader if self._parsed.filters else TailraceBatchReader)(self._parsed)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        self._require_own(schema)
        return TailraceStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise _only_a_source()

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: N802
        raise _only_a_source()

    def _require_own(self, schema: StructType) -> None:
        if schema != self.schema():
            raise UsageError(
                "this source has its own schema, but .schema(...) was given a different one",
                hint="Leave .schema(...) out; the options 'columns' and 'documents' say what comes",
            )


def _refuse_table(options: Mapping[str, str]) -> None:
    """Spark's catalogue keeps the options of CREATE TABLE, shows them to the source once, then among properties of its
    own, and reads the table without them (seen in 4.3)."""
    if any(name.lower().startswith("option.") for name in options):
        raise UsageError(
            "CREATE TABLE ... USING tailrace does not work: Spark reads a table of its catalogue without the options "
            "that it was created with, when a Python data source gives its rows",
            hint="CREATE TEMPORARY VIEW events USING tailrace OPTIONS (...) takes the same options",
        )


def _only_a_source() -> UsageError:
    return UsageError(
        "'tailrace' gives events, and nothing can be written to it",
        hint="Insert into a table of another format, or write a stream: to current-state tables with "
        "foreachBatch(tailrace.spark.tables_writer(...)), elsewhere with tailrace.spark.foreach_batch",
    )


def _restore(root: str, module: str, name: str, options: dict[str, str]) -> Any:
    """The instance again, in a process that may not know the way to ``root`` yet."""
    import importlib  # noqa: PLC0415 - pickled by value: it may use nothing from around it
    import sys  # noqa: PLC0415

    if root not in sys.path:
        sys.path.append(root)
    return getattr(importlib.import_module(module), name)(options)


# A function of the main module is pickled by value; one of this module would be imported where it cannot be found yet.
_restore.__module__ = "__main__"
