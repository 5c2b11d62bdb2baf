"""Unique indexes whose values are swapped, moved and freed: on its way a target has states that the source never
had."""

from __future__ import annotations

import random
from typing import Any, Final

import bson
from bson.int64 import Int64

_DOCUMENTS: Final = 24
_NAMES: Final = ("keys", "sparse", "partial")
_UNIQUE: Final[dict[str, list[dict[str, Any]]]] = {
    "keys": [
        {"key": {"u": 1}, "name": "u_1", "unique": True},
        {"key": {"v": -1, "w": 1}, "name": "v_w", "unique": True},
    ],
    "sparse": [{"key": {"u": 1}, "name": "u_sparse", "unique": True, "sparse": True}],
    "partial": [
        {"key": {"u": 1.0}, "name": "u_of_open", "unique": True, "partialFilterExpression": {"open": True}},
        {"key": {"a": 1}, "name": "many", "unique": True, "sparse": True},
    ],
}


class Keys:
    """Writes to collections with unique indexes. ``sender`` carries out commands."""

    def __init__(self, sender: Any, seed: int, version: str) -> None:
        self.databases = (f"keys{seed}",)
        self._sender = sender
        self._rng = random.Random(f"tailrace sync keys {seed}")
        self._has_prepare = int(version.partition(".")[0]) >= 6
        self._is_begun = False

    def step(self) -> bool:
        """A few writes that belong together."""
        if not self._is_begun:
            self._is_begun = True
            self._begin()
        rng, name = self._rng, self._rng.choice(_NAMES)
        kinds = (self._swap, self._rotate, self._move, self._plain, self._plain, self._array, self._definition)
        weights = (4, 3, 4, 3, 3, 2, 0.4)
        rng.choices(kinds, weights)[0](name)
        return True

    def _begin(self) -> None:
        for name in _NAMES:
            documents = [{"_id": n, "u": n, "v": n, "w": 0, "open": n % 2 == 0} for n in range(_DOCUMENTS)]
            self._send({"insert": name, "documents": documents})
            self._send({"createIndexes": name, "indexes": _UNIQUE[name]})

    def _send(self, command: dict[str, Any]) -> bool:
        return self._sender.send(self.databases[0], command) is not None

    def _set(self, name: str, key: Any, fields: dict[str, Any]) -> dict[str, Any]:
        return {"update": name, "updates": [{"q": {"_id": key}, "u": {"$set": fields}, "upsert": True}]}

    def _values(self, name: str, keys: list[int]) -> list[dict[str, Any]]:
        reply = self._sender.send(self.databases[0], {"find": name, "filter": {"_id": {"$in": keys}}})
        found = [] if reply is None else [dict(one) for one in reply["cursor"]["firstBatch"]]
        names = ("u", "v", "w", "open")
        return [{"_id": one["_id"], **{field: one[field] for field in names if field in one}} for one in found]

    def _swap(self, name: str) -> None:
        """Two documents swap their values, in one transaction or by way of a third value."""
        two = self._values(name, self._rng.sample(range(_DOCUMENTS), 2))
        if len(two) < 2:
            return
        first, second = two
        temporary = {"u": -1 - self._rng.getrandbits(40), "v": -1 - self._rng.getrandbits(40)}
        commands = [
            self._set(name, first["_id"], temporary),
            self._set(name, second["_id"], {k: v for k, v in first.items() if k != "_id"}),
            self._set(name, first["_id"], {k: v for k, v in second.items() if k != "_id"}),
        ]
        self._carry_out(commands, self._rng.random() < 0.5)

    def _rotate(self, name: str) -> None:
        """A cycle of several, by deletes and inserts or by updates."""
        rng = self._rng
        found = self._values(name, rng.sample(range(_DOCUMENTS), rng.randint(3, 6)))
        if len(found) < 2:
            return
        turned = [{**after, "_id": before["_id"]} for before, after in zip(found, found[1:] + found[:1], strict=True)]
        if rng.random() < 0.5:
            keys = [one["_id"] for one in found]
            remove = {"delete": name, "deletes": [{"q": {"_id": {"$in": keys}}, "limit": 0}]}
            self._carry_out([remove, {"insert": name, "documents": turned}], rng.random() < 0.5)
            return
        away = [self._set(name, one["_id"], {"u": -rng.getrandbits(40), "v": -rng.getrandbits(40)}) for one in found]
        back = [self._set(name, one["_id"], {k: v for k, v in one.items() if k != "_id"}) for one in turned]
        self._carry_out(away + back, rng.random() < 0.5)

    def _move(self, name: str) -> None:
        """A value goes from a deleted document to a new one."""
        rng = self._rng
        found = self._values(name, [rng.randrange(_DOCUMENTS)])
        if not found:
            self._send({"insert": name, "documents": [{"_id": rng.randrange(_DOCUMENTS), "u": rng.getrandbits(40)}]})
            return
        after = {**found[0], "_id": rng.randrange(_DOCUMENTS)}
        remove = {"delete": name, "deletes": [{"q": {"_id": found[0]["_id"]}, "limit": 1}]}
        put = {"update": name, "updates": [{"q": {"_id": after["_id"]}, "u": after, "upsert": True}]}
        self._carry_out([remove, put], rng.random() < 0.4)

    def _plain(self, name: str) -> None:
        rng = self._rng
        key = rng.randrange(_DOCUMENTS)
        kind = rng.random()
        if kind < 0.2:
            self._send({"delete": name, "deletes": [{"q": {"_id": key}, "limit": 1}]})
        elif kind < 0.4:
            fields = rng.choice((["u"], ["v"], ["u", "v"], ["open"]))
            self._send({"update": name, "updates": [{"q": {"_id": key}, "u": {"$unset": dict.fromkeys(fields, "")}}]})
        elif kind < 0.6:
            self._send(self._set(name, key, {"open": rng.random() < 0.5}))
        else:
            value = rng.choice((rng.randrange(_DOCUMENTS), float(rng.randrange(_DOCUMENTS)), str(key), None))
            self._send(self._set(name, key, {rng.choice(("u", "v")): value}))

    def _array(self, name: str) -> None:
        """Multikey: elements move from one document to another."""
        first, second = self._rng.sample(range(_DOCUMENTS), 2)
        element = self._rng.randrange(40)
        pull = {"update": name, "updates": [{"q": {"_id": first}, "u": {"$pull": {"a": element}}}]}
        push = {"update": name, "updates": [{"q": {"_id": second}, "u": {"$addToSet": {"a": element}}}]}
        self._carry_out([pull, push], self._rng.random() < 0.5)

    def _definition(self, name: str) -> None:
        """The indexes are dropped, values occur twice, and the indexes come back."""
        rng = self._rng
        index = rng.choice(_UNIQUE[name])
        kind = rng.random()
        if kind < 0.5:
            self._send({"dropIndexes": name, "index": index["name"]})
            for _ in range(3):
                self._send(self._set(name, rng.randrange(_DOCUMENTS), {"u": 7, "v": 7, "w": 7, "open": True}))
            for key in range(_DOCUMENTS):
                self._send(self._set(name, key, {"u": key, "v": key, "a": [100 + key]}))
            self._send({"createIndexes": name, "indexes": [index]})
        elif kind < 0.7:
            self._send({"collMod": name, "index": {"name": index["name"], "hidden": rng.random() < 0.5}})
        elif self._has_prepare:
            field = "y" if name == "keys" else "z"
            key = {field: 1}
            self._send({"createIndexes": name, "indexes": [{"key": key, "name": f"{field}_1"}]})
            for number in range(_DOCUMENTS):
                self._send(self._set(name, number, {field: number}))
            self._send({"collMod": name, "index": {"keyPattern": key, "prepareUnique": True}})
            if rng.random() < 0.7:
                self._send({"collMod": name, "index": {"keyPattern": key, "unique": True}})
            if rng.random() < 0.5:
                self._send({"dropIndexes": name, "index": f"{field}_1"})
                self._send({"update": name, "updates": [{"q": {}, "u": {"$unset": {field: ""}}, "multi": True}]})

    def _carry_out(self, commands: list[dict[str, Any]], in_transaction: bool) -> None:
        if not in_transaction:
            for command in commands:
                self._send(command)
            return
        # Not from the seed: a server remembers sessions, and the same seed may be played again.
        fields = {"lsid": {"id": bson.Binary(random.randbytes(16), 4)}, "txnNumber": Int64(1), "autocommit": False}
        for number, command in enumerate(commands):
            if not self._send({**command, **fields, **({"startTransaction": True} if number == 0 else {})}):
                self._sender.send("admin", {"abortTransaction": 1, **fields})
                return
        self._sender.send("admin", {"commitTransaction": 1, **fields})
