"""Replica sets that tests hand on to each other."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from pymongo import MongoClient

from tests.lending import Lender, has_long_oplog

pytestmark = pytest.mark.mongod


def test_one_is_lent_again_empty_and_closed_once_it_is_not_as_it_was() -> None:
    with closing(Lender()) as lender:
        with lender.lent() as first, MongoClient[Any](first.uri) as client:
            client.shop.orders.insert_one({})
            client.admin.notes.insert_one({})
            client.admin.command("createUser", "somebody", pwd="p", roles=["root"])
            client.admin.command("setUserWriteBlockMode", 1, **{"global": True})
        with lender.lent() as second, MongoClient[Any](second.uri) as client:
            assert second is first
            assert set(client.list_database_names()) <= {"admin", "config", "local"}
            assert "notes" not in client.admin.list_collection_names()
            assert client.admin.command("usersInfo")["users"] == []
            client.shop.orders.insert_one({})  # it is allowed again
            assert not has_long_oplog(second)
            assert has_long_oplog(second, entries_max=2)
            client.admin.command("setParameter", 1, notablescan=True)
        assert not second.members[0].is_running
