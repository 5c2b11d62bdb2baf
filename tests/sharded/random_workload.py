"""Random writes and transactions on a live cluster while its chunks move and shards come and go, with a record of them.

The seed decides what each writer does, and where the chunks go. How the threads interleave depends on the machine, so a
seed does not repeat a run, and each run is compared with its own record. A document belongs to one writer; a change
stream must give exactly those of its writes that were acknowledged, in that order.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

import bson
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure, PyMongoError, WriteError

from tailrace.embedded import EmbeddedError, ReplicaSet, ShardedCluster
from tailrace.embedded.sharding import Router, Transaction
from tailrace.embedded.sharding.catalog import position
from tests.sharded import native

REGIONS: Final = ("a", "c", "g", "k", "n", "r", "t", "x")
_IDS_A_WRITER: Final = 25  # few, so that documents are deleted and inserted again
_CHUNKS_MAX: Final = 8
_MOVES_MIN: Final = 5
_ROUNDS_MAX: Final = 10_000
_DUPLICATE_KEY: Final = 11000
_PATIENCE_S: Final = 300.0
_Answer = TypeVar("_Answer")
#: Names that an oplog entry, an event, a token or our own code has for something of its own, and values that such a
#: field never has there.
_BORROWED: Final = (
    *("op", "ns", "ui", "o", "o2", "ts", "wall", "lsid", "txnNumber", "prevOpTime", "fromMigrate", "multiOpType"),
    *("applyOps", "count", "prepare", "partialTxn", "commitTransaction", "drop", "msg", "diff", "needsRetryImage"),
    *("operationType", "clusterTime", "documentKey", "fullDocument", "updateDescription", "token", "_data", "host"),
)
_ODD: Final = ("three", -(10**9), float("nan"), True, None, [], [{"op": "d"}], {}, {"_data": "82"}, {"_id._data": 1})
_RANGED, _HASHED, _PLAIN = "orders", "items", "plain"


class Wrote(NamedTuple):
    """One acknowledged write of a document: the operation, the number written (none for a deletion), the region that
    decided on the shard, and a value that is the same for all writes of a transaction."""

    operation: str
    number: int | None
    region: str | None
    transaction: object = None


#: What was written to each document, in order: by namespace and ``_id``.
History = dict[tuple[str, int], list[Wrote]]


@dataclass
class Ran:
    """What happened between two cluster times, both of which every member's oplog has passed."""

    seed: int
    database: str
    start: Timestamp
    end: Timestamp
    history: History
    counts: Mapping[str, int]
    #: The URIs of replica sets that were shards, and up to when.
    former: Mapping[str, Timestamp] = field(default_factory=dict)

    @property
    def writes(self) -> int:
        return sum(map(len, self.history.values()))

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return f"seed {self.seed}: {self.writes} writes to {len(self.history)} documents; {counts}"


@dataclass
class _Document:
    """A document as its writer knows it: the fields that route it, and the last number written."""

    collection: str
    id: int
    routed_by: dict[str, Any]
    alive: bool = False


class _Statement(NamedTuple):
    """A write that is to be done, and what to remember once it is done."""

    collection: str
    id: int
    wrote: Wrote
    act: Callable[[Router | Transaction], object]


