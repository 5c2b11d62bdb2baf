"""A process that carries out effects and is killed between them and their commits:
``python -m tests.consumer.once_process KIND URI DATABASE BROKERS SEED``."""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

from pymongo import MongoClient

import tailrace
from tailrace.consumer import Change, Listener, MongoLeaseStore, SeenChanges
from tailrace.consumer.messages import ChangeMessages, MessageRelay


def main(kind: str, uri: str, database: str, brokers: str, seed: str) -> None:
    draw = random.Random(seed)

    def perhaps_die(odds: float) -> None:
        if draw.random() < odds:
            os.kill(os.getpid(), signal.SIGKILL)

    def count(change: Change) -> None:
        def effect(session: Any) -> None:
            targets.update_one(
                {"_id": change.document_key["_id"]}, {"$inc": {"times": 1}}, upsert=True, session=session
            )
            perhaps_die(0.05)

        seen.once(change, effect)
        perhaps_die(0.1)  # the effect is there, and the position is not committed

    with tailrace.connect(uri) as client, MongoClient[Any](uri) as target:
        targets = target[database]["targets"]
        seen = SeenChanges(target[database]["marks"], "count")
        handler: Any = count
        if kind == "relay":
            from tailrace.consumer.messages.kafka import KafkaPublisher

            relay = MessageRelay(KafkaPublisher(brokers), ChangeMessages("orders"))

            class Dying:
                def __call__(self, change: Change) -> None:
                    self.handle_batch([change])

                def handle_batch(self, changes: Any) -> int:
                    done = relay.handle_batch(changes)
                    perhaps_die(0.3)
                    return done

            handler = Dying()
        store = MongoLeaseStore(client[database]["leases"])
        Listener(
            client[database]["orders"], handler, resource="once", store=store, owner="the same", commit_every=5
        ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
