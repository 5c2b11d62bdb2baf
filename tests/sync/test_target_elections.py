"""A sync's reads from its target during elections: the server refuses each read several times in a row.

PyMongo repeats a read once, so tests with a single step-down found nothing: a sync ended if a second election came
within the same read, or if the read was a command, which is never repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import NotPrimaryError, ServerSelectionTimeoutError

from tailrace.act.sync.target import answered
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.sync import Sync
from tests.lending import Lender
from tests.sync.both import STATE_DB, beside, is_users, normal
from tests.sync.equality import differences, held

READS = ("listCollections", "listIndexes", "find")
NAME = "elections"
NOT_PRIMARY = {"errmsg": "not primary and secondaryOk=false", "code": 13435}


@contextmanager
def refusing(target: MongoClient[Any]) -> Iterator[None]:
    """Let the server refuse all reads for a while, again and again. Other connections may be refused as well."""
    on = {"mode": "alwaysOn", "data": {"failCommands": list(READS), "errorCode": 13435}}
    over = threading.Event()

    def refuse() -> None:
        while not over.is_set():
            target.admin.command({"configureFailPoint": "failCommand", **on})
            over.wait(0.15)
            target.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
            over.wait(0.25)

    try:
        with beside(refuse):
            try:
                yield
            finally:
                over.set()
    finally:
        target.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


@pytest.mark.mongod
def test_reads_are_asked_again_until_there_is_a_primary(lender: Lender, replica_set: ReplicaSet) -> None:
    with lender.lent() as source, MongoClient[Any](source.uri) as here, MongoClient[Any](replica_set.uri) as there:
        database = here[NAME]
        definitions = (
            lambda: here.drop_database(NAME),
            lambda: database.c.insert_many([{"_id": number, "at": None} for number in range(50)]),
            lambda: database.c.create_index("at", expireAfterSeconds=3600),
            lambda: database.command("create", "v", viewOn="c", pipeline=[]),
            lambda: database.command("collMod", "v", viewOn="c", pipeline=[{"$match": {}}]),
            lambda: database.command("collMod", "c", index={"name": "at_1", "expireAfterSeconds": 60}),
            lambda: database.command("create", "ring", capped=True, size=4096),
            lambda: database.ring.insert_many([{"n": number} for number in range(5)]),
            lambda: database.c.rename("d"),
            database.v.drop,
            lambda: database.d.drop_index("at_1"),
        )
        try:
            before = there.admin.command({"configureFailPoint": "failCommand", "mode": "off"})["count"]
            with refusing(there):
                for define in definitions:
                    define()
                    with Sync(source.uri, replica_set.uri, only=[f"{NAME}.*"], lease_s=4) as sync:
                        sync.run(to_present=True)
            after = there.admin.command({"configureFailPoint": "failCommand", "mode": "off"})["count"]
            assert after - before >= 2 * len(definitions)
            sides = [held(uri, but=[STATE_DB], selected=_is_own) for uri in (source.uri, replica_set.uri)]
            assert sides[0].keys() == {f"{NAME}.d", f"{NAME}.ring"}
            assert differences(*sides, known=normal("", "", ages=False)) == []
        finally:
            there.drop_database(NAME)
            there.drop_database(STATE_DB)
            here.drop_database(NAME)


def _is_own(namespace: str) -> bool:
    return is_users(namespace) and namespace.startswith(f"{NAME}.")


def test_an_owner_waits_for_a_primary_and_others_as_long_as_the_driver() -> None:
    checked: list[int] = []
    elects, none = NotPrimaryError("not primary", NOT_PRIMARY), ServerSelectionTimeoutError("none")
    answers: list[Exception | int] = [elects, none, 7]

    def ask() -> int:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    assert answered("read", ask, check=lambda: checked.append(len(answers))) == 7
    assert checked == [3, 2, 1]
    answers[:] = [elects, 7]
    assert answered("read", ask) == 7
    answers[:] = [none, 7]
    with pytest.raises(SinkError, match="cannot read: none"):
        answered("read", ask)


def test_an_election_that_does_not_end_is_named_without_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.act.sync.target.RETRY_SECONDS", 0.0)

    def ask() -> int:
        raise NotPrimaryError("not primary", NOT_PRIMARY)

    with pytest.raises(SinkError) as told:
        answered("list shop.orders", ask, check=lambda: None)
    assert str(told.value).startswith("the target cannot list shop.orders: not primary and secondaryOk=false. ")
