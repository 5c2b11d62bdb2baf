"""The side of the pages' interpreter that carries out ``tailrace run``: ``run_in_session.py`` asks for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MESSAGE_BYTES_MAX = 1 << 17
#: The exit status of a command that was interrupted before it handled signals.
_INTERRUPTED = 130


def listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def carry_out_next(server: socket.socket) -> None:
    """One command, to its end."""
    client, _ = server.accept()
    with client:
        message, files, _, _ = socket.recv_fds(client, _MESSAGE_BYTES_MAX, 3)
        client.sendall(os.getpid().to_bytes(4, "big"))
        with _standing_in_for(json.loads(message), files) as arguments:
            status = _run(arguments)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is too late from now on
        client.sendall(status.to_bytes(4, "big"))
        client.recv(1)  # until the other side has ended, and sends no more signals
        signal.signal(signal.SIGINT, before)


def _run(arguments: list[str]) -> int:
    from tailrace.cli.main import main

    try:
        return main(arguments)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def _standing_in_for(request: dict[str, Any], files: list[int]) -> Iterator[list[str]]:
    """This process with the directory, the environment and the standard files of another one, and with a session that
    goes on when the command ends."""
    from tailrace.lake.spark.runtime import session
    from tailrace.lake.spark.store import failure
    from tests.spark.goes_on import GoesOn

    known = {name: os.environ.get(name) for name in request["environment"]}
    own, local_session, hush = [os.dup(number) for number in range(3)], session.local_session, failure.hush_loss_of_java
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.update(request["environment"])
    session.local_session = lambda *given, **named: GoesOn(local_session(*given, **named))  # type: ignore[assignment]
    failure.hush_loss_of_java = lambda: None
    try:
        yield request["arguments"]
    finally:
        session.local_session, failure.hush_loss_of_java = local_session, hush
        for name, text in known.items():
            os.environ.pop(name) if text is None else os.environ.__setitem__(name, text)
        for number, file in enumerate(own):
            os.dup2(file, number)
            os.close(file)
