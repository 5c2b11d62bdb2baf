"""The writers of what the listeners of the chaos handle. Writes are numbered from 1 in each document, and each is
certain to have been carried out once, whatever the members did meanwhile."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any, Final

import pymongo
from pymongo import WriteConcern
from pymongo.errors import PyMongoError

_MAJORITY: Final = WriteConcern("majority", wtimeout=5000)


class Orders:
    """Writes to ``orders`` in a thread until ``finish()``. ``written`` has each document's last number.

    A write requires the number before it. So it changes nothing if a server carries it out late, after it was given up
    and repeated. If an answer is lost, another write, which changes nothing and waits for the majority, finds out what
    happened.
    """

    def __init__(self, uri: str, database: str, seed: int, *, documents: int = 60, pause_s: float = 0.02) -> None:
        self.written = dict.fromkeys(range(documents), 0)
        self._client = pymongo.MongoClient[Any](uri)
        orders = self._client[database]["orders"]
        orders.insert_many([{"_id": key, "n": 0} for key in self.written])
        self._orders = orders.with_options(write_concern=_MAJORITY)
        self._seed, self._pause_s = seed, pause_s
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)

    @property
    def changes(self) -> int:
        return sum(self.written.values())

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        self._ended.set()
        self._thread.join(300)
        self.check()
        assert not self._thread.is_alive(), "the last write was not acknowledged"
        self._client.close()

    def _write(self) -> None:
        draw = random.Random(f"{self._seed} orders")
        try:
            while not self._ended.is_set():
                kind = draw.choices(["update", "replace", "transaction"], [8, 1, 1])[0]
                keys = draw.sample(list(self.written), 3 if kind == "transaction" else 1)
                while True:
                    with suppress(PyMongoError):
                        self._attempt(kind, keys)
                    with suppress(PyMongoError):
                        if all(self._is_there(key) for key in keys):
                            break
                    time.sleep(0.1)
                for key in keys:
                    self.written[key] += 1
                self._ended.wait(draw.uniform(0, 2 * self._pause_s))
        except BaseException as error:  # noqa: BLE001  raised by check()
            self._error = error

    def _attempt(self, kind: str, keys: list[int]) -> None:
        if kind == "update":
            self._orders.update_one(self._before(keys[0]), {"$set": {"n": self.written[keys[0]] + 1}})
        elif kind == "replace":
            self._orders.replace_one(self._before(keys[0]), {"n": self.written[keys[0]] + 1, "replaced": True})
        else:
            with self._client.start_session() as session, session.start_transaction(write_concern=_MAJORITY):
                plain = self._orders.with_options(write_concern=WriteConcern())
                for key in keys:
                    update = {"$set": {"n": self.written[key] + 1}}
                    if plain.update_one(self._before(key), update, session=session).matched_count == 0:
                        session.abort_transaction()
                        break

    def _before(self, key: int) -> dict[str, int]:
        return {"_id": key, "n": self.written[key]}

    def _is_there(self, key: int) -> bool:
        n = self.written[key] + 1
        return self._orders.update_one({"_id": key, "n": n}, {"$set": {"n": n}}).matched_count == 1
