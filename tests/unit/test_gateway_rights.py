"""What a privilege covers if names begin with ``system.``: such a collection is covered only by its own name.

Without this rule a user who may read a database could watch its ``system.views`` and ``system.users`` through the
gateway. Only tests with a server had named a database.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.oplog.namespace import Scope
from tailrace.watch.gateway import rights
from tailrace.watch.gateway.rights import Identity

ACTIONS = frozenset({"find", "changeStream"})
#: A resource, and whether it covers ``shop.system.views``.
RESOURCES: list[tuple[dict[str, Any], bool]] = [
    ({"anyResource": True}, True),
    ({"db": "shop", "collection": "system.views"}, True),
    ({"db": "", "collection": "system.views"}, True),
    ({"db": "shop", "collection": ""}, False),
    ({"db": "", "collection": ""}, False),
    ({"db": "shop", "collection": "system."}, False),
    ({"db": "shop", "collection": "system.users"}, False),
    ({"db": "shop", "collection": "system"}, False),
    ({"db": "other", "collection": "system.views"}, False),
    ({"db": "admin", "collection": "system.views"}, False),
    ({"cluster": True}, False),
    ({"system_buckets": "views"}, False),
    ({"db": "shop"}, False),
]
VIEWS = Scope.of_collection("shop", "system.views")


def watches(resource: dict[str, Any], scope: Scope) -> bool:
    return Identity(frozenset({("anna", "admin")}), ((resource, ACTIONS),)).may_watch(scope)


@pytest.mark.parametrize(("resource", "covered"), RESOURCES, ids=str)
def test_a_collection_of_the_system_is_covered_by_its_own_name_alone(resource: dict[str, Any], covered: bool) -> None:
    assert watches(resource, VIEWS) is covered


@pytest.mark.parametrize("name", ["system.users", "system.js", "system.buckets.orders", "system.", "system.profile"])
def test_a_privilege_on_every_collection_of_a_database_covers_none_of_the_system(name: str) -> None:
    for database in ("shop", "admin"):
        for resource in ({"db": database, "collection": ""}, {"db": "", "collection": ""}):
            assert not watches(resource, Scope.of_collection(database, name))


@pytest.mark.parametrize("name", ["systems", "system", "my.system.views", "System.views", "systemx.views"])
def test_what_is_named_like_it_is_an_ordinary_collection(name: str) -> None:
    assert watches({"db": "shop", "collection": ""}, Scope.of_collection("shop", name))
    assert watches({"db": "", "collection": ""}, Scope.of_collection("shop", name))


def test_a_weaker_rule_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: collections of the system are covered like any other."""

    def covers(resource: dict[str, Any], scope: Scope) -> bool:
        return bool(
            right(resource, scope) or (scope == VIEWS and right(resource, Scope.of_collection("shop", "views")))
        )

    right = rights._covers
    monkeypatch.setattr(rights, "_covers", covers)
    assert any(watches(resource, VIEWS) is not covered for resource, covered in RESOURCES)
