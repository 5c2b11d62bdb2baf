"""Collections that are renamed onto each other, dropped and made again, converted, replaced and shown by views."""

from __future__ import annotations

import random
from typing import Any, Final

_NAMES: Final = ("a", "b", "c", "Ä")
_VIEWS: Final = ("seen", "seen of seen")
_TTL: Final = 10**6
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"collation": {"locale": "de", "strength": 1}},
    {"validator": {"$jsonSchema": {"required": ["n"]}}, "validationLevel": "moderate", "validationAction": "warn"},
    {"validator": {"n": {"$gte": 0}}, "validationAction": "error"},
)
_INDEXES: Final[tuple[dict[str, Any], ...]] = (
    {"key": {"n": -1.0}, "name": "n down"},
    {"key": {"n": 1, "x.y": -1}, "name": "n_x"},
    {"key": {"at": 1}, "name": "ttl", "expireAfterSeconds": _TTL},
    {"key": {"$**": 1}, "name": "wild", "wildcardProjection": {"x": 0}},
    {"key": {"t": "text", "u": "text"}, "name": "words", "weights": {"t": 3, "u": 7}, "default_language": "german"},
    {"key": {"p": "2d"}, "name": "flat", "min": -10, "max": 10, "bits": 20},
    {"key": {"g": "2dsphere", "n": 1}, "name": "globe"},
    {"key": {"h": "hashed"}, "name": "hash"},
    {"key": {"s": 1}, "name": "sv", "collation": {"locale": "sv", "numericOrdering": True}},
    {"key": {"q": 1}, "name": "some", "partialFilterExpression": {"n": {"$gt": 3, "$type": "int"}}, "hidden": True},
    {"key": {"r": 1}, "name": "unique", "unique": True, "sparse": True},
)


