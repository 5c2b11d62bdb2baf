"""PyMongo's own stream and ours in every flavour, side by side: each call is made on all of them at the same time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import ConnectionFailure, OperationFailure

import tailrace

#: One client each. The last word says how its streams get the events; "shared" has several streams, which share a tail.
FLAVOURS: Final = ("pymongo", "server", "oplog", "shared", "async pymongo", "async server", "async oplog")
SHARING: Final = 3
PATIENCE_S: Final = 300.0
#: Short waits for a member, and frequent checks of the members.
IMPATIENT: Final = {"serverSelectionTimeoutMS": 5000, "heartbeatFrequencyMS": 500}


class AsyncStream:
    """A stream for asyncio, used by a thread: its loop runs in another one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stream: Any) -> None:
        self._loop = loop
        self._stream = stream

    def next(self) -> Any:
        try:
            return on(self._loop, self._stream.next())
        except StopAsyncIteration:
            raise StopIteration from None

    def try_next(self) -> Any:
        return on(self._loop, self._stream.try_next())

    def close(self) -> None:
        on(self._loop, self._stream.close())

    @property
    def alive(self) -> bool:
        return bool(self._stream.alive)


def on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    """What ``work`` returns, run by the event loop of another thread."""

    async def guarded() -> tuple[Any, Exception | None]:
        try:
            return await work, None
        except Exception as error:  # noqa: BLE001  a future cannot hold a StopAsyncIteration
            return None, error

    found, error = asyncio.run_coroutine_threadsafe(guarded(), loop).result(PATIENCE_S)
    if error is not None:
        raise error
    return found


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the exception that it raises."""
    try:
        return call()
    except (Exception, StopIteration) as error:  # noqa: BLE001
        return error


def kind(result: Any) -> Any:
    """An error as a program distinguishes it: by PyMongo's class and by code. Anything else is returned as it is."""
    if isinstance(result, OperationFailure):
        return "OperationFailure", result.code
    if isinstance(result, ConnectionFailure):
        return "ConnectionFailure"
    return type(result).__name__ if isinstance(result, BaseException) else result


class Streams:
    """The streams of all flavours on one collection, by names. ``sharing``: the client of those that share a read."""

    def __init__(self, streams: dict[str, Any], sharing: Any) -> None:
        self.streams = streams
        self._sharing = sharing
        self._pool = ThreadPoolExecutor(len(streams))

    def each(self, call: Callable[[Any], Any], names: Collection[str] | None = None) -> dict[str, Any]:
        """For each stream, or for those named, what the call returns or the exception that it raises."""
        chosen = self.streams if names is None else names
        futures = {name: self._pool.submit(outcome, partial(call, self.streams[name])) for name in chosen}
        return {name: future.result(PATIENCE_S * 2) for name, future in futures.items()}

    def same(self, call: Callable[[Any], Any]) -> Any:
        """The outcome, which must be the same for all; an error by its kind."""
        outcomes = self.each(call)
        kinds = {name: kind(result) for name, result in outcomes.items()}
        assert all(each == kinds["pymongo"] for each in kinds.values()), outcomes
        return kinds["pymongo"]

    def events(self, number: int, *, may_fail_once: bool = False) -> list[Any]:
        """The ``n`` of the next events, which must be the same for all. No call may fail on the way.

        ``may_fail_once``  a shared read may have failed once more between two calls; then the next call of each stream
                           that shares it raises that error, and leaves the stream open
        """
        may_fail = [stream for name, stream in self.streams.items() if may_fail_once and name.startswith("shared")]

        def collect(stream: Any) -> list[Any]:
            found: list[Any] = []
            deadline = time.monotonic() + PATIENCE_S
            while len(found) < number and time.monotonic() < deadline:
                try:
                    event = stream.try_next()
                except ConnectionFailure:
                    if stream not in may_fail or not stream.alive:
                        raise
                    may_fail.remove(stream)
                    continue
                if event is not None:
                    found.append(event["fullDocument"]["n"])
            return found

        found: list[Any] = self.same(collect)
        return found

    def raised(self) -> Any:
        """The error in which waiting for the next event ends, which must be the same for all."""
        return self.same(lambda stream: stream.next())

    def read_on(self, uri: str) -> None:
        """Return when the shared read has met whatever happened to it, and reads again."""
        before = self._sharing.tail_statistics.reads
        insert(uri, 0, collection="another")
        wait_until(lambda: bool(self._sharing.tail_statistics.reads > before), "the shared read goes on")

    @property
    def alive(self) -> bool:
        found: bool = self.same(lambda stream: stream.alive)
        return found


@contextmanager
def streams_at(
    uri: str,
    uris: dict[str, str] | None = None,
    *,
    max_await_time_ms: int = 200,
    full_document: str | None = None,
    collection: str = "c",
    **options: Any,
) -> Iterator[Streams]:
    """Streams of all flavours at ``uri``, or elsewhere if ``uris`` says so. Those that are to share a tail do."""
    watching = {"max_await_time_ms": max_await_time_ms, "full_document": full_document}
    opened: dict[str, Any] = {}
    shared: Any = None
    with ExitStack() as stack:
        loop = stack.enter_context(event_loop())
        for flavour in FLAVOURS:
            at = (uris or {}).get(flavour, uri)
            words = flavour.split()
            if words[0] == "async":
                client = on(loop, _opened(words[1], at, options))
                stack.callback(lambda client=client: on(loop, client.close()))
                stream = on(loop, client["failing"][collection].watch(**watching))
                opened[flavour] = AsyncStream(loop, stream)
                stack.callback(opened[flavour].close)
                continue
            client = stack.enter_context(connect(flavour, at, **options))
            if flavour == "shared":
                shared = client
                opened |= dict(sharing(client["failing"][collection], client, stack, watching))
            else:
                opened[flavour] = stack.enter_context(client["failing"][collection].watch(**watching))
        yield Streams(opened, shared)


def connect(flavour: str, uri: str, **options: Any) -> Any:
    """A client that does not wait long for a member."""
    options = {**IMPATIENT, **options}
    if flavour == "pymongo":
        return MongoClient[Any](uri, **options)
    engine: Any = "server" if flavour == "server" else "oplog"
    return tailrace.connect(uri, engine=engine, **options)


async def _opened(flavour: str, uri: str, options: dict[str, Any]) -> Any:
    options = {**IMPATIENT, **options}
    if flavour == "pymongo":
        return AsyncMongoClient[Any](uri, **options)
    return tailrace.AsyncClient(uri, engine=flavour, **options)  # type: ignore[arg-type]


def sharing(watched: Any, client: Any, stack: ExitStack, watching: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Streams of one client that are joined: one read feeds them."""
    streams = [stack.enter_context(watched.watch(**watching)) for _ in range(SHARING)]

    def are_joined() -> bool:
        assert list(pool.map(lambda stream: stream.try_next(), streams)) == [None] * SHARING
        return bool(client.tail_statistics.joined == SHARING)

    with ThreadPoolExecutor(SHARING) as pool:
        wait_until(are_joined, "the streams read together")
    for number, stream in enumerate(streams):
        yield f"shared {number}", stream


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def insert(uri: str, *numbers: int, collection: str = "c", **more: Any) -> None:
    """Insert a document with each ``n``."""
    with MongoClient[Any](uri, serverSelectionTimeoutMS=60_000) as client:
        client.failing[collection].insert_many([{"n": number, **more} for number in numbers])
