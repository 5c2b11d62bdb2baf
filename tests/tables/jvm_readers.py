"""Delta's and Iceberg's own connectors for Spark, as readers of tables and lakes.

Neither JAR is a package of its own on PyPI, but ``jsoniq`` (RumbleDB) brings Delta 4.0, Iceberg's runtime and
PostgreSQL's driver in one JAR for Spark 4.0. That Spark, 434 MB as PyPI has it, is built into the cache and runs in a
process of its own, beside the newer one that Tailrace needs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from tests.gateway.packaged import pip
from tests.gateway.programs import Unavailable, tool
from tests.tables.readers import plain
from tests.tables.rest_catalog import TOKEN, RestServer

SPARK: Final = ("pyspark==4.0.3", "py4j==0.10.9.9")
CONNECTORS: Final = "jsoniq==3.0.2"
#: The class of a catalogue of Iceberg's in Spark.
CATALOG: Final = "org.apache.iceberg.spark.SparkCatalog"
_JAR: Final = "jsoniq/jars/rumbledb-3.0.0.jar"
_PROGRAM: Final = Path(__file__).with_name("spark_program.py")


class SparkError(Exception):
    """What Spark said instead of rows."""


@dataclass(frozen=True)
class JvmReaders:
    """A running Spark with both connectors."""

    process: subprocess.Popen[str]
    version: str

    def delta(self, root: Path | str, where: str | None = None, **options: Any) -> pa.Table:
        """A Delta table. ``options`` as ``spark.read`` has them, such as ``versionAsOf``."""
        return self._rows("delta", str(root), where, options)

    def iceberg(self, name: str, where: str | None = None, **options: Any) -> pa.Table:
        """An Iceberg table: ``catalogue.namespace.table``, or the path of a metadata file."""
        return self._rows("iceberg", name, where, options)

    def sql(self, text: str) -> pa.Table:
        """The rows of a statement."""
        return self._asked({"sql": text})

    def run(self, text: str) -> None:
        """Carry out a command."""
        self._asked({"run": text})

    def set(self, settings: Mapping[str, str]) -> None:
        """Settings of the session, such as a catalogue's, which must be new."""
        self._asked({"settings": dict(settings)})

    def feed_tables(self, lake: Path, checkpoint: Path, root: Path, collections: str, uri: str) -> None:
        """Bring tables up with ``tables_writer`` from the events of a lake that Delta's own stream reads."""
        given = {"root": str(root), "collections": collections, "uri": uri}
        self._asked({"stream": str(lake), "checkpoint": str(checkpoint), **given})

    def _rows(self, form: str, path: str, where: str | None, options: Mapping[str, Any]) -> pa.Table:
        texts = {name: str(value) for name, value in options.items()}
        wanted = {"format": form, "path": path, "options": texts}
        return self._asked(wanted if where is None else {**wanted, "where": where})

    def _asked(self, wanted: Mapping[str, Any]) -> pa.Table:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "Spark has ended"
        answer = json.loads(line)
        if "error" in answer:
            raise SparkError(answer["error"])
        if "rows" not in answer:
            return pa.table({})
        with pa.OSFile(answer["rows"]) as file:
            return pa.ipc.open_file(file).read_all()


@contextmanager
def jvm_readers(folder: Path) -> Iterator[JvmReaders]:
    """Spark runs until the block ends; ``folder`` gets its log."""
    jar, libraries = pip(CONNECTORS) / _JAR, pip(*SPARK, source=("pyspark",))
    tool("java")
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("SPARK_HOME", "PYTHONPATH")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(jar), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**kept, "PYTHONPATH": str(libraries), "SPARK_LOCAL_IP": "127.0.0.1"},
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, (folder / "log").read_text(errors="replace")[-3000:]
        yield JvmReaders(process, json.loads(first)["spark"])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JvmReaders]:
    try:
        with jvm_readers(tmp_path_factory.mktemp("spark")) as found:
            yield found
    except Unavailable as error:
        pytest.skip(str(error))


def catalogue_in(spark: JvmReaders, rest: RestServer) -> str:
    """The name that a REST catalogue has in Spark from now on."""
    name = f"c{rest.uri.rpartition(':')[2]}"
    whole = f"spark.sql.catalog.{name}"
    # By default a loaded table is cached for 30 seconds.
    more = {"type": "rest", "uri": rest.uri, "token": TOKEN, "cache-enabled": "false"}
    spark.set({whole: CATALOG, **{f"{whole}.{one}": value for one, value in more.items()}})
    return name


def typed(rows: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table as ``tests.tables.features`` expects them."""
    return plain(rows.to_pylist())