class Names:
    """Definitions, and a few documents beside them. ``sender`` carries out commands."""

    def __init__(self, sender: Any, seed: int, version: str, *, capped: bool) -> None:
        self.databases = (f"names{seed}", f"names{seed}x")
        self._sender, self._version, self._capped = sender, version, capped
        self._rng = random.Random(f"tailrace sync names {seed}")
        self._steps = (
            (self._documents, 12),
            (self._index, 3),
            (self._rename, 2),
            (self._rename_around, 1),
            (self._made_again, 2),
            (self._out, 1.5),
            (self._convert, 0.7),
            (self._modify, 2),
            (self._view, 2),
            (self._drop_database, 0.3),
            (self._created_in_a_transaction, 1),
            (self._filled_and_indexed, 0.3),
        )

    def step(self) -> bool:
        """A few commands that belong together."""
        makers, weights = zip(*self._steps, strict=True)
        self._rng.choices(makers, weights)[0]()
        return True

    def _database(self) -> str:
        return self.databases[0] if self._rng.random() < 0.8 else self.databases[1]

    def _document(self) -> dict[str, Any]:
        rng = self._rng
        fields: dict[str, Any] = {
            "n": rng.randint(0, 9),
            "x": {"y": rng.random()},
            "t": "ein Wort",
            "p": [rng.uniform(-9, 9), rng.uniform(-9, 9)],
            "g": {"type": "Point", "coordinates": [rng.uniform(-9, 9), rng.uniform(-9, 9)]},
            "h": rng.random(),
            "s": rng.choice(("å", "10", "9", "z")),
            "r": rng.getrandbits(60),
        }
        kept = {name: value for name, value in fields.items() if rng.random() < 0.8}
        return {"_id": rng.randint(0, 30), "n": 1, **kept}

    def _documents(self) -> None:
        rng, database, name = self._rng, self._database(), self._rng.choice(_NAMES)
        documents = [self._document() for _ in range(rng.randint(1, 5))]
        self._sender.send(database, {"insert": name, "documents": documents, "ordered": False})
        change = rng.choice(({"$inc": {"n": 1}}, {"$set": {"x.y": rng.random()}}, {"$unset": {"p": "", "g": ""}}))
        self._sender.send(database, {"update": name, "updates": [{"q": {"_id": rng.randint(0, 30)}, "u": change}]})
        self._sender.send(database, {"delete": name, "deletes": [{"q": {"_id": rng.randint(0, 30)}, "limit": 1}]})

    def _index(self) -> None:
        rng, database, name = self._rng, self._database(), self._rng.choice(_NAMES)
        if rng.random() < 0.7:
            indexes = rng.sample(_INDEXES, rng.randint(1, 4))
            self._sender.send(database, {"createIndexes": name, "indexes": indexes})
        else:
            dropped = rng.choice(("*", rng.choice(_INDEXES)["name"], rng.choice(_INDEXES)["key"]))
            self._sender.send(database, {"dropIndexes": name, "index": dropped})

    def _rename(self) -> None:
        rng = self._rng
        name, other = rng.sample(_NAMES, 2)
        before, after = self._database(), self._database()
        self._rename_to(f"{before}.{name}", f"{after}.{other}", rng.random() < 0.7)
        if rng.random() < 0.5:
            self._sender.send(before, {"insert": name, "documents": [self._document()]})

    def _rename_to(self, name: str, other: str, drop_target: bool = False) -> None:
        command = {"renameCollection": name, "to": other, "dropTarget": drop_target}
        self._sender.send("admin", command)

    def _rename_around(self) -> None:
        """Two collections swap their names by way of a third, with writes in between."""
        database = self.databases[0]
        first, second = (f"{database}.{name}" for name in self._rng.sample(_NAMES, 2))
        self._rename_to(first, f"{database}.between")
        self._documents()
        self._rename_to(second, first)
        self._documents()
        self._rename_to(f"{database}.between", second)

    def _made_again(self) -> None:
        rng, database, name = self._rng, self._database(), self._rng.choice(_NAMES)
        for _ in range(rng.choice((1, 1, 3))):
            self._sender.send(database, {"drop": name})
            options = rng.choice(_OPTIONS)
            if self._capped and rng.random() < 0.15:
                options = {"capped": True, "size": 8192, "max": 9}
            self._sender.send(database, {"create": name, **options})
            if rng.random() < 0.5:
                index = {"key": {"z": -1}, "name": "early", "unique": rng.random() < 0.5}
                self._sender.send(database, {"createIndexes": name, "indexes": [index]})
            self._sender.send(database, {"insert": name, "documents": [self._document()]})

    def _out(self) -> None:
        rng, database = self._rng, self._database()
        name, other = rng.sample(_NAMES, 2)
        last: dict[str, Any] = {"$out": other}
        if rng.random() < 0.4:
            last = {"$out": {"db": self.databases[1], "coll": other}}
        elif rng.random() < 0.4:
            last = {"$merge": {"into": other, "whenMatched": "replace"}}
        self._sender.send(
            database, {"aggregate": name, "pipeline": [{"$match": {"n": {"$lt": 6}}}, last], "cursor": {}}
        )

    def _convert(self) -> None:
        if self._capped:
            self._sender.send(self._database(), {"convertToCapped": self._rng.choice(_NAMES), "size": 1 << 16})
            if self._rng.random() < 0.5:
                self._sender.send(self._database(), {"drop": self._rng.choice(_NAMES)})

    def _modify(self) -> None:
        rng = self._rng
        change: dict[str, Any] = rng.choice(
            (
                {"validator": {"n": {"$lt": 10**6}}, "validationLevel": "strict", "validationAction": "error"},
                {"validator": {}, "validationLevel": "off"},
                {"index": {"name": "ttl", "expireAfterSeconds": _TTL + rng.randint(1, 9)}},
                {"index": {"keyPattern": {"n": -1.0}, "hidden": rng.random() < 0.5}},
                {"index": {"name": "some", "hidden": False}},
            )
        )
        if rng.random() < 0.2:
            change = {"changeStreamPreAndPostImages": {"enabled": rng.random() < 0.5}}
            if self._version.startswith(("4.", "5.")):
                change = {"recordPreImages": rng.random() < 0.5}
        self._sender.send(self._database(), {"collMod": rng.choice(_NAMES), **change})

    def _view(self) -> None:
        """Views, views on views, and a collection where a view was."""
        rng, database = self._rng, self.databases[0]
        view = rng.choice(_VIEWS)
        pipeline = [{"$match": {"n": {"$gt": rng.randint(0, 9)}}}, {"$project": {"x": 0}}]
        kind = rng.random()
        if kind < 0.5:
            over = rng.choice(_NAMES) if view == _VIEWS[0] else _VIEWS[0]
            self._sender.send(database, {"create": view, "viewOn": over, "pipeline": pipeline})
        elif kind < 0.75:
            self._sender.send(database, {"collMod": view, "viewOn": rng.choice(_NAMES), "pipeline": pipeline})
        else:
            self._sender.send(database, {"drop": view})
            if rng.random() < 0.3:
                self._sender.send(database, {"insert": view, "documents": [self._document()]})

    def _drop_database(self) -> None:
        database = self._database()
        self._sender.send(database, {"dropDatabase": 1})
        if self._rng.random() < 0.5:
            self._sender.send(database, {"insert": self._rng.choice(_NAMES), "documents": [self._document()]})

    def _created_in_a_transaction(self) -> None:
        import bson

        name = f"made{self._rng.randrange(3)}"
        fields = {"lsid": {"id": bson.Binary(random.randbytes(16), 4)}, "txnNumber": bson.Int64(1), "autocommit": False}
        index = {"key": {"a": 1}, "name": "a_1", "unique": self._rng.random() < 0.5}
        commands: list[dict[str, Any]] = [
            {"create": name},
            {"createIndexes": name, "indexes": [index]},
            {"insert": name, "documents": [{**self._document(), "a": 1}]},
        ]
        self._sender.send(self.databases[0], {"drop": name})
        for number, command in enumerate(commands):
            start = {"startTransaction": True} if number == 0 else {}
            if self._sender.send(self.databases[0], {**command, **fields, **start}) is None:
                self._sender.send("admin", {"abortTransaction": 1, **fields})
                return
        self._sender.send("admin", {"commitTransaction": 1, **fields})

    def _filled_and_indexed(self) -> None:
        """Enough documents for an index build to take a while, while others write; some builds fail."""
        rng, database = self._rng, self.databases[0]
        documents = [{"_id": 1000 + number, "n": number % 7, "b": number} for number in range(3000)]
        self._sender.send(database, {"insert": "filled", "documents": documents, "ordered": False})
        key = rng.choice(("b", "n"))
        index = {"key": {key: 1}, "name": f"{key}_1", "unique": rng.random() < 0.5}
        self._sender.send(database, {"createIndexes": "filled", "indexes": [index]})
        if rng.random() < 0.3:
            self._sender.send(database, {"drop": "filled"})
