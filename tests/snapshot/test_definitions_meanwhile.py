"""Copies of a database in which collections are renamed, dropped, replaced and made while they are copied.

Single definitions had been tried at chosen moments. There are no updates, only inserts, replacements and deletes: an
update's event has the document that the look-up finds under the collection's name, and finds none if the collection has
been renamed by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import bson
import pymongo
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure

import tailrace
from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.snapshot.copies import Target, truth

pytestmark = pytest.mark.mongod

DATABASE = "definitions_meanwhile"
STEPS = 40
OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2", "7.0.28")]


@pytest.fixture(params=["6.0.27", *OLDER])
def uri(request: pytest.FixtureRequest, start_replica_set: Callable[..., ReplicaSet]) -> Iterator[str]:
    version = request.param
    here = request.getfixturevalue("replica_set") if version == "6.0.27" else start_replica_set(1, version=version)
    yield str(here.uri)
    with pymongo.MongoClient[Any](here.uri) as client:
        client.drop_database(DATABASE)


class Definitions:
    """One step after the other, by chance."""

    def __init__(self, database: Any, rng: random.Random) -> None:
        self._database = database
        self._rng = rng
        for number in range(5):
            documents = [
                {"_id": key, "of": number, "x": "x" * rng.randrange(3000)} for key in range(rng.randrange(600))
            ]
            database[f"c{number}"].insert_many([{"_id": -1}, *documents])
        self.left = STEPS
        self.done: list[str] = []

    def step(self) -> None:
        self.left -= 1
        there = sorted(name for name in self._database.list_collection_names() if name.startswith("c"))
        name, other = self._rng.choice(there or ["c0"]), f"c{self._rng.randrange(6)}"
        steps: list[Callable[[Any, str], Any]] = [
            lambda one, to: one.rename(to, dropTarget=True),
            lambda one, _: one.drop(),
            lambda one, to: list(one.aggregate([{"$set": {"out": self._rng.random()}}, {"$out": to}])),
            lambda one, to: list(one.aggregate([{"$merge": {"into": to, "whenMatched": "replace"}}])),
            lambda one, _: [one.replace_one({"_id": key}, {"r": key}) for key in self._rng.sample(range(600), 30)],
            lambda one, _: one.delete_many({"_id": {"$mod": [7, self._rng.randrange(7)]}}),
            lambda _, to: self._database[to].insert_many([{"n": number} for number in range(50)]),
        ]
        chosen = self._rng.randrange(len(steps))
        with suppress(OperationFailure):  # it has this name already, or a server does not merge into what it reads
            steps[chosen](self._database[name], other)
        self.done.append(f"{chosen} {name} {other}")


class Copied:
    """What a consumer has that carries out a copy and the stream after it, and goes on from its token now and then."""

    def __init__(self, client: Any) -> None:
        self._database = client[DATABASE]
        self._token: Any = None
        self.target = Target()
        self.given = 0
        self._stream = self._watch()

    def _watch(self) -> Any:
        start = {"start": "snapshot"} if self._token is None else {"resume_after": self._token}
        return self._database.watch(full_document="updateLookup", max_await_time_ms=50, **start)

    def next(self) -> Any | None:
        """The ``_id`` of the next event's document; ``None`` where there is no event now, or no document."""
        event = self._stream.try_next()
        if event is None:
            return None
        self.target.apply(bytes(event.raw))
        self._token, self.given = bson.decode(bson.encode(self._stream.resume_token)), self.given + 1
        return event["documentKey"]["_id"] if "documentKey" in event else None

    def go_on(self) -> None:
        self._stream.close()
        self._stream = self._watch()

    def close(self) -> None:
        self._stream.close()


@pytest.mark.parametrize("seed", range(amount(3, 60)))
def test_what_is_copied_and_every_change_are_the_collections(uri: str, seed: int) -> None:
    rng = random.Random(f"definitions {seed}")
    with pymongo.MongoClient[Any](uri) as client, tailrace.connect(uri, document_class=RawBSONDocument) as ours:
        database = client[DATABASE]
        client.drop_database(database)
        definitions = Definitions(database, rng)
        with closing(Copied(ours)) as copied:
            while definitions.left:
                if copied.next() is None or copied.given % 25 == 0:
                    definitions.step()
                    if rng.random() < 0.2:
                        copied.go_on()
            end = database["end"].insert_one({}).inserted_id
            while copied.next() != end:
                pass
        expected = {f"{DATABASE}.{name}": truth(database[name]) for name in database.list_collection_names()}
    found = {name: documents for name, documents in copied.target.collections.items() if documents}
    assert found == {name: documents for name, documents in expected.items() if documents}, definitions.done
