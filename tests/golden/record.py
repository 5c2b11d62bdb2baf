"""Record the golden workloads anew from a live server of any version.

    python -m tests.golden.record --version 6.0.27                       every workload, into tests/golden/data
    python -m tests.golden.record --version 5.0.4 --into DIR sessions

Each workload runs on a fresh replica set, so that a recording's oplog holds it alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tests.differential.execute import note
from tests.differential.native import NativeStream, aggregate, read
from tests.differential.wire import Wire
from tests.golden import recording
from tests.golden.crafted import record_crafted
from tests.golden.workloads import Runner, StreamPlan, identifiers, updates
from tests.golden.workloads_definitions import definitions, invalidations, namespaces
from tests.golden.workloads_sessions import cursors, images, large_events, sessions

WORKLOADS: dict[str, Callable[[Runner], list[StreamPlan]]] = {
    function.__name__: function
    for function in (
        identifiers,
        updates,
        definitions,
        namespaces,
        invalidations,
        sessions,
        images,
        cursors,
        large_events,
    )
}
CRAFTED = {"crafted_entries": False, "broken_entries": True}
PARAMETERS = {"maxNumberOfTransactionOperationsInSingleOplogEntry": 2, "ttlMonitorEnabled": False}


def record(version: str, workload: str) -> dict[str, Any] | None:
    """Run one workload on a new server of this version. Returns the recording, or None if the version supports none of
    it."""
    parts = tuple(int(part) for part in version.split("."))
    with (
        ReplicaSet(version=version, parameters=PARAMETERS, enable_test_commands=True) as deployment,
        Wire.to(deployment.uri) as wire,
    ):
        start = note(wire, "recording begins")
        plans = WORKLOADS[workload](Runner(wire, parts))
        if not plans:
            return None
        end = note(wire, "recording ends")
        streams, documents = _read_streams(wire, plans, start, end, version)
        after_start = {"$gt": start.to_timestamp()}
        pre_images = everything(wire, "config", "system.preimages", {"_id.ts": after_start})
        return {
            "server": version,
            "workload": workload,
            "note": (WORKLOADS[workload].__doc__ or "").strip(),
            "oplog": everything(wire, "local", "oplog.rs", {"ts": after_start}),
            "preImages": pre_images,
            "documents": documents,
            "streams": streams,
        }


def _read_streams(
    wire: Wire, plans: list[StreamPlan], start: ClusterTime, end: ClusterTime, version: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The packed streams, and what their update look-ups found."""
    streams, read_before = [], dict[str, NativeStream]()
    documents: dict[tuple[str, bytes], dict[str, Any]] = {}
    for plan in plans:
        stage = plan.stage(read_before) if callable(plan.stage) else {**plan.stage}
        if not callable(plan.stage):
            stage = {**stage, "startAtOperationTime": start.to_timestamp()}
        database, command = aggregate(plan.scope, stage, server=version, v2=plan.v2, pipeline=plan.pipeline)
        native = read(wire, database, command, end, batch_size=plan.batch_size)
        read_before[plan.name] = native
        if plan.batch_size is not None:
            command["cursor"] = {"batchSize": plan.batch_size}
        error = native.error_details
        streams.append(recording.pack_stream(plan.name, database, command, native.raw_replies, error))
        if stage.get("fullDocument") == "updateLookup":
            _look_up(wire, native, documents)
    return streams, list(documents.values())


def _look_up(wire: Wire, native: NativeStream, into: dict[tuple[str, bytes], dict[str, Any]]) -> None:
    """Read the documents that the stream's update events name, now that nothing is written any more."""
    for event in map(RawBSONDocument, native.events):
        if event["operationType"] != "update":
            continue
        database, collection = event["ns"]["db"], event["ns"]["coll"]
        key = event["documentKey"]
        found = everything(wire, database, collection, key)
        namespace = f"{database}.{collection}"
        into[namespace, key.raw] = {"ns": namespace, "documentKey": key, "document": found[0] if found else None}


def everything(wire: Wire, database: str, collection: str, query: Any) -> list[RawBSONDocument]:
    """All documents that the query finds, in their stored order."""
    cursor = wire.run(database, {"find": collection, "filter": query})["cursor"]
    found = list(cursor["firstBatch"])
    while cursor["id"] != 0:
        cursor = wire.run(database, {"getMore": Int64(cursor["id"]), "collection": collection})["cursor"]
        found.extend(cursor["nextBatch"])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description="Record the golden workloads.")
    parser.add_argument("--version", default="6.0.27", help="the server's version (6.0.27)")
    parser.add_argument("--into", type=Path, default=recording.DATA, help="the folder (tests/golden/data)")
    parser.add_argument("workload", nargs="*", choices=[[], *WORKLOADS, *CRAFTED], default=[], help="which (all)")
    options = parser.parse_args(arguments)
    options.into.mkdir(parents=True, exist_ok=True)
    for workload in options.workload or [*WORKLOADS, *CRAFTED]:
        if workload in CRAFTED:
            packed: dict[str, Any] | None = record_crafted(options.version, broken=CRAFTED[workload])
        else:
            packed = record(options.version, workload)
        if packed is None:
            print(f"{workload}: nothing on {options.version}")
            continue
        size = recording.save(f"{workload}_{options.version}", packed, into=options.into)
        events = sum(len(stream["events"]) for stream in packed["streams"])
        print(f"{workload}: {len(packed['streams'])} streams, {events} events, {size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
