"""What Spark looks for: a top-level package called ``pyspark_...`` with a ``DefaultSource``.

Spark imports it in every Python process that it starts, so ``format("tailrace")`` needs no registration wherever the
wheel is installed.
"""

from tailrace.lake.spark.source.data_source import TailraceDataSource as DefaultSource

__all__ = ["DefaultSource"]
