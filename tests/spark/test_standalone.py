"""The page's command for a standalone cluster, as printed, against a master and two workers in processes of their own.
No test had used a cluster manager: with the page's former command the source was not found there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pymongo
import pyspark
import pytest

from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.runtime.class_data import class_data_options
from tailrace.lake.spark.runtime.java import find_java
from tests.patience import PATIENCE_S
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod, pytest.mark.slow]

HOME = Path(pyspark.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "spark-cluster.md"
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PIPELINE = """
import json, sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
stream = spark.readStream.format("tailrace").options(**json.loads(sys.argv[1])).load()
query = (stream.writeStream.format("parquet").option("path", sys.argv[2]).option("checkpointLocation", sys.argv[3])
         .trigger(availableNow=True).start())
query.awaitTermination()
rows = spark.read.parquet(sys.argv[2]).orderBy("token").collect()
hosts = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print(json.dumps({"stream": [bytes(row.event).hex() for row in rows], "executors": hosts}))
"""


def environment() -> dict[str, str]:
    """An environment without this Python on the path: ``python3`` is another one, without Tailrace, as on another
    machine."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYSPARK", "SPARK", "PYTHON"))}
    path = ":".join(one for one in kept["PATH"].split(":") if Path(one).resolve() != Path(sys.executable).parent)
    return {
        **kept,
        "PATH": path,
        "SPARK_HOME": str(HOME),
        "JAVA_HOME": str(find_java().home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "SPARK_DAEMON_MEMORY": "256m",
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(said: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def daemon(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [HOME / "bin" / "spark-class", *arguments], env=environment(), stdout=out, stderr=out, cwd=log.parent
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """The address of a master with two workers of one core each."""
    port = free_port()
    url, said = f"spark://127.0.0.1:{port}", directory / "master.log"
    master = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
    worker = ("--host", "127.0.0.1", "--webui-port", "0", "-c", "1", "-m", "1g")
    with ExitStack() as stack:
        stack.enter_context(daemon(said, "org.apache.spark.deploy.master.Master", *master))
        wait_for(lambda: "Starting Spark master at" in said.read_text())
        for number in range(2):
            work = ("-d", str(directory / f"work{number}"), url)
            log = directory / f"worker{number}.log"
            stack.enter_context(daemon(log, "org.apache.spark.deploy.worker.Worker", *worker, *work))
        wait_for(lambda: said.read_text().count("Registering worker") == 2)
        yield url


def command_of_the_page(url: str, script: str) -> tuple[dict[str, str], list[str]]:
    """The command's variables and arguments, with this Python and this master in place of the page's."""
    section = PAGE.read_text().partition("## Standalone")[2].partition("\n## ")[0]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found is not None
    words = found[1].replace("\\\n", " ").split()
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    arguments = [word for word in words if not re.match(r"[A-Z_]+=", word) and word not in ("export", "spark-submit")]
    places = {"/opt/tailrace/bin/python": sys.executable, "spark://master:7077": url, "pipeline.py": script}

    def here(text: str) -> str:
        for there, ours in places.items():
            text = text.replace(there, ours)
        return text

    return {name: here(text) for name, text in variables.items()}, [here(word) for word in arguments]


@pytest.mark.parametrize("how", ["as printed", "spark.pyspark.python and register()"])
def test_the_pages_command_runs_a_stream_on_a_master_and_two_workers(
    replica_set: ReplicaSet, tmp_path: Path, how: str
) -> None:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database("standalone")
        start = newest(replica_set.uri)
        client["standalone"]["c"].insert_many([{"_id": i, "pad": "x" * 400} for i in range(6_000)])
    until = newest(replica_set.uri)
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    options = {
        "uri": replica_set.uri,
        "database": "standalone",
        "startAtOperationTime": f"{start.seconds},{start.increment + 1}",
        "columns": "event,token",
        "partitions": "4",
        "maxBytesPerTrigger": "2m",
    }
    with cluster(tmp_path) as url:
        variables, arguments = command_of_the_page(url, "pipeline.py")
        quick = f"{class_data_options(find_java())} {QUICK}"
        settings = {"spark.ui.enabled": "false", "spark.executor.memory": "600m", "spark.driver.host": "127.0.0.1"}
        settings["spark.python.authenticate.socketTimeout"] = "300s"  # a loaded machine
        settings |= {"spark.driver.extraJavaOptions": quick, "spark.executor.extraJavaOptions": quick}
        if how != "as printed":
            settings["spark.pyspark.python"] = variables.pop("PYSPARK_PYTHON")
            registers = "import tailrace.spark\ntailrace.spark.register(spark)\n"
            (tmp_path / "pipeline.py").write_text(PIPELINE.replace("stream =", f"{registers}stream =", 1))
        more = [part for name, text in settings.items() for part in ("--conf", f"{name}={text}")]
        arguments[-1:] = [*more, arguments[-1]]
        done = subprocess.run(
            [HOME / "bin" / "spark-submit", *arguments, json.dumps(options), "out", "checkpoint"],
            cwd=tmp_path,
            env={**environment(), **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
    warned = "Spark looks sources up with python3" in done.stdout + done.stderr
    assert warned == (how != "as printed")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["executors"] == 2
    expected = [event.hex() for event in server_events(replica_set.uri, ("standalone", None), start, until)]
    assert result["stream"] == expected
