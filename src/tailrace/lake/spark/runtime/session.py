"""Spark on this machine, set up so that it starts fast and answers fast. On a cluster, use the cluster's own session.

The settings are measured ones (Spark 4.3, two cores): a query's checkpoint costs 60 ms a micro-batch with Spark's
defaults and 20 ms with a plain file system's, and a session starts in 3.6 s instead of 5.6 s.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Final

from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from tailrace.errors import TailraceError
from tailrace.lake.spark.runtime.class_data import class_data_options
from tailrace.lake.spark.runtime.java import Java, use_java
from tailrace.lake.spark.runtime.preloaded import start_fork_server
from tailrace.lake.spark.runtime.python import worker_python
from tailrace.lake.spark.source.data_source import TailraceDataSource

#: For a checkpoint on a local disk only: on an object store Spark's own defaults are the safe ones.
LOCAL_CHECKPOINT: Final = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
#: C1 alone compiles sooner and costs 15-40 % of what goes through the JVM: right for tests, for short demos, and for a
#: lake, whose events do not go through it.
_FAST_START: Final = "-XX:TieredStopAtLevel=1"
_SMALL_COLLECTOR: Final = "-XX:+UseSerialGC"
#: A JVM that is given two collectors does not start.
_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC\b")
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_log = logging.getLogger("tailrace.spark")


class SparkNotStartedError(TailraceError):
    """Spark's JVM has ended while it started. What it said is on standard error, or in the log of ``tailrace run``."""


def local_session(
    app_name: str = "tailrace",
    *,
    cores: int | None = None,
    memory: str = "1g",
    fast_start: bool = False,
    preload: bool = True,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """A Spark session of this process, on ``cores`` processors (default: all), with ``format("tailrace")``
    known. ``config`` adds Spark settings or overrides ours; Java options in it are placed after ours. With ``preload``
    Spark's Python processes are forked from one that has loaded everything (on Linux), and Java's classes are kept in
    an archive in the cache directory, which the first session writes when it ends. Raises UsageError if there is no
    Java to run it, SparkNotStartedError if it ends at once.

    If a session is already active, it is returned, and settings that need a new JVM have no effect.
    """
    python = worker_python()
    if preload and python != sys.executable and SparkContext._active_spark_context is None:
        start_fork_server()  # it loads while the JVM starts
    java = use_java()
    processors = cores or os.cpu_count() or 1
    settings = {
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Without this a worker is whichever python3 comes first on PATH.
        "spark.pyspark.python": python,
        "spark.pyspark.driver.python": sys.executable,
        "spark.python.daemon.module": "tailrace.lake.spark.worker_daemon",
        "spark.sql.shuffle.partitions": str(processors),
        "spark.sql.session.timeZone": "UTC",
        # A streaming plan prints its source's options; by default only "url" is taken for a secret.
        "spark.sql.redaction.options.regex": "(?i)url|uri",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        **LOCAL_CHECKPOINT,
    }
    settings.update(config or {})
    given = settings.get(_JAVA_OPTIONS, "")
    settings[_JAVA_OPTIONS] = java_options(java, given, fast_start=fast_start, class_data=preload)
    # The JVM starts Python workers by this variable where the setting comes too late (a planner's worker, Connect).
    os.environ.setdefault("PYSPARK_PYTHON", python)
    builder = SparkSession.builder.appName(app_name).master(f"local[{processors}]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if "JAVA_GATEWAY_EXITED" not in str(error):
            raise
        raise SparkNotStartedError(
            "Spark's Java process has ended before it could be used",
            hint="It needs memory (spark.driver.memory) and a directory for temporary files (TMPDIR)",
        ) from None
    return register(session)


def java_options(java: Java, given: str, *, fast_start: bool, class_data: bool) -> str:
    """The options of the driver's JVM: ours, then those that the user has ``given``, since of equal options the last
    one counts. Ours are left out where Java would not start with both."""
    temporary = tempfile.gettempdir()
    ours = [
        class_data_options(java, given) if class_data else "",
        # Java does not look at TMPDIR, and ends where /tmp cannot be written.
        "" if temporary == "/tmp" else f'"-Djava.io.tmpdir={temporary}"',
    ]
    if fast_start:
        ours += [_FAST_START, "" if _COLLECTOR.search(given) else _SMALL_COLLECTOR]
    return " ".join(filter(None, [*ours, given]))


def register(spark: SparkSession, source: type[DataSource] = TailraceDataSource) -> SparkSession:
    """Make ``source``, by default ``format("tailrace")``, known to a session that did not find it on its own
    (``pyspark_tailrace`` is found wherever the wheel is installed); gives the session back.

    A source that Spark finds on its own runs with the Python of Spark's own environment, on the workers too, not with
    that of the setting ``spark.pyspark.python``. If the two differ, a line in the log says so, and the source is
    registered for the workers' Python.
    """
    finds, runs = _python_of_lookups(spark), _python_of_workers(spark)
    differ = finds is not None and runs is not None and _program(finds) != _program(runs)
    if differ:
        _log.warning(
            "Spark looks sources up with %s, and its workers run %s. Where Tailrace is missing in one of them, "
            'format("tailrace") is not found: set PYSPARK_PYTHON in the environment of spark-submit to the Python that '
            "has it on every machine",
            finds,
            runs,
        )
    if differ or not _knows(spark, source.name()):
        spark.dataSource.register(source)
    return spark


def _python_of_lookups(spark: SparkSession) -> str | None:
    """The Python with which the JVM looks for sources and runs those that it finds; ``None`` of a Connect session."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        return None
    asked = jvm.java.lang.System.getenv  # the order of Spark's PythonUtils.defaultPythonExec, which is private
    return str(asked("PYSPARK_DRIVER_PYTHON") or asked("PYSPARK_PYTHON") or "python3")


def _python_of_workers(spark: SparkSession) -> str | None:
    inner = getattr(spark, "_sc", None)  # a Connect session has none
    return None if inner is None else str(inner.pythonExec)


def _program(name: str) -> str:
    return shutil.which(name) or name


def _knows(spark: SparkSession, name: str) -> bool:
    """Registering again is harmless, but each time Spark warns that something was replaced."""
    inner = getattr(spark, "_jsparkSession", None)  # a Connect session has none
    if inner is None:
        return False
    return bool(inner.sessionState().dataSourceManager().dataSourceExists(name))
