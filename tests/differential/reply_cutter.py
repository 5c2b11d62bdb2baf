"""A TCP proxy that cuts a connection in the middle of the reply to a getMore."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class ReplyCutter:
    """Passes bytes on between a free port of the loopback and ``target`` (``host:port``).

    ``cut_next(n)``: of the reply to the next getMore that is sent, the first ``n`` bytes arrive and no more. ``cuts``
    counts the replies that were cut.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._bytes: int | None = None
        self.cuts = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut_next(self, count: int) -> None:
        with self._lock:
            self._bytes = count

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            left: list[int] = []
            with self._lock:
                self._sockets += [near, far]
            threading.Thread(target=self._requests, args=(near, far, left), daemon=True).start()
            threading.Thread(target=self._replies, args=(far, near, left), daemon=True).start()

    def _requests(self, near: socket.socket, far: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                if b"\x12getMore\x00" in data:
                    with self._lock:
                        if self._bytes is not None:
                            left.append(self._bytes)
                            self._bytes = None
                far.sendall(data)
        _close(near, far)

    def _replies(self, far: socket.socket, near: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                if left:
                    near.sendall(data[: left[0]])
                    if len(data) > left[0]:
                        self.cuts += 1
                        break
                    left[0] -= len(data)
                    continue
                near.sendall(data)
        _close(near, far)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            _close(*self._sockets)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
