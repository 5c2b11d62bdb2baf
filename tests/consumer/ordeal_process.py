"""One process of an ordeal: a listener with lanes whose handler writes what it saw. ``ordeal.py`` starts it.

    python -m tests.consumer.ordeal_process JSON

Now and then the handler says that it is about to write, and pauses: that is when it is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pymongo

import tailrace
from tailrace.consumer import Change, Fenced, LeaseLost, Listener, MongoLeaseStore
from tailrace.consumer.views import ViewKeeper
from tests.consumer.ordeal_view import VIEW

PAUSE_S = 0.4


def handler_of(target: Any, *, in_transaction: bool, pauses_one_in: int) -> Any:
    effects, pauses, refused = target["effects"], target["pauses"], target["refused"]

    def handle(change: Change) -> None:
        if change.operation_type not in ("insert", "update", "replace"):
            return
        document = change.full_document or change.event["updateDescription"]["updatedFields"]
        key, n = (change.document_key or {})["_id"], document["n"]
        me = {"key": key, "n": n, "process": os.getpid()}
        if zlib.crc32(f"{key} {n}".encode()) % pauses_one_in == 0:
            pauses.insert_one(dict(me))
            time.sleep(PAUSE_S)
        effect = {"$push": {"seen": {"n": n, "version": change.version, "process": os.getpid()}}}
        try:
            if in_transaction:
                with change.transaction() as session:
                    effects.update_one({"_id": key}, effect, upsert=True, session=session)
            else:
                # Like a process that has not noticed that it was stopped: only the target refuses stale writes.
                change.fence._check = lambda: None
                change.fence.update_one(effects, {"_id": key}, effect, upsert=True)
        except (Fenced, LeaseLost) as error:
            refused.insert_one({**me, "error": type(error).__name__})
            raise

    return handle


def end_with(parent: int) -> None:
    """A run that is killed leaves no processes behind."""

    def look() -> None:
        while Path(f"/proc/{parent}").exists():
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def main() -> None:
    config = json.loads(sys.argv[1])
    end_with(config["parent"])
    target = pymongo.MongoClient[Any](config["target"])[config["database"] + "_effects"]
    with tailrace.connect(config["source"]) as client:
        listener = Listener(
            client[config["database"]]["orders"],
            handler_of(target, in_transaction=config["in_transaction"], pauses_one_in=config["pauses_one_in"]),
            resource="orders",
            store=MongoLeaseStore(target["leases"]),
            partitions=config["partitions"],
            commit_every=config["commit_every"],
            lease_seconds=config["lease_seconds"],
            retries=1000,
        )
        keeper = ViewKeeper(
            client, VIEW, store=MongoLeaseStore(target["leases"]), lease_seconds=config["lease_seconds"]
        )

        def stop(*_: Any) -> None:
            listener.stop()
            keeper.stop()

        signal.signal(signal.SIGTERM, stop)
        listener.start()
        if config["view"]:
            keeper.start()
            keeper.join()
        while not listener.join(0.2):
            pass


if __name__ == "__main__":
    main()
