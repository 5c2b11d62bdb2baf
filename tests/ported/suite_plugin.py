"""Loaded by pytest in the process that runs PyMongo's own tests: our client takes the place of PyMongo's.

``TAILRACE_SUITE_ENGINE`` is "pymongo" (nothing is replaced), "server" or "oplog". PyMongo's tests look at private parts
of a stream. Where ours uses another name, they are given it here under PyMongo's name; nothing else is changed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pymongo
import pytest
from pymongo.asynchronous import mongo_client as async_module
from pymongo.asynchronous.command_cursor import AsyncCommandCursor
from pymongo.synchronous import mongo_client as sync_module
from pymongo.synchronous.command_cursor import CommandCursor

import tailrace
from tailrace.watch.client.asynchronous.change_stream import AsyncChangeStream, ThreadedChangeStream
from tailrace.watch.client.asynchronous.server_stream import AsyncServerChangeStream
from tailrace.watch.client.change_stream import ChangeStream, OplogChangeStream
from tailrace.watch.client.request import WatchRequest

ENGINE = os.environ["TAILRACE_SUITE_ENGINE"]


class _Named:
    """A stream's private parts by PyMongo's names, from what ``watch`` was asked for."""

    asked: WatchRequest

    _pipeline = property(lambda self: list(self.asked.pipeline))
    _full_document = property(lambda self: self.asked.full_document)
    _batch_size = property(lambda self: self.asked.batch_size)
    _max_await_time_ms = property(lambda self: self.asked.max_await_time_ms)


class _Tailing:
    """The oplog's cursor in the place of the stream's."""

    def __init__(self, stream: Any) -> None:
        self._stream = getattr(stream, "_stream", stream) if isinstance(stream, AsyncChangeStream) else stream

    _tailing = property(lambda self: self._stream._source._tailing)
    cursor_id = property(lambda self: self._tailing.cursor_id)
    address = property(lambda self: self._tailing.address)
    _ns = "local.oplog.rs"
    _max_await_time_ms = property(lambda self: self._stream.asked.max_await_time_ms)

    def _has_next(self) -> bool:
        return bool(self._stream.has_next)

    def __del__(self) -> None:
        pass


class _TailingCursor(_Tailing, CommandCursor[Any]):  # type: ignore[misc]
    """For code that asks whether it is one of PyMongo's cursors."""


class _AsyncTailingCursor(_Tailing, AsyncCommandCursor[Any]):  # type: ignore[misc]
    """The same for asyncio."""


def _remember(opened: Any, request: WatchRequest) -> Any:
    vars(opened)["asked"] = request
    return opened


def _replace() -> None:
    from tailrace.watch.client import deployment

    init = WatchRequest.__post_init__
    last: list[WatchRequest] = []

    def remembered(request: WatchRequest) -> None:
        init(request)
        last[:] = [request]

    WatchRequest.__post_init__ = remembered  # type: ignore[method-assign]
    real_open = deployment.WatchedDeployment.open
    deployment.WatchedDeployment.open = (  # type: ignore[method-assign]
        lambda self, client, request: _remember(real_open(self, client, request), request)
    )
    opened = AsyncServerChangeStream.opened.__func__  # type: ignore[attr-defined]

    async def async_opened(cls: Any, client: Any, request: WatchRequest) -> Any:
        return _remember(await opened(cls, client, request), request)

    AsyncServerChangeStream.opened = classmethod(async_opened)  # type: ignore[assignment,method-assign]
    for kind in (ChangeStream, AsyncServerChangeStream):
        for name in ("_pipeline", "_full_document", "_batch_size", "_max_await_time_ms"):
            if name not in vars(kind):
                setattr(kind, name, vars(_Named)[name])
    OplogChangeStream._cursor = property(_TailingCursor)  # type: ignore[attr-defined]
    OplogChangeStream._target = property(lambda self: self.asked.target)  # type: ignore[attr-defined]
    ThreadedChangeStream._cursor = property(_AsyncTailingCursor)  # type: ignore[attr-defined]
    for name in ("_target", "_pipeline", "_full_document", "_batch_size", "_max_await_time_ms"):
        setattr(ThreadedChangeStream, name, property(partial(_inside, name)))
    of_user = property(lambda self: self._stream.asked.client, lambda self, client: None)
    ThreadedChangeStream._client = of_user  # type: ignore[assignment]
    _install(sync_module, "MongoClient", tailrace.Client)
    _install(async_module, "AsyncMongoClient", tailrace.AsyncClient)


def _inside(name: str, stream: AsyncChangeStream) -> Any:
    return getattr(stream._stream, name)  # type: ignore[attr-defined]


def _install(module: Any, name: str, ours: Any) -> None:
    """``ours`` with the engine of this run, wherever a test takes PyMongo's client from."""
    real_init = ours.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        real_init(self, *args, **{"engine": ENGINE, **options})

    ours.__init__ = init
    setattr(module, name, ours)
    setattr(pymongo, name, ours)
    setattr(importlib.import_module("pymongo.mongo_client"), name, ours)


if ENGINE != "pymongo":
    _replace()


@pytest.fixture(scope="session", autouse=True)
def _the_suite_is_set_up() -> Iterator[None]:
    """What the conftest files of PyMongo's tests do, without their plugin for asyncio."""
    if os.environ["TAILRACE_SUITE_FLAVOUR"] == "sync":
        suite = importlib.import_module("test")
        suite.setup()
        yield
        suite.teardown()
        return
    suite = importlib.import_module("test.asynchronous")
    loop = suite.get_loop()
    loop.run_until_complete(suite.async_setup())
    yield
    loop.run_until_complete(suite.async_teardown())
