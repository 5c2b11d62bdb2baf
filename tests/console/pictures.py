"""Make the pictures of ``docs/how-to/console.md`` anew: a shop that is written to, and its console in a real Chromium.

    make pictures
    python -m tests.console.pictures --seconds 20 --into /tmp     sooner, and somewhere else

Look at them before you commit them: no test compares pixels.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pymongo

import tailrace
from tailrace.cli.panels.sources import Targets
from tailrace.consumer import Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.embedded import ReplicaSet
from tailrace.read.source.uri import hide
from tests.console.chromium import PROGRAM, Page, opened_page
from tests.console.serving import served
from tests.gateway.running import GatewayProcess

IMAGES: Final = Path(__file__).parents[2] / "docs" / "how-to" / "images"
#: Long enough for a chart that shows something.
_SECONDS: Final = 180.0
_PAUSE_S: Final = 0.06
_STATES: Final = ("new", "packed", "paid", "shipped")
_PEOPLE: Final = (("Ada Lovelace", "London"), ("Alan Turing", "Zürich"), ("Grace Hopper", "New York"))
_STREAMS: Final = 5
_COLLECTIONS: Final = ("orders", "customers", "levels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="how long the shop is written to before")
    parser.add_argument("--into", type=Path, default=IMAGES, metavar="DIR")
    args = parser.parse_args()
    if PROGRAM is None:
        parser.error("there is no Chromium on this machine")
    with ExitStack() as on:
        replica_set = on.enter_context(ReplicaSet(1))
        client = on.enter_context(tailrace.connect(replica_set.uri))
        for name in _COLLECTIONS:
            client.shop.create_collection(name, changeStreamPreAndPostImages={"enabled": True})
        log = Path(on.enter_context(tempfile.TemporaryDirectory())) / "gateway.log"
        gateway = on.enter_context(GatewayProcess(replica_set.uri, log))
        on.enter_context(followed(gateway.uri))
        console = on.enter_context(served(replica_set.uri, Targets(gateway=hide(gateway.uri))))
        page = on.enter_context(opened_page())
        console.wait_until_it_follows()
        on.enter_context(working(client))
        take(page, console.url, args.seconds, args.into)
    return 0


@contextmanager
def followed(uri: str) -> Iterator[None]:
    """Programs that wait at the gateway for changes."""
    with ExitStack() as on:
        client = on.enter_context(pymongo.MongoClient[dict[str, Any]](uri))
        for number in range(_STREAMS):
            collection = client.shop[_COLLECTIONS[number % len(_COLLECTIONS)]]
            on.enter_context(collection.watch(max_await_time_ms=1000))
        yield


@contextmanager
def working(client: Any) -> Iterator[None]:
    """Applications write to the shop, and listeners follow. One of them gives up an order now and then."""
    store = MongoLeaseStore(client.tailrace.leases)
    letters = DeadLetters(client.tailrace.deadLetters, tries=1)

    def handle(change: Any) -> None:
        if change.operation_type == "insert" and change.document_key["_id"] % 250 == 0:
            raise ValueError("no invoice for this order")

    listeners = [
        Listener(client.shop.orders, handle, resource="invoices", store=store, on_error=letters),
        Listener(client.shop.customers, lambda change: None, resource="welcome", store=store),
        Listener(client.shop.orders, lambda change: None, resource="stock", store=store, partitions=4),
    ]
    over = threading.Event()
    writer = threading.Thread(target=_write, args=(client.shop, over))
    with ExitStack() as on:
        for listener in listeners:
            on.enter_context(listener)
        writer.start()
        try:
            yield
        finally:
            over.set()
            writer.join()


def _write(shop: Any, over: threading.Event) -> None:
    chosen = random.Random(1)
    for number in range(1, 1 << 31):
        name, city = chosen.choice(_PEOPLE)
        order = {"_id": number, "customer": {"name": name, "city": city}, "items": [{"sku": "A-654", "count": 3}]}
        shop.orders.insert_one({**order, "status": "new", "total": round(chosen.uniform(5, 200), 2)})
        paid = {"status": chosen.choice(_STATES), "total": round(chosen.uniform(5, 200), 2)}
        shop.orders.update_one({"_id": chosen.randint(1, number)}, {"$set": paid})
        shop.customers.update_one({"_id": chosen.randint(1, 50)}, {"$inc": {"orders": 1}}, upsert=True)
        if number % 10 == 0:
            shop.orders.delete_one({"_id": chosen.randint(1, number)})
            shop.levels.update_one({"_id": "A-654"}, {"$inc": {"left": -3}}, upsert=True)
        if over.wait(_PAUSE_S):
            return


def take(page: Page, url: str, seconds: float, into: Path) -> None:
    """The overview in the light theme, and the live tail in the dark one, with one change opened."""
    page.size(1240, 800)
    page.open(url)
    page.wait("document.getElementById('connection').textContent === 'live'")
    time.sleep(seconds)
    page.wait("document.querySelector('svg.chart') !== null")
    page.screenshot(into / "console-overview.png")
    page.size(1240, 720, dark=True)
    page.ask("location.hash = 'tail'")
    page.ask("document.getElementById('filter').value = 'update shop.orders'")
    page.ask("document.getElementById('filter').dispatchEvent(new Event('input'))")
    page.wait("document.querySelectorAll('details.row').length > 6")
    page.ask("document.getElementById('pause').click()")
    page.ask("document.querySelectorAll('details.row')[1].querySelector('summary').click()")
    page.wait("document.querySelector('details.row .diff') !== null")
    page.screenshot(into / "console-tail.png")


if __name__ == "__main__":
    raise SystemExit(main())
