"""Writes to a database of the harness's own, which matter to products rather than to events: documents of 1 byte to 16
MB, odd names, declared columns, `$out` and `$merge`, a ring of documents, operations without events, and expiry."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from bson.binary import Binary
from bson.raw_bson import RawBSONDocument

from tests.differential import documents as docs
from tests.products import nested, typed
from tests.products.odd_names import DOTTED, OddNames

SIZES: Final = "sizes"
CORPUS: Final = "corpus"
EXPIRING: Final = "expiring"
#: The size of the largest document that is updated: an event with both images has to fit into 16 MB.
_UPDATED_MAX: Final = 5 << 20
_LARGEST: Final = (16 << 20) - 200
#: A capped collection: the server removes all but the newest so many documents. Before 5.0 it writes no entry for this.
_RING, _RING_MAX = "ring", 7
#: Written to by atomic `applyOps`, which servers' streams do not show before 8.0.
_ATOMIC: Final = "atomic"
#: What aggregations write: `$out` renames another collection onto the first, `$merge` writes documents.
_OUT, _MERGED = "out", "merged"
#: The collections with which programs that read tables are compared.
_IN_COLUMNS: Final = (typed.DECLARED, typed.INFERRED, nested.NESTED)
#: The probability that a round has names that nobody can copy, if the one before had none.
UNREADABLE: Final = 0.15
_LONG_AGO: Final = datetime(2001, 1, 1, tzinfo=UTC)
Sent = Callable[[dict[str, Any]], None]


class OwnWrites:
    """The writes of one seed. ``send`` carries out a command on a database, and ignores refusals by the server."""

    def __init__(self, database: str, seed: str, version: str, *, unreadable: float, unique_names: bool) -> None:
        self.database = database
        # A document may have a field name twice if nobody computes images.
        self._documents = (docs.UniqueNames if unique_names else random.Random)(f"tailrace corpus {seed}")
        self._rng = random.Random(f"tailrace own {seed}")
        self._nested = random.Random(f"tailrace nested {seed}")
        self._names = OddNames(database, seed)
        self._unreadable = unreadable
        self._sizes: list[int] = []
        self._atomic: list[int] = []
        self._is_begun = False
        self._version = version
        #: Collections that the events do not show, and those that the oplog does not show.
        self.eventless = tuple(f"{database}.{name}" for name in (_ATOMIC, *self._unlogged))
        self.unlogged = tuple(f"{database}.{name}" for name in self._unlogged)

    @property
    def _unlogged(self) -> tuple[str, ...]:
        return (_RING,) if self._version.startswith("4.") else ()

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Collections that may exist and can be copied."""
        names = (SIZES, CORPUS, EXPIRING, _RING, _ATOMIC, _OUT, _MERGED, *_IN_COLUMNS, *DOTTED)
        return tuple(f"{self.database}.{name}" for name in names)

    def begin_round(self, send: Sent, exchange: Callable[[bytes], object]) -> None:
        """Make what has to exist, and sometimes what nobody can copy."""
        if not self._is_begun:
            self._is_begun = True
            send({"create": _RING, "capped": True, "size": 1 << 16, "max": _RING_MAX})
        self._names.begin_round(exchange, self._unreadable)

    def begin_pause(self, exchange: Callable[[bytes], object]) -> None:
        """If databases move while there are writes, make what nobody can copy by chance after the writes."""
        self._names.begin_round(exchange, UNREADABLE)

    def end_pause(self, exchange: Callable[[bytes], object]) -> None:
        """Drop it before the next ones."""
        if self._names.present:
            self._names.begin_round(exchange, 0.0)

    def write(self, send: Sent) -> None:
        """Carry out a few writes, or none."""
        rng = self._rng
        for chance, commands in (
            (0.15, self._sized),
            (0.1, self._named),
            (0.4, self._typed),
            (0.15, self._of_any_value),
            (0.1, self._ringed),
            (0.08, self._atomically),
            (0.08, self._aggregated),
        ):
            if rng.random() < chance:
                for command in commands():
                    send(command)
        while self._nested.random() < 0.4:
            send(nested.write(self._nested))

    def expiring(self) -> list[dict[str, Any]]:
        """The commands that let documents expire as soon as the server looks for them."""
        past = {"createIndexes": EXPIRING, "indexes": [{"key": {"at": 1}, "name": "at", "expireAfterSeconds": 1}]}
        documents = [{"_id": self._rng.getrandbits(60), "at": _LONG_AGO} for _ in range(5)]
        return [past, {"insert": EXPIRING, "documents": documents}]

    def _named(self) -> Iterator[dict[str, Any]]:
        yield self._names.write()

    def _typed(self) -> Iterator[dict[str, Any]]:
        yield typed.write(self._rng).command()

    def _of_any_value(self) -> Iterator[dict[str, Any]]:
        """Documents with every kind of value and name."""
        rng = self._documents
        yield {"insert": CORPUS, "documents": [RawBSONDocument(docs.new_document(rng)) for _ in range(2)]}
        query = {"_id": rng.randint(0, docs.SMALL_IDS)}
        if rng.random() < 0.3:
            yield {"delete": CORPUS, "deletes": [{"q": query, "limit": 1}]}
        else:
            yield {"update": CORPUS, "updates": [{"q": query, "u": {"$inc": {"n": 1}}}]}

    def _ringed(self) -> Iterator[dict[str, Any]]:
        number = self._rng.getrandbits(40)
        yield {"insert": _RING, "documents": [{"_id": number + place, "n": 0} for place in range(3)]}
        yield {"update": _RING, "updates": [{"q": {"n": 0}, "u": {"$inc": {"n": 1}}}]}

    def _atomically(self) -> Iterator[dict[str, Any]]:
        rng, namespace = self._rng, f"{self.database}.{_ATOMIC}"
        yield {"update": _ATOMIC, "updates": [{"q": {"_id": "by an event"}, "u": {"$inc": {"n": 1}}, "upsert": True}]}
        # A killed server does not start again if such an operation inserted an existing document or deleted a missing
        # one.
        operations: list[dict[str, Any]] = []
        if len(self._atomic) > 5 or (self._atomic and rng.random() < 0.3):
            gone = self._atomic.pop(rng.randrange(len(self._atomic)))
            operations.append({"op": "d", "ns": namespace, "o": {"_id": gone}})
        whole = {"_id": rng.getrandbits(40), "n": rng.randrange(100)}
        self._atomic.append(whole["_id"])
        operations.append({"op": "i", "ns": namespace, "o": whole})
        yield {"applyOps": operations, "$db": "admin"}

    def _aggregated(self) -> Iterator[dict[str, Any]]:
        rng = self._rng
        source = rng.choice((CORPUS, CORPUS, typed.INFERRED, _RING, _MERGED))
        last: dict[str, Any] = {"$out": _OUT}
        if rng.random() < 0.5:
            last = {"$merge": {"into": _MERGED, "whenMatched": rng.choice(("replace", "merge", "keepExisting"))}}
        yield {"aggregate": source, "pipeline": [{"$limit": rng.randrange(1, 12)}, last], "cursor": {}}

    def _sized(self) -> Iterator[dict[str, Any]]:
        """Documents from 1 byte to 16 MB: mostly small ones, since every product copies them."""
        rng = self._rng
        if self._sizes and rng.random() < 0.5:
            chosen = rng.choice(self._sizes)
            if rng.random() < 0.3:
                self._sizes.remove(chosen)
                yield {"delete": SIZES, "deletes": [{"q": {"_id": chosen}, "limit": 1}]}
            elif chosen < _UPDATED_MAX:
                yield {"update": SIZES, "updates": [{"q": {"_id": chosen}, "u": {"$inc": {"n": 1}}}]}
            return
        size = min(_LARGEST, int(2 ** (rng.random() * (24.0 if rng.random() < 0.1 else 15.0))))
        pad = Binary(rng.randbytes(min(size, 1 << 16)) * max(1, size >> 16))[: max(0, size)]
        if size not in self._sizes:
            self._sizes.append(size)
            yield {"insert": SIZES, "documents": [{"_id": size, "pad": Binary(pad)}]}
