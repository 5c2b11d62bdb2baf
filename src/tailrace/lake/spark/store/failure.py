"""What stopped a query, in one sentence: Spark returns our errors inside pages of stack traces."""

from __future__ import annotations

import logging
import re
import signal
import socketserver
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from pyspark import SparkContext, accumulators

import tailrace.errors
from tailrace.errors import SinkError, TailraceError

#: The last line of a Python traceback: the error's class with its module, and its text.
_OURS = re.compile(r"^tailrace\.(?P<module>(?:\w+\.)*)(?P<name>\w+): (?P<text>.+)$", re.MULTILINE)
_FOREIGN = re.compile(r"^(?:\w+\.)*(?P<name>\w+(?:Error|Exception|Failure|Lost)): (?P<text>.+)$", re.MULTILINE)
#: How ``TailraceError`` shows a code of the server.
_CODE = re.compile(r"(?P<message>.*) \((?P<code>\d+) \w+\)(?:\. (?P<hint>.*))?")
#: A process that closes its connections because it dies is gone soon after.
_EXIT_S: Final = 3
#: The modules whose errors concern what is written.
_OF_SINKS: Final = ("base.durable", "base.object_place", "lake.store.", "lake.spark.store.", "lake.iceberg.")
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|File too large")


def query_error(error: BaseException) -> TailraceError:
    """Our own error inside ``error``, or one that says in a sentence what Spark reported."""
    if isinstance(error, TailraceError):
        return error
    gone = _java_is_gone(error)
    if gone is not None:
        return gone
    texts = list(_texts(error))
    ours = [found for text in texts for found in list(_OURS.finditer(text))[-1:]]
    if ours:
        return _rebuilt(ours[0]["module"], ours[0]["name"], ours[0]["text"])
    if any(map(_NO_ROOM.search, texts)):
        return SinkError(
            "no room left to write the checkpoint or Spark's temporary files",
            hint="What was committed before is intact; make room and start again",
        )
    foreign = [found for text in texts for found in list(_FOREIGN.finditer(text))[-1:]]
    if foreign:
        return TailraceError(f"Spark stopped: {foreign[0]['name']}: {foreign[0]['text']}")
    text = texts[0].strip()
    return TailraceError(f"Spark stopped: {text.splitlines()[0] if text else type(error).__name__}")


def _texts(error: BaseException) -> Iterator[str]:
    """What Spark says, and then what it says about the causes: where a sink's ``abort`` fails as its ``commit`` did,
    the error itself is only that a job has failed."""
    current: BaseException | None = error
    while current is not None:
        yield str(current)
        current = getattr(current, "_cause", None)  # PySpark has no public name for it


def _java_is_gone(error: BaseException) -> TailraceError | None:
    """What is to be said where ``error`` comes from speaking to a Java that has died, else ``None``."""
    kind = type(error)
    lost = _is_lost_connection(error)
    if not lost and (kind.__module__, kind.__name__) != ("py4j.protocol", "Py4JError"):
        return None
    how = ""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        try:
            status = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return None
        how = f", killed by {_signal_name(-status)}" if status < 0 else f" with exit status {status}"
    elif not lost:
        return None
    return TailraceError(
        f"Java, which runs Spark, has died{how}",
        hint="It is often killed because memory ran out: see spark.memory, and the kernel's log. What was committed is "
        "intact; start again",
    )


def hush_loss_of_java() -> None:
    """PySpark's thread for accumulators no longer prints a traceback when Java dies, and Py4J no longer logs that it
    could not speak to Java: ``query_error`` reports that.

    Both may notice at any moment, also after the command has printed its sentence. Their other errors are reported.
    """
    logging.getLogger().addFilter(_is_not_of_java)  # the logger that Py4J uses for this
    for server in (accumulators.AccumulatorTCPServer, accumulators.AccumulatorUnixServer):
        setattr(server, "handle_error", _handle_error)  # noqa: B010  an assignment is what mypy refuses


def _handle_error(server: socketserver.BaseServer, request: Any, client_address: Any) -> None:
    if not isinstance(sys.exc_info()[1], EOFError | ConnectionError):
        socketserver.BaseServer.handle_error(server, request, client_address)


def _is_not_of_java(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return record.module != "java_gateway" or not _is_lost_connection(error)


def _is_lost_connection(error: BaseException | None) -> bool:
    return isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _rebuilt(module: str, name: str, text: str) -> TailraceError:
    """The error as it was raised; the hint of an error without a code stays in its text."""
    kind = getattr(tailrace.errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, TailraceError)):
        kind = SinkError if module.startswith(_OF_SINKS) else TailraceError
    coded = _CODE.fullmatch(text)
    error = kind.__new__(kind)
    if coded is None:
        TailraceError.__init__(error, text)
    else:
        TailraceError.__init__(error, coded["message"], code=int(coded["code"]), hint=coded["hint"])
    return error
