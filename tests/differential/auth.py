"""A replica set of one member that asks for users."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.embedded import Mongod
from tailrace.embedded.binary import find_mongod

ROOT, PASSWORD = "root", "r00t-s3cret"


@contextmanager
def mongod_with_users(folder: Path, version: str | None = None) -> Iterator[Mongod]:
    """The running server; the user ``root`` may do everything."""
    key = folder / "key"
    key.write_text("a key that members share " * 4)
    key.chmod(0o600)
    with Mongod(
        replica_set="guarded", arguments=("--auth", "--keyFile", str(key)), binary=find_mongod(version)
    ) as mongod:
        with MongoClient[dict[str, Any]](mongod.uri) as client:
            # As long as there is no user, a connection from this machine may do this, and nothing else.
            client.admin.command("replSetInitiate", {"_id": "guarded", "members": [{"_id": 0, "host": mongod.host}]})
            deadline = time.monotonic() + 300
            while True:
                with suppress(PyMongoError):
                    client.admin.command("createUser", ROOT, pwd=PASSWORD, roles=["root"])
                    break
                assert time.monotonic() < deadline, "the member did not become primary"
                time.sleep(0.1)
        yield mongod


def uri_of(mongod: Mongod, user: str, password: str, **options: str) -> str:
    query = "".join(f"&{name}={value}" for name, value in options.items())
    return f"mongodb://{user}:{password}@{mongod.host}/?authSource=admin{query}"


def add_user(mongod: Mongod, user: str, password: str, roles: list[Any]) -> None:
    with MongoClient[dict[str, Any]](uri_of(mongod, ROOT, PASSWORD)) as client:
        client.admin.command("createUser", user, pwd=password, roles=roles)
