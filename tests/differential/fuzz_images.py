"""Random updates against a live server: each document read back, and compared byte for byte with what we make of the
document before and the oplog entry.

    python -m tests.differential.fuzz_images --seed 7 --updates 20000      one seed; the same again replays it
    python -m tests.differential.fuzz_images --seeds 1-50 --updates 20000    many, in one server
    python -m tests.differential.fuzz_images --version 4.4.2 --seed 7        a server of another version

A round updates every document of a collection once, reads the entries that the server wrote, applies each to the bytes
that were there before, and compares the result with the collection. Values come from the workload of the other fuzz
and, where PyMongo's source can be had, from its BSON corpus. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from tailrace.core import raw_bson as rb
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.read.images.delta import apply_entry
from tests import pymongo_source
from tests.differential import documents as docs
from tests.differential import updates
from tests.server_in_use import SERVER_VERSION

RAW: Final = CodecOptions(document_class=RawBSONDocument)
LOOSE: Final = CodecOptions(
    unicode_decode_error_handler="replace", datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
DOCUMENTS: Final = 300
_COLUMN: Final = 7


@dataclass
class Totals:
    """What was compared. ``differences`` holds the first ones in words."""

    updates: int = 0
    refused: int = 0
    rounds: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.kinds.items()))
        return (
            f"{self.updates} entries applied ({kinds}), {self.bytes} bytes equal, {self.refused} statements refused, "
            f"{len(self.differences)} differences"
        )


def corpus_values() -> list[tuple[int, bytes]]:
    """The values of PyMongo's BSON corpus: type and bytes."""
    try:
        folder = pymongo_source.pymongo_source()
    except pymongo_source.NotFetchedError:
        return []
    found = []
    for path in sorted((folder / "test" / "bson_corpus").glob("*.json")):
        for case in json.loads(path.read_text()).get("valid", ()):
            raw = bytes.fromhex(case["canonical_bson"])
            for element in rb.elements(raw):
                value = rb.value(raw, element)
                if element.type != rb.BINARY or value[4] != _COLUMN:  # the server checks the contents of this type
                    found.append((element.type, value))
    return found


