"""How Spark's Python processes are started: from the installed PySpark, with the kernel loaded before the fork."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

from tailrace.lake.spark.runtime import session
from tailrace.lake.spark.runtime.python import worker_python

LIB = Path(pyspark.__file__).parent / "python" / "lib"


def test_the_script_leaves_out_sparks_zip_files_and_keeps_the_rest(tmp_path: Path) -> None:
    path = [str(LIB / "pyspark.zip"), str(tmp_path), str(LIB / "py4j-0.10.9.9-src.zip"), str(tmp_path / "own *.zip")]
    program = worker_python()
    assert program != sys.executable
    done = subprocess.run(
        [
            program,
            "-c",
            "import sys, os; print(sys.executable); print(os.environ['PYTHONPATH']); print(sys.argv[1])",
            "a b",
        ],
        env={**os.environ, "PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    executable, kept, argument = done.stdout.splitlines()
    assert executable == sys.executable
    assert kept == f"{tmp_path}:{tmp_path / 'own *.zip'}"
    assert argument == "a b"


def test_without_a_place_for_the_script_the_interpreter_itself_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert worker_python() == sys.executable


def test_workers_load_the_installed_pyspark_and_are_forked_with_the_kernel(spark: SparkSession) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark as theirs

        for _ in batches:
            yield pa.record_batch(
                {"place": [theirs.__file__], "loaded": ["tailrace.core.kernel.transform" in sys.modules]}
            )

    row = spark.range(1).coalesce(1).mapInArrow(look, "place string, loaded boolean").first()
    assert row is not None
    assert row.place == pyspark.__file__
    assert row.loaded


def test_registering_warns_where_spark_looks_sources_up_with_another_python(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With only ``spark.pyspark.python`` set, the source was not found on a cluster, and nothing said why. In every
    test the two settings were the same, as with ``local_session``."""
    assert session._python_of_lookups(spark) == session._python_of_workers(spark) == os.environ["PYSPARK_PYTHON"]
    session.register(spark)
    assert caplog.messages == []
    monkeypatch.setattr(session, "_python_of_lookups", lambda _: "python3")
    session.register(spark)
    (said,) = caplog.messages
    assert "Spark looks sources up with python3, and its workers run" in said
    assert "set PYSPARK_PYTHON" in said
