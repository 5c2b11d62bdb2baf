"""For which clients the server pushes replies."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.read.source.mongod import _may_push

_OIDC: dict[str, Any] = {"authMechanism": "MONGODB-OIDC", "authMechanismProperties": {"ENVIRONMENT": "test"}}


@pytest.mark.parametrize(("options", "may"), [({}, True), ({"username": "u", "password": "p"}, True), (_OIDC, False)])
def test_nothing_is_pushed_to_who_must_log_in_again(options: dict[str, Any], may: bool) -> None:
    """After the token expired, such a read would have hung until its time-out. No server of the tests has OIDC."""
    with MongoClient[Any]("mongodb://localhost:1", connect=False, **options) as client:
        assert _may_push(client) is may
