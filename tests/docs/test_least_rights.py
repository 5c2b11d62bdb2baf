"""The roles that ``docs/how-to/security.md`` prints are enough for what it says, on a server with users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

import tailrace
from tailrace.cli.main import main
from tailrace.consumer import Change, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.docs.runner import printed_roles

pytestmark = pytest.mark.mongod


def test_the_printed_role_of_a_listener_suffices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop_orders.py").write_text("def handle(change):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    roles = printed_roles()
    with mongod_with_users(tmp_path) as mongod:
        with MongoClient[dict[str, Any]](uri_of(mongod, ROOT, PASSWORD)) as root:
            for name in ("tailrace", "tailraceListener"):
                root.admin.command(roles[name])
            add_user(mongod, "listener", "l", ["tailraceListener"])
            uri = uri_of(mongod, "listener", "l")
            with tailrace.connect(uri) as client:
                store = MongoLeaseStore(client["tailrace"]["leases"])
                letters = DeadLetters(client["tailrace"]["deadLetters"], tries=1)
                seen: list[Any] = []

                def handle(change: Change) -> None:
                    seen.append(change.document_key["_id"])
                    if seen[-1] == 1:
                        raise ValueError("not this one")
                    if seen[-1] == 2:
                        listener.stop()

                listener = Listener(
                    client["shop"]["orders"], handle, resource="orders", store=store, on_error=letters, partitions=2,
                    start="oldest",
                )  # fmt: skip
                root["shop"]["orders"].insert_many([{"_id": 1}, {"_id": 2}])
                listener.run()
                assert sorted(set(seen)) == [1, 2]
                assert root["tailrace"]["deadLetters"].count_documents({}) == 1
        for words in (
            ("leases", "list", uri),
            ("leases", "pause", "orders", uri),
            ("leases", "resume", "orders", uri),
            ("dead-letters", "list", uri),
            ("dead-letters", "replay", "shop_orders:handle", uri, "--all"),
            ("leases", "delete", "orders", uri),
        ):
            assert main(list(words)) == 0, (words, capsys.readouterr().err)


def test_without_its_own_part_the_role_does_not_suffice(tmp_path: Path) -> None:
    """Without this, the test above would show nothing."""
    with mongod_with_users(tmp_path) as mongod:
        with MongoClient[dict[str, Any]](uri_of(mongod, ROOT, PASSWORD)) as root:
            root.admin.command(printed_roles()["tailrace"])
            add_user(mongod, "reader", "r", ["tailrace"])
        with tailrace.connect(uri_of(mongod, "reader", "r")) as client:
            store = MongoLeaseStore(client["tailrace"]["leases"])
            with pytest.raises(tailrace.errors.TailraceError, match="not authorized"):
                Listener(client["shop"]["orders"], print, resource="orders", store=store).run()
