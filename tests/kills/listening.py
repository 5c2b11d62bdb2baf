"""One process of the chaos: three listeners whose effects tell who did what, and in which order.

    python -m tests.kills.listening JSON

``lanes``   in transactions: each effect exactly once
``fenced``  lanes whose effects go through ``change.fence``, with a commit after several changes
``alone``   one lease for all changes, fenced too

Now and then a handler says in a file that it is about to write, and pauses: that is when it is stopped. The process's
clocks are wrong, as those of the simulation's processes are; SIGUSR1 moves its wall clock.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pymongo
from pymongo.errors import DuplicateKeyError, PyMongoError

import tailrace
from tailrace.consumer import Change, Fenced, LeaseLost, Listener, MongoLeaseStore
from tests.consumer.ordeal_process import end_with
from tests.kills.planted import PLANTED

_PAUSE_S: Final = 0.5
#: How far a wall clock is moved while its process runs.
_JUMP_S: Final = 3600.0


class Clocks:
    """The clocks of this process: the wall clock is off by seconds, the monotonic one runs fast or slow. All of
    Tailrace reads ``time.time`` and ``time.monotonic``."""

    def __init__(self, skew_s: float, rate: float, told: Path) -> None:
        self.skew_s = skew_s
        self._told = told
        wall, monotonic = time.time, time.monotonic
        begun = monotonic()
        time.time = lambda: wall() + self.skew_s
        time.monotonic = lambda: begun + (monotonic() - begun) * rate
        self.tell()
        signal.signal(signal.SIGUSR1, self.jump)

    def jump(self, *_: Any) -> None:
        self.skew_s += -_JUMP_S if self.skew_s > 0 else _JUMP_S
        self.tell()

    def tell(self) -> None:
        """Write down how far the clock is off, for whoever moved it."""
        self._told.write_text(f"{self.skew_s}")


class Handlers:
    """What is done for a change, in the database of effects."""

    def __init__(self, target: Any, folder: Path, pauses_one_in: int, planted: str | None) -> None:
        self._target, self._folder, self._pauses_one_in, self._planted = target, folder, pauses_one_in, planted

    def of(self, listener: str) -> Callable[[Change], None]:
        effects = self._target[listener]
        act = self._in_transaction if listener == "lanes" else self._fenced

        def handle(change: Change) -> None:
            if change.operation_type not in ("insert", "update", "replace"):
                return
            document = change.full_document or change.event["updateDescription"]["updatedFields"]
            key, n = (change.document_key or {})["_id"], document["n"]
            if n:
                self._perhaps_pause(listener, key, n, "before")
                act(change, effects, key, n)

        return handle

    def _perhaps_pause(self, listener: str, key: int, n: int, where: str) -> None:
        if zlib.crc32(f"{listener} {key} {n} {where}".encode()) % self._pauses_one_in:
            return
        said = self._folder / f"{os.getpid()}.{threading.get_ident()}.pause"
        whole = said.with_suffix(".new")
        whole.write_text(json.dumps({"listener": listener, "key": key, "n": n, "where": where}))
        whole.rename(said)
        time.sleep(_PAUSE_S)
        said.unlink(missing_ok=True)

    @staticmethod
    def _effect(change: Change, n: int) -> dict[str, Any]:
        return {"$push": {"seen": {"n": n, "version": change.version, "process": os.getpid()}}}

    def _in_transaction(self, change: Change, effects: Any, key: int, n: int) -> None:
        outside = self._planted == "effects outside the transaction"
        try:
            with change.transaction() as session:
                inside = None if outside else session
                effects.update_one({"_id": key}, self._effect(change, n), upsert=True, session=inside)
                if not outside:
                    self._check_newest(change, session)
                self._perhaps_pause("lanes", key, n, "in its transaction")
        except DuplicateKeyError:
            violation = {"what": "an older owner's transaction came after a newer one's", "key": key, "n": n}
            self._target["violations"].insert_one({**violation, "version": change.version, "of": change.resource})
            raise
        except LeaseLost as error:
            self._refused("lanes", key, n, error)
            raise

    def _check_newest(self, change: Change, session: Any) -> None:
        """In the same transaction: no newer owner of this lane has done anything yet. Raises DuplicateKeyError."""
        newest = {"_id": change.resource, "version": {"$lte": change.version}}
        update = {"$set": {"version": change.version}}
        self._target["newest"].update_one(newest, update, upsert=True, session=session)

    def _fenced(self, change: Change, effects: Any, key: int, n: int) -> None:
        # Like a process that has not noticed that it was stopped: only the target refuses stale writes.
        change.fence._check = lambda: None
        try:
            change.fence.update_one(effects, {"_id": key}, self._effect(change, n), upsert=True)
        except (Fenced, LeaseLost) as error:
            self._refused(effects.name, key, n, error)
            raise

    def _refused(self, listener: str, key: int, n: int, error: Exception) -> None:
        said = {"listener": listener, "key": key, "n": n, "process": os.getpid(), "error": type(error).__name__}
        with suppress(PyMongoError):
            self._target["refused"].insert_one(said)


def listeners_of(config: dict[str, Any], client: Any, target: Any) -> list[Listener]:
    planted = config["planted"]
    handlers = Handlers(target, Path(config["folder"]), config["pauses_one_in"], planted)
    common: dict[str, Any] = {
        "store": MongoLeaseStore(target["leases"]),
        "lease_seconds": config["lease_seconds"],
        "on_error": lambda change, error, attempt: "retry",
    }
    own: dict[str, dict[str, Any]] = {
        "lanes": {"partitions": 6},
        "fenced": {"partitions": 4, "commit_every": 5, "commit_interval": 2.0},
        "alone": {"commit_every": 3, "commit_interval": 2.0},
    }
    if planted == "lanes by number":
        own["lanes"]["lane_key"] = _number
    watched = client[config["database"]]["orders"]
    return [Listener(watched, handlers.of(name), resource=name, **common, **own[name]) for name in config["listeners"]]


def _number(event: Any) -> int:
    """A lane key that is different after each change of a document."""
    document = event.get("fullDocument") or event["updateDescription"]["updatedFields"]
    return int(document["n"])


def main() -> None:
    config = json.loads(sys.argv[1])
    end_with(config["parent"])
    logging.basicConfig(format="%(name)s: %(message)s")
    Clocks(config["skew_s"], config["rate"], Path(config["folder"], f"{os.getpid()}.clock"))
    if config["planted"] is not None:
        PLANTED[config["planted"]]()
    target = pymongo.MongoClient[Any](config["uri"])[config["database"] + "_effects"]
    with tailrace.connect(config["uri"]) as client:
        listeners = listeners_of(config, client, target)

        def stop(*_: Any) -> None:
            for listener in listeners:
                listener.stop()

        signal.signal(signal.SIGTERM, stop)
        for listener in listeners:
            listener.start()
        try:
            while any(not listener.join(0.2) for listener in listeners):
                pass
        finally:
            stop()


if __name__ == "__main__":
    main()
