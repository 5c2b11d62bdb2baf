"""``tailrace run`` on the pages' path: the interpreter of the pages carries it out, in its Spark session, and signals
are passed on to it.

    python -I -S tests/docs/run_in_session.py SOCKET ARGUMENTS...

A process and a session of its own cost 15 s of processor for each of four commands: tests/spark/test_run_command.py has
those.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(path: str, *arguments: str) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = {"arguments": arguments, "directory": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        process = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: os.kill(process, received))
        return int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
