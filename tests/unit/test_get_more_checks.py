"""The reply to somebody else's getMore."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.errors import ServerError
from tailrace.watch.gateway.get_more_checks import check_owner

ANN, BOB = frozenset({("ann", "admin")}), frozenset({("bob", "admin")})


def identity(users: frozenset[tuple[str, str]], *, may_all: bool = False) -> Any:
    return SimpleNamespace(users=users, may_all=may_all, may_watch=lambda _: True)


@pytest.mark.parametrize(
    ("session", "asks", "says"),
    [
        (None, identity(frozenset()), "command getMore requires authentication"),
        (b"s", identity(frozenset()), "command getMore requires authentication"),
        (None, identity(BOB), "cursor id 7 was not created by the authenticated user"),
        (None, identity(frozenset(), may_all=True), "cursor id 7 was not created by the authenticated user"),
    ],
)
def test_who_is_not_the_owner_is_refused(session: bytes | None, asks: Any, says: str) -> None:
    """On 4.4.2 a dropped user was told that another user made the cursor: the gateway asks for rights at different
    moments, and the differential test had only hit one of two orders."""
    stream: Any = SimpleNamespace(owner=SimpleNamespace(users=ANN, session=session), cursor_id=7, scope=None)
    with pytest.raises(ServerError, match=says) as refused:
        check_owner(stream, asks, session, (4, 4))
    assert refused.value.code == 13


def test_the_owner_may_go_on() -> None:
    stream: Any = SimpleNamespace(owner=SimpleNamespace(users=ANN, session=None), cursor_id=7, scope=None)
    check_owner(stream, identity(ANN), None, (6, 0))