class _Writer:
    """One thread's documents and what it does with them."""

    def __init__(self, workload: RandomWorkload, place: int) -> None:
        self.history: History = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)
        self._router = workload.cluster.router
        self._database = workload.database
        self._rng = random.Random(f"tailrace sharded writer {workload.seed} {place}")
        self._documents: dict[tuple[str, int], _Document] = {}
        for collection in (_RANGED, _RANGED, _HASHED, _PLAIN):
            for one in range(_IDS_A_WRITER):
                number = 1000 * place + one
                self._documents[collection, number] = _Document(collection, number, self._routing(collection, number))
        self._number = 0

    def _routing(self, collection: str, number: int) -> dict[str, Any]:
        if collection == _RANGED:
            return {"region": self._rng.choice(REGIONS), "_id": number}
        return {"sku": f"s{number}", "_id": number} if collection == _HASHED else {"_id": number}

    def step(self) -> None:
        """One write, or one transaction."""
        kind = self._rng.random()
        if kind < 0.75:
            self._do(self._statement(self._pick()))
        elif kind < 0.92:
            self._transaction()
        else:
            self._prepared()

    def _pick(self) -> _Document:
        return self._rng.choice(list(self._documents.values()))

    def _do(self, statement: _Statement) -> None:
        self._patiently(lambda: statement.act(self._router))
        self._remember([statement])
        self.counts["single writes"] += 1

    def _transaction(self) -> None:
        """Up to five writes, some to one document; a document whose region changes moves to another shard that way."""
        statements = self._statements()

        def body(transaction: Transaction) -> None:
            for statement in statements:
                statement.act(transaction)

        committed = self._patiently(lambda: self._router.run_transaction(body))
        self._remember(statements, committed)
        self.counts["transactions over shards" if len(committed.shards) > 1 else "transactions on one shard"] += 1

    def _patiently(self, action: Callable[[], _Answer]) -> _Answer:
        """Retries while the shard still holds a copy of the document from before its region changed: the chunk with it
        has moved away, and the copy is about to be deleted. (An index on ``_id`` knows nothing about owners.)"""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return action()
            except WriteError as error:
                if error.code != _DUPLICATE_KEY or time.monotonic() > deadline:
                    raise
            self.counts["copies waited for"] += 1
            time.sleep(0.05)

    def _prepared(self) -> None:
        """Prepared, left so for a moment while others write, then committed or aborted."""
        before = {key: (one.alive, dict(one.routed_by)) for key, one in self._documents.items()}
        statements = self._statements()
        transaction = self._router.transaction()
        commits = self._rng.random() < 0.6
        try:
            for statement in statements:
                statement.act(transaction)
            transaction.prepare()
            time.sleep(self._rng.random() * 0.03)
        except PyMongoError:
            commits = False  # a chunk moved, or two transactions wanted the same lock
        if commits:
            transaction.commit()
            self._remember(statements, transaction)
            self.counts["prepared and committed"] += 1
            return
        transaction.abort()
        for key, (alive, routed_by) in before.items():
            self._documents[key].alive, self._documents[key].routed_by = alive, routed_by
        self.counts["aborted"] += 1

    def _statements(self) -> list[_Statement]:
        statements = []
        for _ in range(self._rng.randint(1, 4)):
            document = self._pick()
            if document.alive and document.collection == _RANGED and self._rng.random() < 0.3:
                statements.append(self._deletion(document))
                document.routed_by = self._routing(_RANGED, document.id)
            statements.append(self._statement(document))
        return statements

    def _remember(self, statements: list[_Statement], transaction: Transaction | None = None) -> None:
        for statement in statements:
            wrote = statement.wrote._replace(transaction=transaction)
            self.history[f"{self._database}.{statement.collection}", statement.id].append(wrote)

    def _statement(self, document: _Document) -> _Statement:
        self._number += 1
        number, routed_by = self._number, dict(document.routed_by)
        namespace = f"{self._database}.{document.collection}"
        borrowed = {
            name: self._rng.choice(_ODD) for name in self._rng.sample(_BORROWED, self._rng.choice((0, 0, 1, 4)))
        }
        whole = {**routed_by, "v": number, "text": "x" * self._rng.randint(0, 60), **borrowed}
        if not document.alive:
            document.alive = True
            if self._rng.random() < 0.2:
                change = {"$set": {"v": number}}
                return _done(
                    document, "insert", number, lambda to: to.update_one(namespace, routed_by, change, upsert=True)
                )
            return _done(document, "insert", number, lambda to: to.insert_one(namespace, whole))
        kind = self._rng.random()
        if kind < 0.2:
            return self._deletion(document)
        if kind < 0.4:
            return _done(document, "replace", number, lambda to: to.replace_one(namespace, routed_by, whole))
        change = {"$set": {"v": number, f"f{number % 5}": [number], **borrowed}}
        return _done(document, "update", number, lambda to: to.update_one(namespace, routed_by, change))

    def _deletion(self, document: _Document) -> _Statement:
        document.alive = False
        namespace, routed_by = f"{self._database}.{document.collection}", dict(document.routed_by)
        return _done(document, "delete", None, lambda to: to.delete_one(namespace, routed_by))


def _done(
    document: _Document, operation: str, number: int | None, act: Callable[[Router | Transaction], object]
) -> _Statement:
    wrote = Wrote(operation, number, document.routed_by.get("region"))
    return _Statement(document.collection, document.id, wrote, act)


