"""How long does the first start of a view take, beside a rebuild that writes the same targets?

    python bench/views.py [--targets 20000] [--rounds 3]

One mongod, 500 sources, an index on the target's field. Both sides write the fields of every target; they take turns,
``--rounds`` times. The first start is counted from the start of the keeper until no target lacks a field. Medians are
printed, and the median of the ratios of the rates of each round.

Bar: the first start at 0.8 of the rebuild's rate or more. Exit status 1 where it is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Final

import tailrace
from tailrace.consumer import MongoLeaseStore
from tailrace.consumer.views import View, ViewKeeper
from tailrace.embedded import ReplicaSet

BAR: Final = 0.8
SOURCES: Final = 500


def fill(database: Any, targets: int) -> None:
    database.orders.delete_many({})
    for first in range(0, targets, 1000):
        numbers = range(first, min(first + 1000, targets))
        database.orders.insert_many([{"_id": n, "customer_id": n % SOURCES, "pad": "x" * 200} for n in numbers])


def rebuild(keeper: ViewKeeper) -> float:
    begun = time.perf_counter()
    keeper.upkeep.rebuild()
    return time.perf_counter() - begun


def is_written(database: Any) -> bool:
    """Whether no target lacks a field. The last one is checked first: looking through all of them takes processor time
    from those who write them."""
    lacking = {"customer.name": {"$exists": False}}
    last = database.orders.find_one({}, {"customer.name": 1}, sort=[("_id", -1)])
    return "customer" in last and database.orders.find_one(lacking) is None


def first_start(database: Any, keeper: ViewKeeper) -> float:
    begun = time.perf_counter()
    with keeper:
        while not is_written(database):
            if keeper.join(0):
                raise AssertionError("the keeper has ended")
            time.sleep(0.05)
        return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    took: dict[str, list[float]] = {"rebuild": [], "first start": []}
    with ReplicaSet(1) as replica_set, tailrace.connect(replica_set.uri) as client:
        database = client["bench"]
        database.orders.create_index("customer_id")
        database.customers.insert_many([{"_id": n, "name": f"name {n}"} for n in range(SOURCES)])
        view = View(database.orders, database.customers, "customer_id", {"customer.name": "name"})
        for turn in range(args.rounds):
            keeper = ViewKeeper(client, view, store=MongoLeaseStore(database.leases), resource=f"round {turn}")
            fill(database, args.targets)
            took["rebuild"].append(rebuild(keeper))
            fill(database, args.targets)
            took["first start"].append(first_start(database, keeper))
    for side, seconds in took.items():
        print(f"{side:12}{args.targets / statistics.median(seconds):>10,.0f} targets/s")
    ratio = statistics.median(whole / first for whole, first in zip(*took.values(), strict=True))
    print(f"{'ratio':12}{ratio:>10.2f}  bar {BAR}" + ("" if ratio >= BAR else "  missed"))
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
