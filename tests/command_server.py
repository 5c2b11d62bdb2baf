"""Forks ``tailrace`` commands, and programs, from a process that has imported what they need.

    python -m tests.command_server FD [MODULE ...]

Every message on the socket asks for one command, and brings its three standard files and a socket that is told its
process id and, at its end, its status. When the socket ends, so does this process. ``tests/commands.py`` starts it.
With modules, these are what it imports.
"""

from __future__ import annotations

import array
import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import pyarrow as pa

from tailrace.cli.main import main
from tailrace.core import kernel
from tailrace.watch.client import kernel_loader

_COMMANDS = ("archive", "doctor", "explanation", "gateway", "replay", "streams", "token", "watch")
#: What the gateway imports only when it starts: its server.
_MORE = (
    "tailrace.watch.gateway.process",
    "tailrace.watch.gateway.server",
    "tailrace.read.source.mongod",
    "tailrace.read.archive",
)
MESSAGE_BYTES_MAX = 1 << 17


def import_everything(modules: Sequence[str] = ()) -> None:
    for name in modules or (*(f"tailrace.cli.{command}" for command in _COMMANDS), *_MORE):
        import_module(name)
    if kernel.comes_compiled():
        for name in kernel_loader._MODULES:
            import_module(name)
    if not modules:
        pa.array([0])  # pyarrow loads pandas with its first array, where it is installed: 0.4 s of processor
    gc.collect()
    gc.freeze()


def serve(control: socket.socket) -> dict[str, Any]:
    """Returns a request in the process that is to carry it out. Never returns in this one."""
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not control:
                pid, told = key.data
                _, status = os.waitpid(pid, 0)
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                told.send(str(os.waitstatus_to_exitcode(status)).encode())
                told.close()
                continue
            message, ancillary, _, _ = control.recvmsg(MESSAGE_BYTES_MAX, socket.CMSG_SPACE(4 * 4))
            if not message:
                os._exit(0)
            files = array.array("i")
            for _, _, data in ancillary:
                files.frombytes(data[: 4 * 4])
            pid = os.fork()
            if pid == 0:
                for number in range(3):
                    os.dup2(files[number], number)
                # Closed through their objects: otherwise each object would later close its number once more, by then a
                # file of the command.
                for other in waiting.get_map().values():
                    if other.data is not None:
                        other.data[1].close()
                waiting.close()
                control.close()
                os.closerange(3, 1024)
                return dict(json.loads(message))
            for number in range(3):
                os.close(files[number])
            told = socket.socket(fileno=files[3])
            told.send(str(pid).encode())
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))


def carry_out(request: dict[str, Any]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The existing objects expect what the server's own files can do: seeking, for example.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    code = request["code"]
    sys.argv = ["tailrace" if code is None else "-c", *request["arguments"]]
    if code is None:
        return main()
    # A new module: this one's functions refer to it, so at the end of the interpreter it would be released too late for
    # its objects to report anything.
    sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    return 0


if __name__ == "__main__":
    import_everything(sys.argv[2:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the tests
    raise SystemExit(carry_out(serve(socket.socket(fileno=int(sys.argv[1])))))
