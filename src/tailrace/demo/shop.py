"""A shop at work: customers, orders and stock in database ``shop``, changed in every way that makes a change event.

Runs as a process of its own (``tailrace.demo.child``) with the URI in ``$TAILRACE_DEMO_URI``, fills
the shelves, waits for a line on standard input, works, and prints what it did as one JSON object when it ends (after
``--seconds``, or on SIGTERM).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pymongo
from bson.decimal128 import Decimal128
from pymongo.client_session import ClientSession
from pymongo.database import Database

DATABASE = "shop"
URI_VARIABLE = "TAILRACE_DEMO_URI"
_PRODUCTS = 200
_FIRST_CUSTOMERS = 100
_NAMES = ("Ada", "Björn", "Chidi", "Dolores", "Emre", "Fatima", "Grace", "Hedy", "Ines", "Jun", "Kofi", "Lise")
_TOWNS = ("Lagos", "Malmö", "Osaka", "Porto", "Quito", "Riga", "Sfax", "Turku", "Utrecht", "València", "Wuhan")

ShopDocument = dict[str, Any]


class Shop:
    """The shop's day. Every step is one operation that a shop would do; the same ``seed`` gives the same steps."""

    def __init__(self, database: Database[ShopDocument], seed: int) -> None:
        self._db = database
        self._random = random.Random(seed)
        self._customers: list[int] = []
        self._orders: list[int] = []
        self._next_order = 1
        self.done: Counter[str] = Counter()
        self._steps: list[tuple[int, Callable[[], None]]] = [
            (8, self.new_customer),
            (30, self.place_order),
            (22, self.advance_order),
            (10, self.remember_visit),
            (8, self.count_loyalty),
            (6, self.move_house),
            (6, self.restock),
            (6, self.cancel_order),
            (4, self.stocktaking),
        ]

    def open(self) -> None:
        """Fill the shelves and bring the first customers, so that every later step finds something to change."""
        self._db.stock.insert_many(
            [
                {"_id": f"sku-{n:04d}", "price": Decimal128(f"{n % 90 + 1}.{n % 100:02d}"), "left": 1_000, "sold": 0}
                for n in range(_PRODUCTS)
            ]
        )
        for _ in range(_FIRST_CUSTOMERS):
            self.new_customer()
        for _ in range(20):
            self.place_order()

    def step(self) -> None:
        """One operation, chosen at random."""
        weights = [weight for weight, _ in self._steps]
        _, chosen = self._random.choices(self._steps, weights)[0]
        chosen()

    def new_customer(self) -> None:
        number = len(self._customers) + 1
        self._db.customers.insert_one(
            {
                "_id": number,
                "name": self._random.choice(_NAMES),
                "address": {"town": self._random.choice(_TOWNS), "zip": f"{self._random.randrange(100_000):05d}"},
                "since": datetime.now(UTC),
                "visits": 0,
                "points": 0.0,
                "tags": [],
            }
        )
        self._customers.append(number)
        self.done["customers joined"] += 1

    def place_order(self) -> None:
        """A transaction: the order is inserted, and each of its products is taken from the shelf."""
        order = self._next_order
        self._next_order += 1
        lines: list[ShopDocument] = [
            {"sku": f"sku-{self._random.randrange(_PRODUCTS):04d}", "n": self._random.randint(1, 3)}
            for _ in range(self._random.randint(1, 4))
        ]
        document = {
            "_id": order,
            "customer": self._random.choice(self._customers),
            "lines": lines,
            "status": "new",
            "placed": datetime.now(UTC),
            "note": "x" * self._random.randrange(120),
        }

        def write(session: ClientSession) -> None:
            self._db.orders.insert_one(document, session=session)
            for line in lines:
                self._db.stock.update_one(
                    {"_id": line["sku"]}, {"$inc": {"left": -line["n"], "sold": line["n"]}}, session=session
                )

        with self._db.client.start_session() as session:
            session.with_transaction(write)
        self._orders.append(order)
        self.done["orders placed (transactions)"] += 1

    def advance_order(self) -> None:
        if not self._orders:
            return
        status = self._random.choice(("paid", "packed", "sent"))
        self._db.orders.update_one(
            {"_id": self._random.choice(self._orders)},
            {
                "$set": {"status": status, f"at.{status}": datetime.now(UTC)},
                "$unset": {"note": ""},
                "$push": {"log": f"{status} by desk {self._random.randrange(9)}"},
            },
        )
        self.done["orders advanced"] += 1

    def remember_visit(self) -> None:
        tag = f"likes-{self._random.randrange(30)}"
        self._db.customers.update_one(
            {"_id": self._random.choice(self._customers)},
            {"$inc": {"visits": 1}, "$addToSet": {"tags": tag}, "$currentDate": {"seen": True}},
        )
        self.done["visits"] += 1

    def count_loyalty(self) -> None:
        """A pipeline update: the server computes the new values and logs the difference."""
        self._db.customers.update_one(
            {"_id": self._random.choice(self._customers)},
            [
                {"$set": {"points": {"$round": [{"$add": [{"$multiply": ["$points", 1.01]}, 1.5]}, 2]}}},
                {
                    "$set": {
                        "level": {"$cond": [{"$gt": ["$points", 20]}, "gold", "blue"]},
                        "tags": {"$slice": ["$tags", 5]},
                    }
                },
            ],
        )
        self.done["loyalty counted (pipeline updates)"] += 1

    def move_house(self) -> None:
        number = self._random.choice(self._customers)
        self._db.customers.replace_one(
            {"_id": number},
            {
                "name": self._random.choice(_NAMES),
                "address": {"town": self._random.choice(_TOWNS), "street": f"{self._random.randrange(99)} Mill Lane"},
                "visits": 0,
                "points": float(self._random.randrange(10)),
                "tags": ["moved"],
            },
        )
        self.done["customers replaced"] += 1

    def restock(self) -> None:
        first = self._random.randrange(_PRODUCTS)
        skus = [f"sku-{(first + n) % _PRODUCTS:04d}" for n in range(5)]
        self._db.stock.update_many({"_id": {"$in": skus}}, {"$inc": {"left": 50}, "$max": {"most": 50}})
        self.done["shelves restocked"] += 1

    def cancel_order(self) -> None:
        if not self._orders:
            return
        order = self._orders.pop(self._random.randrange(len(self._orders)))
        self._db.orders.delete_one({"_id": order})
        self.done["orders deleted"] += 1

    def stocktaking(self) -> None:
        """An update of an array's elements, and one that removes fields: deltas of several kinds in one entry."""
        self._db.stock.update_one(
            {"_id": f"sku-{self._random.randrange(_PRODUCTS):04d}"},
            {"$push": {"counts": {"$each": [self._random.randrange(1000)], "$slice": -4}}, "$set": {"checked": True}},
        )
        self.done["stock counted"] += 1


