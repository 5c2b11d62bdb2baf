"""Writes of all operators, with a value of its own in every masked field: text that begins with ``MARK``, or a number
whose first bytes and digits are those of ``_NUMBERS``. Nothing else in the documents holds either of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import bson
import pyarrow as pa
import pyarrow.parquet as pq
from pymongo import MongoClient
from pymongo.errors import WriteError

MARK: Final = "MaRkEr"
#: What is declared of the collections that are written.
RULES: Final = {
    "{db}.*": {
        "email": "hash",
        "card": "tokenise",
        "notes": "drop",
        "items.secret": "hash",
        "items.gone": "drop",
        "deep.**.phone": "tokenise",
        "phones": "hash",
    },
}


def rules(database: str) -> dict[str, dict[str, str]]:
    """The rules of one database."""
    return {pattern.format(db=database): paths for pattern, paths in RULES.items()}


#: What the marked numbers have in common, as it looks in BSON and in text.
_NUMBERS: Final = 0x5A3CC3A51E << 24
_FORMS: Final = ((_NUMBERS >> 24).to_bytes(5, "little"), str(_NUMBERS)[:10].encode())


def marked_number(rng: random.Random) -> bson.Int64:
    return bson.Int64(_NUMBERS | rng.getrandbits(24))


class MarkedWrites:
    """Writes to two collections of ``database``."""

    def __init__(self, client: MongoClient[Any], database: str, seed: int) -> None:
        self._client = client
        self._database = client[database]
        self._rng = random.Random(seed)
        self._texts = 0

    def _text(self) -> str:
        self._texts += 1
        return f"{MARK}-{self._texts}-{self._rng.getrandbits(48):x}"

    def _number(self) -> bson.Int64:
        return marked_number(self._rng)

    def _item(self) -> dict[str, Any]:
        return {"sku": self._rng.randrange(9), "secret": self._secret(), "gone": [self._text()], "n": 1}

    def _secret(self) -> Any:
        return self._rng.choice((self._text, self._number))()

    def _document(self) -> dict[str, Any]:
        chosen = self._rng
        return {
            "n": chosen.randrange(100),
            "email": self._text(),
            "card": {"number": self._number(), "holder": {"name": self._text(), "year": None}},
            "notes": [self._text(), {"text": self._text()}],
            "items": [self._item() for _ in range(chosen.randrange(4))],
            "deep": {"a": {"b": [{"phone": self._text(), "kind": "home"}]}, "phone": self._secret()},
            "phones": {self._rng.choice("xyz"): [self._text()], "5": self._text()},
            "open": "seen by all",
        }

    def open(self) -> None:
        """Definitions that hold values, too."""
        for name in ("people", "others"):
            self._database.create_collection(name, changeStreamPreAndPostImages={"enabled": True})
        self._database.command(
            {"collMod": "people", "validator": {"email": {"$ne": self._text()}}, "validationLevel": "off"}
        )
        self._database["people"].create_index(
            "n", partialFilterExpression={"email": {"$gt": self._text()}}, name="partial"
        )

    def write(self, count: int) -> None:
        """Some writes."""
        for _ in range(count):
            self._write()

    def _write(self) -> None:
        chosen = self._rng
        collection = self._database[chosen.choice(("people", "people", "others"))]
        one = {"_id": chosen.randrange(12)}
        turn = chosen.randrange(10)
        if turn == 0:
            collection.replace_one(one, self._document(), upsert=True)
        elif turn == 1:
            collection.delete_one(one)
        elif turn == 2:
            with self._client.start_session() as session, session.start_transaction():
                for collection in (self._database["people"], self._database["others"]):
                    collection.update_one(one, chosen.choice(self._updates()[:5]), upsert=True, session=session)
        elif turn == 3:
            many = [{"_id": bson.ObjectId(), **self._document()} for _ in range(3)]
            collection.insert_many(many)
            collection.delete_many({"_id": {"$in": [each["_id"] for each in many[1:]]}})
        else:
            if not collection.count_documents(one):
                collection.insert_one({**one, **self._document()})
            update = chosen.choice(self._updates())
            filters = [{"it.sku": {"$gt": 3}}] if "$[it]" in str(update) else None
            with suppress(WriteError):  # an earlier one has left another shape
                collection.update_one(one, update, array_filters=filters)

    def _updates(self) -> list[Any]:
        text, number, item = self._text, self._number, self._item
        return [
            {"$set": {"email": text(), "n": 5}},
            {"$set": {"card.number": number(), "card.holder.name": text(), "deep.a.phone": text()}},
            {"$unset": {"email": 1, "notes": 1, "card.number": 1}},
            {"$set": {"notes": text(), "deep.x.y.phone": number(), "open": "still"}},
            {"$set": {"items": [item(), item()], "phones": {"x": [text(), text()]}}},
            {"$push": {"items": {"$each": [item(), item()], "$position": 0, "$slice": 4}}},
            {"$push": {"phones.x": text(), "notes": text()}},
            {"$pop": {"items": 1}},
            {"$pull": {"items": {"sku": {"$lt": 3}}}},
            {"$set": {"items.$[].secret": text()}},
            {"$set": {"items.$[it].gone": text(), "items.$[it].n": 7}},
            {"$unset": {"items.$[].gone": 1}},
            {"$set": {"items.5": item()}},
            {"$set": {"items.0.secret": number(), "phones.5": text(), "phones.7": [text()]}},
            {"$rename": {"email": "phones.moved"}},
            {"$inc": {"card.sum": number() // 4}},
            {"$min": {"card.low": number()}, "$max": {"card.high": number()}},
            {"$currentDate": {"seen": True}, "$setOnInsert": {"email": text()}},
            {"$addToSet": {"deep.list": {"phone": text()}}},
            [{"$set": {"email": text(), "items": [item()], "deep.phone": {"$literal": text()}}}],
            [{"$unset": ["items", "deep.a"]}, {"$set": {"n": {"$add": ["$n", 1]}}}],
            [{"$replaceWith": {"$mergeObjects": ["$$ROOT", {"card": {"number": number(), "deeper": [text()]}}]}}],
        ]


def found_in(folders: list[Path]) -> list[str]:
    """Files below ``folders`` that hold a marker or a number, and which: their bytes, and the values of Parquet."""
    wanted = [MARK.encode(), *_FORMS]
    said = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                for what, content in _contents(path):
                    said += [f"{path} ({what}): {one!r}" for one in wanted if one in content]
    return said


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    yield "its bytes", path.read_bytes()
    if path.suffix == ".parquet":
        try:
            table = pq.ParquetFile(path).read()
        except pa.ArrowInvalid:  # a kill has left a part of a file, which nobody can read
            return
        for name, column in zip(table.column_names, table.columns, strict=True):
            for chunk in column.chunks:
                yield name, b"\0".join(buffer.to_pybytes() for buffer in chunk.buffers() if buffer is not None)
