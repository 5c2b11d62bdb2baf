"""What Spark starts as ``python``: asks the fork server for a process, or becomes Python itself where there is none.

Run as a file, with nothing but the standard library on its path: ``python -I -S launcher.py -m module arguments``. It
stands in for the process that it was given: it ends with that process's exit status, and when it is ended, so is that
process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Final

#: The path of the fork server's socket. Spark's processes inherit it.
SOCKET: Final = "TAILRACE_FORK_SERVER"


def main(arguments: list[str]) -> None:
    path = os.environ.get(SOCKET)
    if path and arguments[:1] == ["-m"]:
        with socket.socket(socket.AF_UNIX) as server:
            try:
                server.connect(path)
                process = _asked(server, arguments)
            except (OSError, ValueError):
                process = None
            if process is not None:
                _stand_for(server, process)
    os.execv(sys.executable, [sys.executable, *arguments])


def _asked(server: socket.socket, arguments: list[str]) -> int | None:
    """The id of a new process, or ``None`` where the server refuses."""
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    body = json.dumps(request).encode("utf-8", "surrogateescape")
    socket.send_fds(server, [len(body).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(body)
    answer = server.recv(4, socket.MSG_WAITALL)
    return int.from_bytes(answer, "big") or None


def _stand_for(server: socket.socket, process: int) -> None:
    """Wait for the process and end as it does."""
    for descriptor in (0, 1):
        os.close(descriptor)  # or the other side would not see that the process has closed them
    status = server.recv(4, socket.MSG_WAITALL)
    if len(status) == 4:
        os._exit(int.from_bytes(status, "big"))
    while True:  # the server is gone, and the process is not
        try:
            os.kill(process, 0)
        except OSError:
            os._exit(0)
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
