"""Servers that run while a ``with`` block does."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class StartedInBlock:
    """A context manager of something with ``start`` and ``close``: what did not start is closed too."""

    def start(self, *, timeout_s: float = 300.0) -> None:
        """Start it, within this many seconds."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
