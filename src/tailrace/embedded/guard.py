"""A small process between us and one server: the server never outlives the process that started it.

Run as a script, so that it starts quickly and imports nothing of Tailrace. It starts the server, and ends when the
server ends, with its exit status. When the process that started the guard is gone, for whatever reason, the guard kills
the server and removes what was temporary; when the guard itself is killed, the kernel kills the server.

The kernel's parent-death signal alone is not enough: it follows the *thread* that forked, so a server started in a
worker thread would die with the thread. The guard has one thread only, and watches the parent as a process.

Standard input takes one-byte orders: ``t`` sends the server the signal that ends it in order, ``k`` SIGKILL. Since
only the guard reaps the server, a signal cannot reach another process that got its number. Standard output gives the
server's process id, once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
POLL_MS = 200  # only where the kernel is older than 5.3 and has no process descriptors


def main() -> int:
    job = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    libc = ctypes.CDLL(None, use_errno=True)
    guard = os.getpid()

    def tie_to_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    # preexec_fn is safe here: the guard has no other thread that could hold a lock.
    server = subprocess.Popen(
        job["command"],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what the server says before it has opened its log
        preexec_fn=tie_to_guard,  # noqa: PLW1509
    )
    with contextlib.suppress(BrokenPipeError):
        os.write(1, b"%d\n" % server.pid)
    orders = {b"t": signal.Signals(job["stop_signal"]), b"k": signal.SIGKILL}
    if not watch(server, job["parent"], wake, orders):
        server.kill()
        server.wait()
        remove(job["remove"])
    code = server.returncode
    return code if code >= 0 else 128 - code


def watch(server: subprocess.Popen[bytes], parent: int, wake: int, orders: dict[bytes, signal.Signals]) -> bool:
    """Carry out orders until the server ended (true) or the parent is gone (false)."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(wake, select.POLLIN)
    timeout: int | None = None
    try:
        parent_descriptor = os.pidfd_open(parent)
        poll.register(parent_descriptor, select.POLLIN)
    except (AttributeError, OSError):
        timeout = POLL_MS
    while True:
        if server.poll() is not None:
            return True
        if os.getppid() != parent:
            return False
        for descriptor, _ in poll.poll(timeout):
            if descriptor == wake:
                os.read(wake, 64)
            elif descriptor == 0:
                order = os.read(0, 1)
                if not order:
                    # The parent closed the pipe. A fork of it may live on with a copy, so this is no sure sign that
                    # it is gone, but nobody else gives orders either.
                    return False
                server.send_signal(orders[order])


def remove(paths: list[str]) -> None:
    """Remove temporary directories. The guards of a replica set all remove the same one, each after its own server is
    gone; so the last one to run finds that nobody writes there any more."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
