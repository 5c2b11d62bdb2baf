"""``bench/catch_up.py --place``: the stream into a lake on a local disk, and into one in an object store, in one run.

Each side runs in a process of its own, in turns. Then the store's side runs twice more through a proxy that counts the
requests: in one micro-batch, and in several (of ``--max-bytes``, by default 16m). The difference is what a further
micro-batch asks for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as pq
from bench.places import KINDS, Requests, store_of

from catch_up import ROWS, WHOLE, child, digest, fill
from tailrace.embedded import ReplicaSet
from tests.tables.object_server import ObjectServer


def compare(args: argparse.Namespace) -> int:
    """Print the table; gives the exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name,
        ReplicaSet(1, oplog_size_mb=4096, cache_gb=1.0) as members,
        ExitStack() as stack,
    ):
        folder = Path(name)
        several = "16m" if args.max_bytes == WHOLE else args.max_bytes
        args.max_bytes = WHOLE
        since = fill([members.uri], args)
        place = (members.uri, since, members.uri)
        stores = {kind: stack.enter_context(store_of(kind, folder / kind)) for kind in args.place if kind != "disk"}
        results: dict[str, list[dict[str, float]]] = {kind: [] for kind in args.place}
        digests = set()
        for number in range(args.rounds):
            for kind, runs in results.items():
                out = folder / f"{kind}-{number}"
                runs.append(_run(kind, stores.get(kind), out, place, args))
                digests.add(digest(out / "first") if kind == "disk" else _digest(stores[kind], out))
        _print(results, args)
        for kind, store in stores.items():
            _count(kind, store, folder, place, argparse.Namespace(**vars(args) | {"max_bytes": several}))
    print(f"the same bytes in every run: {'yes' if len(digests) == 1 else 'NO'}")
    return int(len(digests) != 1)


def _run(  # noqa: PLR0917  as ``child``
    kind: str,
    store: ObjectServer | None,
    out: Path,
    place: tuple[str, ...],
    args: argparse.Namespace,
    address: str | None = None,
) -> dict[str, float]:
    """One process. ``address``: the way to the store."""
    before = dict(os.environ)
    if store is not None:
        os.environ.update(store.environment(address))
    try:
        lake = None if store is None else store.uri(out.name)
        return child("spark", out, args.documents[0], place, args, lake=lake, label=kind)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _digest(store: ObjectServer, out: Path) -> str:
    """As ``digest``, of what is in a store."""
    root, result = store.place(f"{out.name}/first", out / "reading"), hashlib.sha256()
    for one in sorted(root.objects(), key=lambda one: one.name):
        if one.name.startswith("day="):
            with (root / one.name).open() as file:
                for value in pq.read_table(file, columns=["event"]).column("event"):
                    result.update(value.as_buffer())
    return result.hexdigest()


def _print(results: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    medians = {
        kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for kind, runs in results.items()
    }
    print(
        f"{args.entries:,} oplog entries into a lake, {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}), "
        f"medians of {args.rounds}"
    )
    print(f"{'events/s':30}" + "".join(f"{kind:>10}" for kind in medians) + f"{'ratio':>8}")
    first, *_, last = medians
    for name, words in ROWS:
        rates = {kind: args.entries / found[name] for kind, found in medians.items()}
        print(
            f"{words:30}" + "".join(f"{rate:10,.0f}" for rate in rates.values()) + f"{rates[last] / rates[first]:8.2f}"
        )
    cpu = {kind: found["cpu"] / args.entries * 1e6 for kind, found in medians.items()}
    print(f"{'CPU us an event, with mongod':30}" + "".join(f"{one:10.1f}" for one in cpu.values()), end="")
    print(f"{cpu[last] / cpu[first]:8.2f}", flush=True)


def _count(kind: str, store: ObjectServer, folder: Path, place: tuple[str, ...], args: argparse.Namespace) -> None:
    """Requests of a whole run, and of one more micro-batch in it."""
    found: list[tuple[int, Counter[str], int]] = []
    for number, max_bytes in enumerate((WHOLE, args.max_bytes)):
        once = argparse.Namespace(**vars(args) | {"again": 0, "max_bytes": max_bytes})
        with Requests(store) as requests:
            took = _run(kind, store, folder / f"{kind}-counted-{number}", place, once, requests.address)
            found.append((int(took["commits"]), *requests.since()))
    for commits, asked, sent in found:
        print(f"{kind}, a run of {commits} micro-batches: {_named(asked)}; {sent / 1e6:.1f} MB")
    (few, at_first, _), (many, at_last, _) = found
    if many > few:
        more = {name: (at_last[name] - at_first[name]) / (many - few) for name in KINDS}
        print(f"{kind}, one micro-batch more: {_named(more)}", flush=True)


def _named(asked: Counter[str] | dict[str, float]) -> str:
    return ", ".join(f"{asked[name]:.4g} {name}" for name in KINDS if asked[name])
