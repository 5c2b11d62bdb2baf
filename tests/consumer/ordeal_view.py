"""The view that processes of an ordeal keep beside their listeners, and what is written on both of its sides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from bson.decimal128 import Decimal128
from bson.int64 import Int64

from tailrace.cli.main import main
from tailrace.consumer.views import View, ViewUpkeep

VIEW: Final = View(
    "ordeal.carts", "ordeal.customers", "customer_id", {"buyer.name": "name", "buyer.tier": "account.tier"}
)
_CUSTOMERS: Final = ["ann", "bob", 3, 4, 5.5]
#: These, values of other types that the server takes for equal to some of them, and values that name no customer.
_NAMED: Final = [*_CUSTOMERS, Int64(3), 4.0, Decimal128("5.5"), "nobody", None]
_CARTS: Final = 40
#: Fields that are named like ours.
_OURS: Final = {"version": 1, "token": {"_data": "82"}, "_fence": {"ordeal": 1 << 60}, "position": 2, "fullDocument": 3}

#: Changes documents of a collection ("carts" or "customers"): the name, a query by _id, and an update, a replacement or
#: ``None`` for a deletion. What is updated or replaced is inserted where it is missing.
Act = Callable[[str, dict[str, Any], dict[str, Any] | None], Any]


def acting(act: Act) -> Callable[[random.Random], Any]:
    """One random write of a user on a side of the view."""

    def beside(chosen: random.Random) -> None:
        cart, customer = {"_id": chosen.randrange(_CARTS)}, {"_id": chosen.choice(_CUSTOMERS)}
        number = chosen.randrange(1000)
        match chosen.randrange(10):
            case 0 | 1 | 2:
                act("customers", customer, {"$set": {"name": number, **_OURS}})
            case 3:
                act("customers", customer, {"$set": {"account.tier": number}, "$unset": {"name": 1}})
            case 4:
                act("customers", customer, {"account": {"tier": number}})
            case 5:
                act("customers", customer, None)
            case 6 | 7:
                act("carts", cart, {"$set": {"customer_id": chosen.choice(_NAMED), **_OURS}})
            case 8:
                act("carts", cart, {"customer_id": chosen.choice(_NAMED), **_OURS})
            case 9:
                act("carts", cart, None)

    return beside


def acting_on(database: Any) -> Callable[[random.Random], Any]:
    """The same with a database of PyMongo's."""

    def act(name: str, query: dict[str, Any], update: dict[str, Any] | None) -> None:
        if update is None:
            database[name].delete_one(query)
        elif next(iter(update)).startswith("$"):
            database[name].update_one(query, update, upsert=True)
        else:
            database[name].replace_one(query, update, upsert=True)

    return acting(act)


def settled(client: Any) -> Callable[[], bool]:
    """Whether a recomputation gives the view that is there. ``client`` of ``tailrace.connect()``."""
    upkeep = ViewUpkeep(client, VIEW)
    return lambda: not list(upkeep.verify(grace_s=0.0))


def verify(uri: str, capsys: Any) -> None:
    """``tailrace view verify`` finds no difference, and has something to compare."""
    fields = [part for target, source in VIEW.fields.items() for part in ("--field", f"{target}={source}")]
    where = ["--target", VIEW.target, "--source", VIEW.source, "--on", VIEW.on, *fields]
    capsys.readouterr()
    code = main(["view", "verify", uri, *where, "--grace", "0"])
    told = capsys.readouterr().out
    assert (code, told) == (0, "differences: 0\n"), told
