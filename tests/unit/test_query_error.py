"""Spark's errors, in one sentence."""

from __future__ import annotations

import logging
import socket
import socketserver
import subprocess
from types import SimpleNamespace

import pytest
from py4j import protocol as proto
from py4j.java_gateway import GatewayClient
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext, accumulators

from tailrace.base.durable import LakeFullError
from tailrace.errors import ChangeStreamHistoryLost, InvalidResumeToken, SinkError, TailraceError, UsageError
from tailrace.lake.spark.store import failure
from tailrace.lake.spark.store.failure import hush_loss_of_java, query_error

TRACE = """[STREAM_FAILED] Query [id = 1] terminated with exception: [PYTHON_EXCEPTION]
Traceback (most recent call last):
  File "sink.py", line 68, in write
    return message
{error}
 SQLSTATE: 38000
=== Streaming Query ===
"""


@pytest.mark.parametrize(
    "error",
    [
        ChangeStreamHistoryLost("the point is gone", hint="start anew"),
        InvalidResumeToken("bad token"),
        UsageError("the option 'x' is wrong"),
        LakeFullError("no room left to write /lake", hint="make room"),
    ],
)
def test_an_error_of_ours_is_found_inside_sparks_pages(error: TailraceError) -> None:
    kind = type(error)
    found = query_error(RuntimeError(TRACE.format(error=f"{kind.__module__}.{kind.__name__}: {error}")))
    assert str(found) == str(error)
    assert found.code == error.code
    assert isinstance(found, kind if kind.__module__ == "tailrace.errors" else SinkError)


def test_an_error_of_ours_is_kept_as_it_is() -> None:
    error = UsageError("no")
    assert query_error(error) is error


@pytest.mark.parametrize("error", [ConnectionRefusedError(), Py4JNetworkError("empty"), Py4JError("calling o5.start")])
def test_that_java_has_died_is_told_in_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_EXIT_S", 0.1)
    with subprocess.Popen(["sleep", "600"]) as java:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=java))
        assert str(query_error(error)).startswith(f"Spark stopped: {str(error) or type(error).__name__}")
        java.kill()
        java.wait()
        said = str(query_error(error))
    assert said.startswith("Java, which runs Spark, has died, killed by SIGKILL. It is often killed because memory ran")
    assert "\n" not in said


def test_a_full_disk_under_the_checkpoint_is_recognised() -> None:
    found = query_error(RuntimeError("java.io.IOException: No space left on device\n\tat java.base"))
    assert "no room left to write the checkpoint" in str(found)


def test_a_foreign_error_is_named_without_its_stack() -> None:
    found = query_error(RuntimeError(TRACE.format(error="pymongo.errors.OperationFailure: not allowed")))
    assert str(found) == "Spark stopped: OperationFailure: not allowed"
    assert str(query_error(RuntimeError("first line\n\tat second"))) == "Spark stopped: first line"
    assert str(query_error(RuntimeError())) == "Spark stopped: RuntimeError"


@pytest.mark.parametrize(
    ("error", "told"), [(EOFError(), False), (ConnectionResetError(), False), (ValueError(), True)]
)
def test_pyspark_s_own_thread_tells_nothing_of_a_java_that_died(
    error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The test that kills Java caught the traceback only if the thread was slower."""
    before = accumulators.AccumulatorTCPServer.handle_error
    monkeypatch.setattr(accumulators.AccumulatorTCPServer, "handle_error", before)  # set back afterwards
    monkeypatch.setattr(accumulators.AccumulatorUnixServer, "handle_error", before)
    monkeypatch.setattr(logging.getLogger(), "filters", [])
    hush_loss_of_java()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            raise error

    with (
        accumulators.AccumulatorTCPServer(("127.0.0.1", 0), Handler, "secret") as server,
        socket.create_connection(server.server_address[:2]),
    ):
        server.handle_request()
    assert (type(error).__name__ in capfd.readouterr().err) is told


class _OfDeadJava:
    """A connection of Py4J's to a Java that dies before it answers."""

    socket = None

    def send_command(self, command: str) -> str:
        raise Py4JNetworkError("Answer from Java side is empty", when=proto.ERROR_ON_RECEIVE)

    def close(self, reset: bool = False) -> None:
        pass


@pytest.mark.parametrize("hushed", [False, True])
def test_what_py4j_logs_of_a_java_that_died_is_dropped(
    hushed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs with the root logger when a command meets the end of Java: in one of some hundred runs of the test that
    kills Java, a second line stood after the sentence."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "filters", [])
    if hushed:
        hush_loss_of_java()
    client = GatewayClient()
    monkeypatch.setattr(client, "_get_connection", _OfDeadJava)
    assert client.send_command("a command", retry=False) == proto.ERROR
    root.error("another error")
    assert [record.message for record in caplog.records] == (
        ["another error"] if hushed else ["Exception while sending command.", "another error"]
    )


def test_where_a_job_has_only_failed_its_causes_are_asked() -> None:
    """(Where a commit had failed, its abort had not.)"""
    job = RuntimeError("Query [id = 1] terminated with exception: Writing job failed. SQLSTATE: XXKST")
    job._cause = RuntimeError("Writing job failed")  # type: ignore[attr-defined]  as PySpark's errors have it
    assert str(query_error(job)).startswith("Spark stopped: Query [id = 1]")
    job._cause._cause = RuntimeError(TRACE.format(error="tailrace.errors.SinkError: the log has lost its end"))  # type: ignore[attr-defined]
    assert str(query_error(job)) == "the log has lost its end"
    job._cause._cause = RuntimeError("java.io.IOException: No space left on device")  # type: ignore[attr-defined]
    assert "no room left to write the checkpoint" in str(query_error(job))
