"""A TCP proxy that cuts a connection in the middle of a reply."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

#: The commands whose replies can be cut; our counterpart to a stream's aggregate is a find.
_COMMANDS = (b"aggregate", b"find", b"getMore")


class ReplyCutter:
    """Passes messages on between a free port of the loopback and ``target`` (``host:port``).

    ``cut_next(n, "getMore")``: of the next reply to that command the first ``n`` bytes arrive and no more; ``holding``
    some bytes: of the next one that has them. Several that are asked for are cut one after the other. ``cuts`` counts
    the replies that were cut. One that is not longer than ``n`` arrives whole: then ``was_whole``.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._wanted: list[tuple[int, tuple[bytes, ...], bytes]] = []
        self.cuts = 0
        self.was_whole = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut_next(self, count: int, *commands: str, holding: bytes = b"") -> None:
        with self._lock:
            self._wanted.append((count, tuple(command.encode() for command in commands), holding))

    def forget(self) -> None:
        """Forget the cuts that were asked for and have not happened."""
        with self._lock:
            self._wanted.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            asked: list[bytes] = [b""]
            with self._lock:
                self._sockets += [near, far]
            threading.Thread(target=self._requests, args=(near, far, asked), daemon=True).start()
            threading.Thread(target=self._replies, args=(far, near, asked), daemon=True).start()

    def _requests(self, near: socket.socket, far: socket.socket, asked: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while message := _message(near):
                # OP_MSG: header, flags, section, and the document's first element: type and name.
                name = message[26 : message.index(b"\x00", 26)] if len(message) > 26 else b""
                asked[0] = name if name in _COMMANDS else b""
                far.sendall(message)
        _close(near, far)

    def _replies(self, far: socket.socket, near: socket.socket, asked: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while message := _message(far):
                count = self._arriving(message, asked[0])
                near.sendall(message[:count])
                if count is not None:
                    break
        _close(near, far)

    def _arriving(self, message: bytes, command: bytes) -> int | None:
        """How many bytes of this reply arrive; ``None``: all of them."""
        with self._lock:
            if not self._wanted:
                return None
            count, commands, holding = self._wanted[0]
            if command not in commands or holding not in message:
                return None
            del self._wanted[0]
            if len(message) <= count:
                self.was_whole = True
                return None
            self.cuts += 1
            return count

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


def _message(source: socket.socket) -> bytes:
    """The next whole message; nothing at the end."""
    data = b""
    while len(data) < 4 or len(data) < struct.unpack_from("<i", data)[0]:
        length = struct.unpack_from("<i", data)[0] if len(data) >= 4 else 4
        more = source.recv(length - len(data))
        if not more:
            return b""
        data += more
    return data


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
