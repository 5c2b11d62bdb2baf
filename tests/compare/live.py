"""What the tests of comparisons on live servers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pymongo

from tailrace.compare import ComparisonLimits, DeploymentComparison, Streams
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.watch.client import operation_time
from tailrace.watch.compare.comparison import Compared, StreamComparison
from tailrace.watch.compare.evidence import Evidence
from tailrace.watch.compare.reading import Opener

Altered = Callable[[Opener], Opener]


def write_one_of_each(uri: str, database: str) -> None:
    """An event of each kind in a database of its own, which is dropped in the end."""
    with pymongo.MongoClient[Any](uri) as client:
        shop = client[database]
        shop.create_collection("c")
        shop.c.insert_one({"_id": 1, "n": 1})
        shop.c.update_one({"_id": 1}, {"$set": {"n": 2}})
        shop.c.replace_one({"_id": 1}, {"n": 3})
        shop.c.delete_one({"_id": 1})
        shop.c.rename("d")
        shop.create_collection("e")
        shop.e.drop()
        client.drop_database(database)


@contextmanager
def deployment(uri: str, namespace: str | None, *, since: ClusterTime | None = None, **said: Any) -> Iterator[Any]:
    """A comparison on a deployment, and a function that runs it from ``since`` on with one side altered."""
    with DeploymentComparison(uri, namespace, Streams(**said)) as found:

        def run(limits: ComparisonLimits, *, server: Altered | None = None, ours: Altered | None = None) -> Compared:
            starts = iter([] if since is None else [since])
            comparison = StreamComparison(
                (server or _same)(found.opener_of_server()),
                (ours or _same)(found.opener_of_ours()),
                lambda: next(starts, None) or operation_time(found._ours),
                limits,
                evidence=Evidence(found._ours, images=found.streams.has_images),
                looks_up=found.streams.full_document == "updateLookup",
                has_stages=bool(found.streams.pipeline),
                has_one_oplog=not found.is_cluster,
                seed=7,
            )
            found._comparison, found.compared = comparison, comparison.compared
            return comparison.run()

        yield found, run


def _same(opener: Opener) -> Opener:
    return opener
