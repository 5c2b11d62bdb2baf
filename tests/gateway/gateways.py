"""A gateway for a test: in the test's process, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tailrace.read.source.uri import hide
from tailrace.watch.gateway.options import GatewayOptions
from tailrace.watch.gateway.server import Gateway

_START_S = 300.0
_T = TypeVar("_T")


class RunningGateway:
    """``gateway`` belongs to the loop's thread: use it through ``call``."""

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self.gateway = gateway
        self._loop = loop
        self._thread = thread
        self._stopped = False
        self.host, self.port = gateway.address

    @property
    def hosts(self) -> str:
        return f"{self.host}:{self.port}"

    def uri(self, options: str = "", user: str = "") -> str:
        """``user`` is ``name:password``."""
        return f"mongodb://{user}{'@' if user else ''}{self.hosts}/{options and '?'}{options}"

    def call(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns in the loop's thread."""

        async def run() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_START_S)

    def stop(self) -> None:
        """Stop as at SIGTERM."""
        if not self._stopped:
            self._stopped = True
            asyncio.run_coroutine_threadsafe(self.gateway.stop(), self._loop).result(_START_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_S)


@contextmanager
def running_gateway(uri: str, **options: Any) -> Iterator[RunningGateway]:
    """Serve the deployment at ``uri`` on a free port of the loopback address. ``options``: of ``GatewayOptions``."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()

    async def start() -> Gateway:
        gateway = Gateway(hide(uri), GatewayOptions(**{"port": 0, **options}))
        await gateway.start()
        return gateway

    running = RunningGateway(asyncio.run_coroutine_threadsafe(start(), loop).result(_START_S), loop, thread)
    try:
        yield running
    finally:
        running.stop()
