"""A failing look-up is repeated once, and for no longer than a resume: see ``OplogResume.answers``."""

from __future__ import annotations

from typing import Any

import pytest
from bson.codec_options import DEFAULT_CODEC_OPTIONS
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, PyMongoError

from tailrace.core.oplog.namespace import Scope
from tailrace.read.source.drive import AskAgainError
from tailrace.read.source.failure import source_error
from tailrace.watch.client.oplog_resume import OplogResume
from tailrace.watch.client.request import WatchRequest


def asked(failing: Any) -> int:
    """How often a look-up is asked that fails each time, with what ``failing`` raises for a client that reaches no
    server."""
    calls = 0
    request = WatchRequest(scope=Scope.parse("shop.orders"), codec_options=DEFAULT_CODEC_OPTIONS)
    with MongoClient[Any]("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=50, connect=False) as client:

        def answer_to(need: Any) -> Any:
            nonlocal calls
            calls += 1
            try:
                failing(client)
            except PyMongoError as error:
                raise source_error(error, client) from None

        resume = OplogResume(client, request, None)
        with pytest.raises(AskAgainError) as told:
            resume.answers(answer_to)(object())  # type: ignore[arg-type]
        assert resume.kept is told.value.error
    return calls


def cut(client: MongoClient[Any]) -> None:
    raise AutoReconnect("connection closed")


def none_is_selected(client: MongoClient[Any]) -> None:
    client.admin.command("ping")


def none_is_selected_after_a_cut(client: MongoClient[Any]) -> None:
    """As PyMongo's retryable read: it raises what came first."""
    try:
        none_is_selected(client)
    except PyMongoError:
        cut(client)


def test_a_look_up_is_asked_twice() -> None:
    assert asked(cut) == 2


@pytest.mark.parametrize("failing", [none_is_selected, none_is_selected_after_a_cut])
def test_a_look_up_that_no_server_was_there_for_in_time_is_not_asked_again(failing: Any) -> None:
    """A call took ``serverSelectionTimeoutMS`` twice, but PyMongo's only once. In tests look-ups had failed only
    because of cut connections, while the server was there."""
    assert asked(failing) == 1
