"""An executor in a process of its own, and a package that is shipped by spark-submit instead of being installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pymongo
import pyspark
import pytest

import tailrace
from tailrace.core.kernel import native
from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.runtime.class_data import class_data_options
from tailrace.lake.spark.runtime.java import find_java
from tests.spark.streams import newest, server_events
from tests.spark.test_crash import arrived, driver, have_arrived, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SUBMITTED = """
import json, sys
from pyspark.sql import SparkSession

import tailrace.spark

spark = tailrace.spark.register(SparkSession.builder.getOrCreate())
spark.sparkContext.setLogLevel("ERROR")
stream = spark.readStream.format("tailrace").options(**json.loads(sys.argv[1])).load()
query = (stream.writeStream.format("parquet").option("path", sys.argv[2]).option("checkpointLocation", sys.argv[3])
         .trigger(availableNow=True).start())
query.awaitTermination()
rows = spark.read.parquet(sys.argv[2]).orderBy("token").collect()
batch = spark.read.format("tailrace").options(**json.loads(sys.argv[1])).load().collect()

def compiled(batches):
    import pyarrow, tailrace.lake.spark.reading
    from tailrace.core.kernel import compiled
    for _ in batches:
        yield pyarrow.record_batch({"path": [compiled.LIBRARY and compiled.LIBRARY.path]})

[worker] = spark.range(1).coalesce(1).mapInArrow(compiled, "path string").collect()
print(json.dumps({"found": tailrace.__file__, "stream": [bytes(row.event).hex() for row in rows],
                  "batch": [bytes(row.event).hex() for row in batch],
                  "compiled": worker.path}))
"""


def test_an_executor_in_another_process_reads_the_same_stream(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_WORKER_DIR", str(tmp_path / "work"))
    start = newest(replica_set.uri)
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client["executors"]["c"].insert_many([{"_id": i, "pad": "x" * 2000} for i in range(12_000)])
        until = newest(replica_set.uri)
    options = {
        "uri": replica_set.uri,
        "database": "executors",
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "partitions": "3",
    }
    expected = server_events(replica_set.uri, ("executors", None), start, until)
    with driver(options, tmp_path, master="local-cluster[1,2,1024]") as process:
        wait_for(lambda: have_arrived(tmp_path, len(expected)), process, tmp_path)
    assert arrived(tmp_path) == expected
    files = max(len(list(batch.glob("part-*.parquet"))) for batch in (tmp_path / "out").iterdir())
    assert files == 3


def _python_without_tailrace(directory: Path) -> Path:
    """A Python that finds every package of this one except ours."""
    packages = directory / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "tailrace" not in entry.name and not entry.name.endswith(".pth"):
            (packages / entry.name).symlink_to(entry)
    script = directory / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    return script


def _zip_of_the_package(directory: Path) -> Path:
    source = Path(tailrace.__file__).parent.parent
    target = directory / "tailrace.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for package in ("tailrace", "pyspark_tailrace"):
            for path in (*(source / package).rglob("*.py"), *(source / package).rglob(native.FILE)):
                archive.write(path, path.relative_to(source))
    return target


def test_a_package_given_by_py_files_reaches_the_streaming_source_too(replica_set: ReplicaSet, tmp_path: Path) -> None:
    # Spark hands --py-files to every process but the one that runs latestOffset and partitions.
    start = newest(replica_set.uri)
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client["submitted"]["c"].insert_many([{"_id": i} for i in range(20)])
    until = newest(replica_set.uri)
    python = _python_without_tailrace(tmp_path)
    probe = subprocess.run([python, "-c", "import tailrace"], cwd=tmp_path, capture_output=True, check=False)
    assert b"No module named 'tailrace'" in probe.stderr
    (tmp_path / "submitted.py").write_text(_SUBMITTED)
    options = {
        "uri": replica_set.uri,
        "database": "submitted",
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "columns": "event,token",
    }
    home, java = Path(pyspark.__file__).parent, find_java()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK", "PYTHON"))},
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(java.home),
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "NUMBA_CACHE_DIR": str(tmp_path / "compiled"),
    }
    done = subprocess.run(
        [
            home / "bin" / "spark-submit",
            *("--master", "local[2]", "--driver-memory", "1g", "--conf", "spark.ui.enabled=false"),
            *("--conf", "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.driver.host=127.0.0.1"),
            *("--conf", f"spark.driver.extraJavaOptions={class_data_options(java)} {QUICK}"),
            *("--py-files", str(_zip_of_the_package(tmp_path)), "submitted.py"),
            *(json.dumps(options), "out", "checkpoint"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,  # Java, a worker and a stream from nothing, on a busy machine
    )
    assert done.returncode == 0, done.stdout[:4000]  # spark-submit shows the driver's errors there
    result = json.loads(done.stdout.splitlines()[-1])
    expected = [event.hex() for event in server_events(replica_set.uri, ("submitted", None), start, until)]
    assert "tailrace.zip" in result["found"]
    assert result["stream"] == expected
    assert result["batch"] == expected
    assert result["compiled"].startswith("/proc/self/fd/"), "the zip file's library"
    assert not (tmp_path / "compiled").exists(), "something was compiled again"
