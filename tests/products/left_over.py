"""What a seed leaves in a deployment. The next seed of a run must begin with nothing there: copies of the whole
deployment would copy it, or be refused because of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pymongo import MongoClient

from tailrace.embedded import ReplicaSet, ShardedCluster

_OF_THE_SERVER: Final = frozenset({"admin", "config", "local"})
_ROOT: Final = "root"


class LeftOver(Exception):  # noqa: N818 - it says what happened
    """Something of an earlier seed is there."""


def require_nothing_left(deployment: ReplicaSet | ShardedCluster) -> None:
    """Raise LeftOver where the deployment has databases or users that the harness has made."""
    if left := left_in(deployment):
        raise LeftOver(f"an earlier seed has left {', '.join(left)}")


def left_in(deployment: ReplicaSet | ShardedCluster) -> list[str]:
    """The names of such databases and users; on a cluster, of each server."""
    if isinstance(deployment, ReplicaSet):
        return _left_at(deployment.uri)
    uris = [deployment.config.uri, *(shard.uri for shard in deployment.shards.values())]
    return sorted({name for uri in uris for name in _left_at(uri)})


def _left_at(uri: str) -> list[str]:
    with MongoClient[Any](uri) as client:
        databases = set(client.list_database_names()) - _OF_THE_SERVER
        users = {one["user"] for one in client.admin.command("usersInfo")["users"]} - {_ROOT}
    return sorted(databases) + sorted(f"the user {name}" for name in users)


@contextmanager
def leaving_nothing(writes: Any) -> Iterator[None]:
    """At the end, drop what was written and close the connections."""
    try:
        yield
        writes.clear()
    finally:
        writes.close()