class ImagesFuzz:
    """One collection, the bytes that it should hold, and rounds of updates."""

    def __init__(self, client: MongoClient[Any], seed: int, corpus: list[tuple[int, bytes]], totals: Totals) -> None:
        self.rng = docs.UniqueNames(seed)  # if two fields have the same name, nobody knows which one an update means
        self.corpus = corpus
        self.totals = totals
        self.seed = seed
        self.name = f"images_{seed}"
        self.collection: Collection[Any] = client["images"].get_collection(self.name, codec_options=RAW)
        self.oplog: Collection[Any] = client["local"]["oplog.rs"]
        self.last = self._time(client)
        self.known: dict[bytes, bytes] = {}
        self.entries: dict[bytes, tuple[bytes | None, bytes]] = {}

    @staticmethod
    def _time(client: MongoClient[Any]) -> Any:
        return client["admin"].command("ping")["operationTime"]

    def run(self, updates_wanted: int) -> None:
        self.collection.drop()
        self._fill(DOCUMENTS)
        self._check("the inserts")
        target = self.totals.updates + updates_wanted
        while self.totals.updates < target and len(self.totals.differences) < 5:
            self._round()
        self.collection.drop()

    def _fill(self, count: int) -> None:
        inserts = []
        for number in range(count):
            identifier = rb.encode_element(rb.INT32, b"_id", rb.encode_int32(self.rng.randrange(1 << 30)))
            body = docs.everyday_document(self.rng, identifier) if number % 3 else docs.new_document(self.rng)
            inserts.append(RawBSONDocument(body))
        self._command({"insert": self.name, "documents": inserts, "ordered": False})

    def _command(self, command: dict[str, Any]) -> None:
        try:
            answer = self.collection.database.command(command)
        except OperationFailure:  # a value that no server accepts ends the whole command; what came before it is done
            self.totals.refused += 1
        else:
            self.totals.refused += len(answer.get("writeErrors", ()))

    def _round(self) -> None:
        if len(self.known) < DOCUMENTS // 2:
            self._fill(DOCUMENTS - len(self.known))
        chosen = list(self.known)
        self.rng.shuffle(chosen)
        statements = []
        for key in chosen:
            statement = updates.statement(self.rng, RawBSONDocument(key), one=True)
            if self.rng.random() < 0.25:
                statement = {"q": RawBSONDocument(key), "u": self._more()}
            statements.append(statement)
        gone = [{"q": RawBSONDocument(key), "limit": 1} for key in chosen if self.rng.random() < 0.01]
        self._command({"update": self.name, "updates": statements, "ordered": False, "bypassDocumentValidation": True})
        if gone:
            self._command({"delete": self.name, "deletes": gone, "ordered": False})
        self._check(f"round {self.totals.rounds}")
        self.totals.rounds += 1

    def _more(self) -> Any:
        """What the other fuzz leaves out: values of the corpus, many fields at once, fields in another order."""
        kind = self.rng.randrange(5)
        if kind == 0 and self.corpus:
            paths = self.rng.sample(updates.ANY_PATHS, self.rng.randint(1, 4))
            return {"$set": updates.raw_fields({path: self.rng.choice(self.corpus) for path in paths})}
        if kind == 1:
            paths = self.rng.sample(
                ("z", "y10", "y9", "10", "9", "o.10", "o.9", "o.a", "q.r.s", "q.r.t", "q.a", "Z"), 4
            )
            return {"$set": {path: self.rng.randint(0, 99) for path in paths}, "$unset": {"x": "", "b": ""}}
        if kind == 2:
            names = self.rng.sample(("a", "b", "n", "name", "o", "scores", "tags", "5"), 3)
            return [{"$replaceWith": {"$mergeObjects": [{"_id": "$_id"}, *({n: f"${n}"} for n in names), "$$ROOT"]}}]
        if kind == 3:
            name = self.rng.choice(("a", "n", "o", "name", "count", "scores"))
            return [{"$set": {"moved": f"${name}"}}, {"$unset": name}, {"$set": {name: "$moved"}}]
        inside = self.rng.choice(("o", "o.y", "lines", "5"))
        fields = {name: self.rng.randint(0, 9) for name in self.rng.sample("fedcba", 3)}
        return [{"$set": {f"{inside}.{name}": value for name, value in fields.items()}}]

    def _check(self, where: str) -> None:
        """Apply what the server wrote, and compare."""
        query = {"ts": {"$gt": self.last}, "ns": f"images.{self.name}"}
        for reply in self.oplog.find_raw_batches(query, sort=[("$natural", 1)]):
            for entry in rb.split(reply):
                self._apply(entry, where)
        found = b"".join(self.collection.find_raw_batches({}))
        stored = {key_of(document): document for document in rb.split(found)}
        self.totals.bytes += len(found)
        if stored != self.known:
            for key in {*stored, *self.known}:
                if stored.get(key) != self.known.get(key):
                    self._note(where, key, stored.get(key))
            self.known = stored

    def _apply(self, entry: bytes, where: str) -> None:
        fields = {element.name: element for element in rb.elements(entry)}
        self.last = bson.decode(rb.encode_document(entry[fields[b"ts"].start : fields[b"ts"].end]))["ts"]
        letter = rb.read_string(entry, fields[b"op"].value_start)
        if letter not in (b"i", b"u", b"d"):
            return
        change = rb.value(entry, fields[b"o"])
        key = key_of(rb.value(entry, fields[b"o2"]) if letter == b"u" else change)
        self.totals.kinds[describe(letter, change)] += 1
        self.totals.updates += letter == b"u"
        self.entries[key] = self.known.get(key), entry
        try:
            after = apply_entry(self.known.get(key), entry)
        except TailraceError as error:
            self.totals.differences.append(
                f"seed {self.seed}, {where}: {error}: {words(self.known.get(key))} {words(entry)}"
            )
            return
        if after is not None and apply_entry(after, entry, again=True) != after:
            self.totals.differences.append(f"seed {self.seed}, {where}: applied again, it differs: {words(entry)}")
        if after is None:
            self.known.pop(key, None)
        else:
            self.known[key] = after

    def _note(self, where: str, key: bytes, stored: bytes | None) -> None:
        before, entry = self.entries.get(key, (None, b""))
        self.totals.differences.append(
            f"seed {self.seed}, {where}:\n  before {words(before)}\n  entry  {words(entry)}\n  stored {words(stored)}\n"
            f"  ours   {words(self.known.get(key))}"
        )


def describe(letter: bytes, change: bytes) -> str:
    if letter != b"u":
        return letter.decode()
    first = next(rb.elements(change))
    if first.name != b"$v":
        return "modifiers" if first.name[:1] == b"$" else "replacement"
    return f"$v:{rb.read_int32(change, first.value_start)}"


def key_of(document: bytes) -> bytes:
    found = rb.find(document, b"_id")
    assert found is not None
    return rb.encode_document(document[found.start : found.end])


def words(document: bytes | None) -> str:
    return "nothing" if not document else str(bson.decode(document, LOOSE))[:1500]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", help="a-b, in place of --seed")
    parser.add_argument("--updates", type=int, default=20_000, help="of each seed")
    parser.add_argument("--version", default=SERVER_VERSION, help=f"of the server ({SERVER_VERSION})")
    arguments = parser.parse_args()
    first, _, last = (arguments.seeds or str(arguments.seed)).partition("-")
    totals, corpus = Totals(), corpus_values()
    begun = time.monotonic()
    with (
        ReplicaSet(version=arguments.version, oplog_size_mb=2000) as deployment,
        MongoClient(deployment.uri) as client,
    ):
        for seed in range(int(first), int(last or first) + 1):
            ImagesFuzz(client, seed, corpus, totals).run(arguments.updates)
    print("\n".join(totals.differences), file=sys.stderr)
    print(f"{totals}, {len(corpus)} corpus values, {time.monotonic() - begun:.0f} s")
    return 1 if totals.differences else 0


if __name__ == "__main__":
    sys.exit(main())
