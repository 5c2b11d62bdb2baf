"""SIGKILL, at random moments, everything that reads a deployment that is written to: nothing is lost or given twice.

    python -m tests.kills --seed 7 --kills 50                 all parts side by side, the kills divided among them
    python -m tests.kills --seed 7 --kills 10 --parts lake    some: archive, tables, images, snapshot, lake, sink, sync,
                                                              consumers
    python -m tests.kills --seed 7 --kills 0 --step-downs 5   of three members the primary steps down so often

The seed decides what is written and when each part is killed. Each kill is reported on standard error. Exit code 1 if a
part has lost something or has it twice; the last line gives the totals. The sync comes after the others, between two
deployments of its own, and is killed as often as all of them together, while the primaries of both ends step down as
often (``tests.kills.syncing``). Last come the consumers, for ``--consumers-seconds``, on three members of their own
that are harmed as well (``tests.kills.chaos``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.kills import chaos, syncing
from tests.kills.parts import PARTS, Part
from tests.kills.work import Work, prepare
from tests.seeds import end_in_order
from tests.spark.streams import newest

CONSUMERS = "consumers"
SYNC = "sync"


def run(
    deployment: ReplicaSet,
    folder: Path,
    *,
    seed: int,
    kills: int,
    parts: Sequence[type[Part]] = PARTS,
    step_downs: int = 0,
) -> tuple[int, bool]:
    """Kill the parts so often in all, let the primary step down so often, let each part come to its end, and compare.
    Returns how often something was killed, and whether all checks passed. Raises AssertionError if a part does not come
    to its end."""
    uri = deployment.uri
    with MongoClient[Any](uri) as client:
        prepare(client)
    start = newest(uri)
    work = Work(uri, seed, may_fail=step_downs > 0)
    living = [part(uri, folder, start) for part in parts]
    try:
        with work.running():
            shares = divided(kills, [part.weight for part in parts])
            pairs = zip(living, shares, strict=True)
            together([lambda one=one, share=share: one.live(seed, share) for one, share in pairs])  # type: ignore[misc]
            for _ in range(step_downs):
                together([one.get_on for one in living])
                deployment.step_down()
        until = work.finish()
        together([lambda one=one: one.finish(until) for one in living])  # type: ignore[misc]
    finally:
        for one in living:
            one.stop()
    holds = True
    print(f"{work.operations} operations")
    for one in living:
        one.uri = primary_first(uri)
        verdict = one.verdict(until)
        holds = holds and verdict.holds
        print(f"{one.name}: {dict(one.kills)} kills, {verdict.items} compared, {verdict.lost} lost, ", end="")
        print(f"{verdict.twice} twice", *verdict.wrong, sep="; ", flush=True)
    return sum(one.kills.total() for one in living), holds


def primary_first(uri: str) -> str:
    """The URI with the primary as its first host, which is asked for what the parts are compared with."""
    with MongoClient[Any](uri) as client:
        client.admin.command("ping")
        hosts = sorted(client.nodes, key=lambda node: node != client.primary)
        named = ",".join(f"{host}:{port}" for host, port in hosts)
        return f"mongodb://{named}/?replicaSet={client.topology_description.replica_set_name}"


def divided(kills: int, weights: Sequence[int]) -> list[int]:
    """Shares by weight that add up to ``kills``."""
    ends = [round(kills * sum(weights[: place + 1]) / sum(weights)) for place in range(len(weights))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def together(works: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own; the first failure is raised when all have ended."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=(__doc__ or "").split("\n")[0])
    names = {part.name: part for part in PARTS}
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--parts", help="with commas between them (default: all; before 5.0 all but images)")
    parser.add_argument("--step-downs", type=int, default=0)
    parser.add_argument("--consumers-seconds", type=float, default=600.0, help="how long they are harmed (600)")
    parser.add_argument("--version", default="6.0.27", help="of the server")
    options = parser.parse_args()
    end_in_order()
    # Exact images begin with a copy at one cluster time, which servers before 5.0 cannot give outside a transaction.
    possible = [name for name in names if name != "images" or int(options.version.split(".")[0]) >= 5]
    wanted = options.parts.split(",") if options.parts else [*possible, SYNC, CONSUMERS]
    chosen = [names[name] for name in wanted if name not in (SYNC, CONSUMERS)]
    holds = run_parts(chosen, options) if chosen else True
    if SYNC in wanted:
        with tempfile.TemporaryDirectory(prefix="tailrace-killed-syncs-") as folder:
            wanted_harm = syncing.Wanted(options.kills, options.step_downs)
            between = syncing.Between(options.version, members=3 if options.step_downs else 1)
            holds = syncing.run(options.seed, wanted_harm, between, Path(folder)) and holds
    if CONSUMERS in wanted:
        seconds = options.consumers_seconds
        least = {"changes_min": int(seconds), "hits_min": max(1, int(seconds / 120))}
        with tempfile.TemporaryDirectory(prefix="tailrace-chaos-") as folder:
            holds = chaos.run(options.seed, seconds, options.version, Path(folder), **least) and holds
    return 0 if holds else 1


def run_parts(chosen: Sequence[type[Part]], options: argparse.Namespace) -> bool:
    """Run everything but the consumers, on a deployment of its own. Returns whether all checks passed."""
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-kills-") as folder,
        ReplicaSet(3 if options.step_downs else 1, version=options.version, oplog_size_mb=2000) as deployment,
    ):
        given = {"seed": options.seed, "kills": options.kills, "step_downs": options.step_downs}
        kills, holds = run(deployment, Path(folder), parts=chosen, **given)
    happened = f"{kills} kills, {options.step_downs} step-downs"
    print(f"seed {options.seed}, {options.version}: {happened}, {'all' if holds else 'NOT all'} held, ", end="")
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return holds


if __name__ == "__main__":
    sys.exit(main())