@dataclass
class RandomWorkload:
    """One seed's workload on one cluster, in a database of its own.

    ``steps`` for each of the ``writers``; ``adds_shard`` adds one shard half-way; ``removes_shard`` then takes one
    away, and may turn it off, and may add another replica set under its name; ``definitions`` creates, spreads and
    drops collections beside, which log equal times on several shards.
    """

    cluster: ShardedCluster
    seed: int
    steps: int = 150
    writers: int = 3
    adds_shard: bool = True
    removes_shard: bool = True
    definitions: bool = True
    database: str = ""
    _counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _failures: list[BaseException] = field(default_factory=list)
    _done: int = 0
    _leaving: str | None = None
    _former: dict[str, ReplicaSet] = field(default_factory=dict)
    _removed_at: dict[str, Timestamp] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.database = self.database or f"fuzz{self.seed}"

    @property
    def has_images(self) -> bool:
        """Whether the servers have pre- and post-images, and events of definitions."""
        return int(self.cluster.version.partition(".")[0]) >= 6

    def prepare(self) -> Timestamp:
        """Create the collections; the time at which the workload begins."""
        router, shards = self.cluster.router, list(self.cluster.shards)
        rng = random.Random(f"tailrace sharded cluster {self.seed}")
        router.create_database(self.database, rng.choice(shards))
        router.shard_collection(f"{self.database}.{_RANGED}", {"region": 1, "_id": 1})
        router.shard_collection(f"{self.database}.{_HASHED}", {"sku": "hashed"}, initial_chunks=2 * len(shards))
        # A transaction over several shards must not create a collection: the server refuses the commit (263).
        router.insert_one(f"{self.database}.{_PLAIN}", {"_id": "first"})
        if self.has_images:
            router.coll_mod(f"{self.database}.{_RANGED}", changeStreamPreAndPostImages={"enabled": True})
        for region in REGIONS[2::2]:
            router.split(f"{self.database}.{_RANGED}", {"region": region})
        begin = router.fence()
        return Timestamp(begin.time, begin.inc + 1)

    def run(self, start: Timestamp) -> Ran:
        """Write, move and add until the writers are done. Raises what went wrong in any of the threads."""
        writers = [_Writer(self, place) for place in range(self.writers)]
        ended = threading.Event()
        threads = [threading.Thread(target=self._guarded, args=(self._write, writer)) for writer in writers]
        mover = threading.Thread(target=self._guarded, args=(self._move, ended))
        for thread in (*threads, mover):
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        mover.join()
        if self._failures:
            raise self._failures[0]
        history: History = {}
        for writer in writers:
            history |= writer.history
            for name, count in writer.counts.items():
                self._counts[name] += count
        self._wake()
        end = self.cluster.router.fence()
        return Ran(self.seed, self.database, start, end, history, dict(self._counts), dict(self._removed_at))

    def _wake(self) -> None:
        """Let the former shards run again: they are asked for what they wrote."""
        for former in self._former.values():
            for number, member in enumerate(former.members):
                if not member.is_running:
                    former.restart(number)

    def fail(self, error: BaseException) -> None:
        """End ``run`` with ``error``, from any thread."""
        self._failures.append(error)

    def _guarded(self, action: Callable[[Any], None], argument: object) -> None:
        try:
            action(argument)
        except BaseException as error:  # noqa: BLE001  (raised by ``run``)
            self.fail(error)

    def _write(self, writer: _Writer) -> None:
        for _ in range(self.steps):
            if self._failures:
                return
            writer.step()
            self._done += 1

    def _move(self, ended: threading.Event) -> None:
        """Move chunks to and fro, add a shard half-way, create and drop collections; at least a few of each."""
        rng = random.Random(f"tailrace sharded mover {self.seed}")
        adds, removes = self.adds_shard, self.removes_shard
        rounds = 0
        while not self._failures and (adds or removes or not ended.is_set() or self._counts["moves"] < _MOVES_MIN):
            rounds += 1
            assert rounds < _ROUNDS_MAX, f"chunks do not move: {dict(self._counts)}"
            if adds and (self._done >= self.steps * self.writers // 2 or ended.is_set()):
                adds = False
                added = self.cluster.add_shard()
                self._counts["shards added"] += 1
                self._move_one(rng, to=added)
            elif not adds and removes and (self._done >= self.steps * self.writers * 2 // 3 or ended.is_set()):
                removes = not self._remove_one(rng)
            if self.definitions and rng.random() < 0.15:
                self._come_and_go(rng)
            self._move_one(rng)

    def _remove_one(self, rng: random.Random) -> bool:
        """Remove a shard, perhaps turn it off, and perhaps add another under its name. Returns false if it cannot be
        removed yet."""
        router = self.cluster.router
        primary = router.catalog.database(self.database)["primary"]
        if self._leaving is None:
            self._leaving = rng.choice([shard for shard in self.cluster.shards if shard != primary])
        name = self._leaving
        try:
            former = self.cluster.remove_shard(name)
        except EmbeddedError:
            self._counts["removals put off"] += 1  # transactions hold its chunks: the draining goes on next time
            return False
        self._counts["shards removed"] += 1
        self._former[former.uri], self._removed_at[former.uri] = former, native.removal(self.cluster, name)
        # 4.4 takes the keys of inserts from what it knows about the collection. A former shard that was restarted knows
        # nothing about it, and so no longer gives what it would have given.
        if rng.random() < 0.5 and not self.cluster.version.startswith("4.4"):
            time.sleep(rng.random())  # by then the streams may or may not have passed the removal
            former.kill()
            self._counts["former shards turned off"] += 1
        if rng.random() < 0.6:
            self.cluster.add_shard(name)
            self._counts["shards replaced"] += 1
            self._move_one(rng, to=name)
        return True

    def _move_one(self, rng: random.Random, *, to: str | None = None) -> None:
        router = self.cluster.router
        namespace = f"{self.database}.{rng.choice((_RANGED, _RANGED, _HASHED))}"
        chunks = router.table(namespace).chunks
        try:
            if namespace.endswith(_RANGED) and len(chunks) < _CHUNKS_MAX and rng.random() < 0.3:
                at = {"region": rng.choice(REGIONS), "_id": rng.randrange(3000)}
                if all(position(chunk.minimum) != position(at) for chunk in chunks):
                    router.split(namespace, at)
                    chunks = router.table(namespace).chunks
            chunk = rng.choice(chunks)
            others = [shard for shard in self.cluster.shards if shard != chunk.shard]
            target = to if to is not None and to != chunk.shard else rng.choice(others)
            bounds = (chunk.minimum, chunk.maximum)
            router.move_chunk(namespace, bounds=bounds, to=target, wait=rng.random() < 0.5)
        except OperationFailure:
            self._counts["moves refused"] += 1  # as a balancer's are: the next round tries another
        else:
            self._counts["moves"] += 1

    def _come_and_go(self, rng: random.Random) -> None:
        """Create a collection, spread it over two shards, write to it, perhaps rename it, and drop it on both at
        once."""
        router, (first, second, *_) = self.cluster.router, rng.sample(list(self.cluster.shards), 2)
        namespace = f"{self.database}.side{rng.randrange(1000)}"
        router.shard_collection(namespace, {"_id": 1})
        router.split(namespace, {"_id": 10})
        for low, shard in ((0, first), (10, second)):
            router.move_chunk(namespace, {"_id": low}, to=shard)
            router.insert_many(namespace, [{"_id": low + place} for place in range(3)])
        if rng.random() < 0.5 and self.cluster.router.dialect.coordinated:
            router.rename(namespace, f"{namespace}_renamed")
            namespace = f"{namespace}_renamed"
        router.drop_collection(namespace)
        self._counts["definitions"] += 1


def history_of(events: list[bytes], database: str) -> History:
    """What, according to a stream's events, was written to the writers' documents, in the stream's order."""
    history: History = defaultdict(list)
    for raw in events:
        event = bson.decode(raw)
        operation = event["operationType"]
        if operation not in ("insert", "update", "replace", "delete") or event["ns"]["db"] != database:
            continue
        if event["ns"]["coll"] not in (_RANGED, _HASHED, _PLAIN):
            continue
        number = None
        if operation in ("insert", "replace"):
            number = event["fullDocument"]["v"]
        elif operation == "update":
            number = event["updateDescription"]["updatedFields"]["v"]
        namespace = f"{database}.{event['ns']['coll']}"
        key = event["documentKey"]
        transaction = (event["lsid"]["id"], event["txnNumber"]) if "lsid" in event else None
        # 5.0 gives inserts without their shard key.
        region = key.get("region") or (event.get("fullDocument") or {}).get("region")
        history[namespace, key["_id"]].append(Wrote(operation, number, region, transaction))
    return dict(history)


def history_difference(written: History, seen: History) -> str | None:
    """The first document for which the stream differs from what was written, in words."""
    for key in sorted(set(written) | set(seen)):
        wrote, saw = _settled(written.get(key, [])), _settled(seen.get(key, []))
        if wrote != saw:
            lost = [one for one in wrote if one not in saw]
            return f"document {key}: written {wrote}, in the stream {saw}; lost {lost}"
    return None


def _settled(writes: list[Wrote]) -> list[tuple[str, int | None, str | None]]:
    """In comparable order. A transaction that deletes a document on one shard and inserts it on another is committed by
    each at its own time, so the two may come in either order; here they are put in a fixed one."""
    settled: list[Wrote] = []
    for _, run in groupby(enumerate(writes), key=lambda one: one[1].transaction or one[0]):
        settled += sorted((wrote for _, wrote in run), key=lambda wrote: wrote.region or "")
    return [(wrote.operation, wrote.number, wrote.region) for wrote in settled]
