"""One Spark session for all Spark tests: starting one costs more than most of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tailrace.cli.main import main
from tailrace.spark import local_session
from tests.spark.goes_on import GoesOn


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = local_session("tailrace-tests", cores=2, fast_start=True)
    session.sparkContext.setLogLevel("OFF")  # streams that are meant to fail would print their stacks
    yield session
    session.stop()


@pytest.fixture
def tailrace_run(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``tailrace_run("pipeline.yaml", "--verify", uri=...)`` runs the command in this process, with the tests' session,
    which goes on when the command ends. It returns the exit status, what the command prints, and its errors. A process
    and a session of its own would cost 12 s of processor; test_run_command.py has those. ``TEST_URI`` is for the
    pipeline file."""
    monkeypatch.setattr("tailrace.lake.spark.runtime.session.local_session", lambda *_, **__: GoesOn(spark))
    monkeypatch.setattr("tailrace.lake.spark.store.failure.hush_loss_of_java", lambda: None)

    def run(*arguments: Any, uri: str) -> tuple[int, str, str]:
        monkeypatch.setenv("TEST_URI", uri)
        capsys.readouterr()
        streams = [] if "--verify" in arguments or "--compact" in arguments else ["--progress", "none", "--verbose"]
        code = main(["run", *map(str, arguments), *streams])
        return code, *capsys.readouterr()

    return run
