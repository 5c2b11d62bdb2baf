"""``tailrace`` on the pages' path: asks a fork server for the process, and passes signals on to it.

    python -I -S tests/docs/forked_tailrace.py LAUNCHER_DIRECTORY SOCKET ARGUMENTS...

Python and what the commands import are half a second of processor for each of some fifty commands.
"""

from __future__ import annotations

import os
import signal
import socket
import sys


def main(directory: str, path: str, *arguments: str) -> int:
    sys.path.insert(0, directory)
    import launcher  # type: ignore[import-not-found]

    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        process = launcher._asked(server, ["-m", "tailrace", *arguments])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: os.kill(process, received))
        for descriptor in (0, 1):
            os.close(descriptor)  # or the other end of a pipe would not see that the command has closed its own
        return int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
