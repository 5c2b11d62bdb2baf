"""A report of faults that were planted into our stream, as the tool writes it: an example among ``reports``.

python -m tests.compare.planted_report tests/compare/reports/planted-6.0.27.json --version 6.0.27
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bson
import pymongo
from bson.codec_options import CodecOptions

from tailrace.compare import ComparisonLimits
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tests.compare import live
from tests.compare.planted import altered

_DATABASE = "planted"


def _write(client: pymongo.MongoClient[Any], *, images: bool) -> None:
    shop = client[_DATABASE]
    shop.create_collection("orders", **({"changeStreamPreAndPostImages": {"enabled": True}} if images else {}))
    shop.orders.insert_many([{"_id": number, "text": "ä", "list": [1, {"n": 2.5}]} for number in range(3)])
    shop.orders.update_one({"_id": 0}, {"$set": {"list.1.n": 7, "new": None}, "$unset": {"text": 1}})
    shop.orders.update_one({"_id": 0}, [{"$set": {"list": {"$slice": ["$list", 1]}}}])
    with client.start_session() as session, session.start_transaction():
        shop.orders.insert_one({"_id": "in a transaction"}, session=session)
        shop.orders.replace_one({"_id": 1}, {"n": 1}, session=session)
    shop.orders.create_index([("n", 1)], name="by n")
    shop.orders.delete_one({"_id": 2})
    shop.orders.rename("archive")
    shop.archive.drop()
    client.drop_database(_DATABASE)


def planted_report(uri: str, path: Path, *, expanded: bool) -> None:
    """Write to the server, alter each kind of event of ours at its end, and write the report."""

    def alter(raw: bytes) -> Iterator[bytes]:
        event = bson.decode(raw, CodecOptions(document_class=dict))
        yield bson.encode({**event, f"planted{event['operationType']}": 1})

    with pymongo.MongoClient[Any](uri) as client:
        since = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"]).tick()
        _write(client, images=expanded)
    said = {"show_expanded_events": True, "full_document": "whenAvailable"} if expanded else {}
    with live.deployment(uri, _DATABASE, since=since, **said) as (found, run):
        run(
            ComparisonLimits(duration_s=0.0, resume_every_s=None),
            ours=lambda opener: altered(opener, alter),
        )
        found.write_report(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write it, from a server of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.compare.planted_report")
    parser.add_argument("path", type=Path)
    parser.add_argument("--version", default="6.0.27")
    args = parser.parse_args(arguments)
    with ReplicaSet(version=args.version) as running:
        planted_report(running.uri, args.path, expanded=not args.version.startswith(("4.", "5.")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
