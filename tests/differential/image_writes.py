"""What exact images are compared over: random changes of a collection, and a stream read up to a document."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure

from tailrace.core import raw_bson as rb
from tests.differential import documents as docs
from tests.differential import named_fields, updates


def write(
    collection: Any, rng: random.Random, rounds: int, *, fresh: bool = True, without: bytes | None = None
) -> None:
    """Random inserts, updates, replacements and deletes, some in transactions. ``without``: leave out updates that hold
    these bytes. (A replacement that has a field ``$v`` at its top ends the server's stream too; few have one.)"""
    database, client = collection.database, collection.database.client
    ids = [rb.encode_document(rb.encode_element(rb.INT32, b"_id", rb.encode_int32(n))) for n in range(60)]
    if fresh:
        for key in ids:
            with suppress(OperationFailure):  # values that no server takes
                collection.insert_one(RawBSONDocument(docs.everyday_document(rng, key[4:-1])))
    for _ in range(rounds):
        statements = [updates.statement(rng, RawBSONDocument(key), one=True) for key in rng.sample(ids, 20)]
        if without is not None:
            statements = [one for one in statements if without not in bson.encode(one)]
        with suppress(OperationFailure):
            database.command({"update": collection.name, "updates": statements, "ordered": False})
        if rng.random() < 0.3:
            # a document twice in one transaction
            with suppress(OperationFailure), client.start_session() as session, session.start_transaction():
                for number in (1, 1, 2):
                    change = {"$set": {"at": rng.random()}, "$inc": {"count": 1}}
                    collection.update_one({"_id": number}, change, session=session, upsert=True)
                collection.delete_one({"_id": rng.randrange(60)}, session=session)


def write_lookalikes(collection: Any, version: str) -> None:
    """Documents that look like entries, commands, events and tokens: each is inserted, changed, replaced, deleted."""
    found = list(named_fields.lookalikes(version))
    collection.insert_many(found)
    odd = {"count": "three", "ts": -(10**9), "applyOps": [{"op": "d"}], "token": {"_id._data": 1}, "prepare": True}
    for number, document in enumerate(found):
        key = {"_id": document["_id"]}
        collection.update_one(key, {"$set": odd, "$inc": {"turns": 1}})
        if number % 2:
            collection.replace_one(key, {**odd, "fullDocument": {"count": -1}})
        if number % 3 == 0:
            collection.delete_one(key)


def raw_events(stream: Any, end: str) -> list[bytes]:
    """The events up to the insert of ``end``."""
    found: list[bytes] = []
    for event in stream:
        found.append(event.raw)
        if event["operationType"] == "insert" and event["documentKey"]["_id"] == end:
            return found
    raise AssertionError("the stream has ended")
