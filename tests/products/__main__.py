"""Everything that is built on the stream, compared with the server while a seeded hand harms it: equal or refused,
never wrong.

    python -m tests.products --seed 7                                one seed; the same again plays it again
    python -m tests.products --seeds 1-20 --version 5.0.4            many
    python -m tests.products --seed 7 --products tables,archive --operations 600 --faults 30
    python -m tests.products --seed 7 --members 3                    on three members, whatever the seed says
    python -m tests.products --seed 7 --sharded                      on a cluster
    python -m tests.products --seed 7 --planted "tables follow another history"

Of three seeds one is played on a replica set of one member, which is put back from copies; one on three members, with
step-downs and rollbacks; one on a cluster, whose chunks, primaries and shards move.

The workload of a seed is always the same; how the processes interleave depends on the machine. Exit code 1 if something
is wrong. Each difference is reported once; the last line gives the totals.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.products.broker import broker_for
from tests.products.cluster_writes import ClusterWrites
from tests.products.deployments import CLUSTER, SINGLE, THREE, Deployments, cluster_of
from tests.products.hand import Elsewhere
from tests.products.left_over import leaving_nothing, require_nothing_left
from tests.products.planted import PLANTED, planted_here
from tests.products.play import ROUNDS, Play, Report, said
from tests.products.product import Product
from tests.products.products import PRODUCTS
from tests.products.stores import store_for, without_store
from tests.products.truth import Truth
from tests.products.writes import ReplicaSetWrites, ServerFailed
from tests.seeds import end_in_order, parser_of_seeds

VERSION = "6.0.27"
_OTHER_SEED = 100_000


@dataclass(frozen=True)
class Chosen:
    """What is played: a seed, the products beside its workload, and what the hand does."""

    seed: int
    products: Sequence[Product]
    operations: int = 300
    faults: int = 12
    planted: str = ""
    kinds: frozenset[str] = frozenset()
    rounds: int = ROUNDS

    def play(self, writes: Any, folder: Path, report: Report, *, left_out: Container[str] = (), **further: Any) -> None:
        """Play it over writes to a deployment, without the products that cannot follow such writes."""
        products = [one for one in self.products if one.name not in left_out]
        names = ("seed", "operations", "faults", "planted", "kinds", "rounds")
        Play(writes, products, folder, report, **{name: getattr(self, name) for name in names}, **further)()


def elsewhere_of(writes: Any, folder: Path, operations: int) -> Elsewhere:
    """Another deployment with the same names and other documents, and the truth about it."""
    writes.run(operations)
    writes.pause(Truth(folder))
    return Elsewhere(writes.deployment.uri, folder, writes)


def run_seed(deployment: ReplicaSet, other: ReplicaSet | None, folder: Path, report: Report, chosen: Chosen) -> None:
    """Play one seed on a deployment, with another one of the same name to point at."""
    seed, operations = chosen.seed, chosen.operations
    require_nothing_left(deployment)
    with ExitStack() as stack:
        there = None
        if other is not None:
            require_nothing_left(other)
            elsewhere = ReplicaSetWrites(other, seed, operations, unique_names=True, salt=_OTHER_SEED)
            stack.enter_context(leaving_nothing(elsewhere))
            there = elsewhere_of(elsewhere, folder / "elsewhere", operations // 3)
        unique_names = seed % 4 != 0
        writes = ReplicaSetWrites(deployment, seed, operations, unique_names=unique_names)
        stack.enter_context(leaving_nothing(writes))
        try:
            # Exact images cannot tell what an update does to a field whose name a document has twice.
            chosen.play(writes, folder, report, left_out=() if unique_names else ("images",), elsewhere=there)
        except ServerFailed as error:
            report.given_up.append(f"seed {seed}: {error}")
            said(f"seed {seed}: given up: {error}")


def run_sharded(version: str, other: ShardedCluster | None, folder: Path, report: Report, chosen: Chosen) -> None:
    """Play one seed on a cluster of its own, with another one to point at."""
    with ExitStack() as stack:
        there = None
        if other is not None:
            require_nothing_left(other)
            elsewhere = ClusterWrites(other, chosen.seed, chosen.rounds, salt=_OTHER_SEED)
            stack.enter_context(leaving_nothing(elsewhere))
            there = elsewhere_of(elsewhere, folder / "elsewhere", chosen.operations // chosen.rounds)
        leases = "" if other is None else next(iter(other.shards.values())).uri
        cluster = stack.enter_context(cluster_of(version))
        writes = ClusterWrites(cluster, chosen.seed, chosen.rounds, leases=leases)
        stack.callback(writes.drop_leases)
        unable = {one.name for one in chosen.products if not one.on_clusters or (one.has_leases and not leases)}
        chosen.play(writes, folder, report, left_out=unable, elsewhere=there)


def main(arguments: list[str] | None = None) -> int:
    options = _arguments(arguments)
    end_in_order()
    report = Report()
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-products-"))
        stack.enter_context(store_for(options.products, Path(root), of_all_kinds=True))
        stack.enter_context(broker_for(options.products, Path(root)))
        deployments = stack.enter_context(closing(Deployments(options.version, options.kind)))
        for seed in options.seeds:
            begun = time.monotonic()
            folder = Path(root, str(seed))
            folder.mkdir()
            products = [PRODUCTS[name] for name in options.products]
            kinds = frozenset(options.kinds.split(",")) if options.kinds else frozenset[str]()
            chosen = Chosen(seed, products, options.operations, options.faults, options.planted, kinds)
            with planted_here(options.planted) if options.planted else nullcontext():
                kind = play_on(deployments, folder, report, chosen)
            print(f"seed {seed}, {kind}: {time.monotonic() - begun:.0f} s; so far {report}", flush=True)
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
    tell(report, options.version)
    return 1 if report.differences else 0


def play_on(deployments: Deployments, folder: Path, report: Report, chosen: Chosen) -> str:
    """Play a seed on its kind of deployment, and return that kind."""
    kind = deployments.kind(chosen.seed)
    here, other = deployments.of(kind)
    if isinstance(other, ShardedCluster):
        run_sharded(deployments.version, other, folder, report, chosen)
    else:
        assert here is not None
        run_seed(here, other, folder, report, chosen)
    return kind


def tell(report: Report, version: str) -> None:
    """Each refusal and each difference once."""
    for text, count in report.refusals.most_common():
        print(f"refused {count} times: {text}")
    for key, text in report.differences.items():
        print(f"DIFFERENCE, met {report.met[key]} times: {text}")
    for text in report.given_up:
        print(f"given up: {text}")
    print(f"{version}: {report}")
    print(report.total, flush=True)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of_seeds("tests.products", __doc__)
    parser.add_argument("--version", default=VERSION, help=f"of the server ({VERSION})")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sharded", dest="kind", action="store_const", const=CLUSTER, default="", help="on a cluster")
    kind.add_argument(
        "--members", dest="kind", type=_members, help="1 or 3, of a replica set; by default the seed says on what"
    )
    parser.add_argument("--products", type=_names, default=without_store([*PRODUCTS]), help=f"of {', '.join(PRODUCTS)}")
    parser.add_argument("--operations", type=int, default=300, help="of the workload (300)")
    parser.add_argument("--faults", type=int, default=12, help="that the hand does (12)")
    parser.add_argument("--planted", default="", choices=["", *PLANTED], help="a fault to be put back")
    parser.add_argument(
        "--kinds",
        default="",
        help="of faults, with commas between them: only these. older part:lake and bit:*/data.mdb say of what",
    )
    parser.add_argument("--keep", action="store_true", help="leave the folders of a seed until the end")
    return parser.parse_args(arguments)


def _members(text: str) -> str:
    if text not in ("1", "3"):
        raise argparse.ArgumentTypeError(f"{text} is neither 1 nor 3")
    return SINGLE if text == "1" else THREE


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PRODUCTS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PRODUCTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
