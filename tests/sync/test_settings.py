"""Which collections a sync has, and under which names."""

from __future__ import annotations

import pytest

from tailrace.act.sync.settings import SyncSettings
from tailrace.core.oplog.selection import Selection
from tailrace.errors import UsageError


@pytest.mark.parametrize(
    ("namespace", "has"),
    [
        ("shop.orders", True),
        ("shop.logs", False),
        ("admin.system.users", False),
        ("shop.system.js", False),
        ("tailrace_sync.syncs", False),
        ("shop.odd\udcfe", False),
        ("shop.имя", True),
    ],
)
def test_what_is_synced(namespace: str, has: bool) -> None:
    settings = SyncSettings(excluded=Selection(("*.logs",)))
    assert settings.has(namespace) is has


@pytest.mark.parametrize("renames", [{"a": "b.c"}, {"a.b": "c"}, {"": "b"}, {"a": "c", "b": "c"}])
def test_new_names_that_cannot_be_are_refused(renames: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        SyncSettings(renames=renames)


def test_a_collection_s_new_name_goes_before_its_database_s() -> None:
    settings = SyncSettings(renames={"shop": "store", "shop.a": "other.b"})
    assert settings.target_of("shop.a") == "other.b"
    assert settings.target_of("shop.c.d") == "store.c.d"
    assert settings.target_of("rest.a") == "rest.a"