def work(shop: Shop, *, seconds: float | None, rate: float, stopped: Callable[[], bool]) -> float:
    """Do ``rate`` steps a second (or as many as the server takes) for ``seconds`` (``None``: until ``stopped``).
    Returns the seconds it took."""
    began = time.monotonic()
    steps = 0
    while not stopped():
        passed = time.monotonic() - began
        if seconds is not None and passed >= seconds:
            break
        if steps >= passed * rate:
            time.sleep(min(0.02, (steps + 1) / rate - passed))
            continue
        shop.step()
        steps += 1
    return time.monotonic() - began


def main(arguments: Sequence[str]) -> int:
    """The shop's process: open, work, tell."""
    parser = argparse.ArgumentParser(description="Make a shop's changes in MongoDB.")
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--rate", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with pymongo.MongoClient[ShopDocument](os.environ[URI_VARIABLE]) as client:
        shop = Shop(client[DATABASE], args.seed)
        shop.open()
        print(json.dumps({"open": True}), flush=True)
        sys.stdin.readline()  # the process that started us says that the pipeline is ready
        seconds = work(shop, seconds=args.seconds, rate=args.rate, stopped=lambda: bool(asked))
    print(json.dumps({"seconds": round(seconds, 3), "operations": dict(shop.done)}), flush=True)
    return 0
