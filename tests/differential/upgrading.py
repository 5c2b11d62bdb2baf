"""A replica set that is written to and read by everything while its members are given another version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.errors import TailraceError

END_S = 180.0
WRITE_S = 0.02


class Background:
    """Work in a thread, whose failure is reported to the test."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name = name
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised by ``join``
            self._error = error

    def join(self) -> None:
        """Wait for its end. Raises what it has failed with."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), self.name
        if self._error is not None:
            raise self._error


class Writer:
    """Writes, removes several documents by one command, and goes on after every failure."""

    def __init__(self, uri: str) -> None:
        self._client: MongoClient[Any] = MongoClient(uri, serverSelectionTimeoutMS=5000)
        self._stopped = threading.Event()
        self.rounds = 0
        self._thread = Background("writer", self._write)

    def _write(self) -> None:
        orders = self._client.shop.orders
        while not self._stopped.wait(WRITE_S):
            first = self.rounds * 100
            self.rounds += 1
            with suppress(PyMongoError):
                orders.insert_many([{"_id": first + number, "n": 0} for number in range(10)])
                orders.update_many({"_id": {"$gte": first}}, {"$inc": {"n": 1}})
                orders.delete_many({"_id": {"$gte": first, "$lt": first + 6}})

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._client.close()


class Follower:
    """A stream whose user goes on after an error as the error says: with the stream, or with a new one at its token."""

    def __init__(self, name: str, opened: Callable[[dict[str, Any]], Any]) -> None:
        self._opened = opened
        self.events: list[bytes] = []
        self.errors: list[str] = []
        self._last: Any = None
        self._stream = opened({})
        self._thread = Background(name, self._follow)

    def _follow(self) -> None:
        while self._last is None or not self.events or key_of(self.events[-1]) != self._last:
            try:
                event = self._stream.try_next()
            except (PyMongoError, TailraceError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)
                with suppress(PyMongoError, TailraceError):
                    if not self._stream.alive:
                        self._stream = self._opened({"resume_after": self._stream.resume_token})
                continue
            if event is not None:
                self.events.append(bytes(event.raw))
        self._stream.close()

    def end_at(self, key: Any) -> None:
        """Follow up to the event of the document with this key."""
        self._last = key
        self._thread.join()


def key_of(event: bytes) -> Any:
    """The ``documentKey`` of an event."""
    return bson.decode(event).get("documentKey")


RAW: dict[str, Any] = {"document_class": RawBSONDocument, "max_await_time_ms": 200}
