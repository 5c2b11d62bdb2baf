"""CPU time an event where the oplog is not one plain write after the other: transactions, chains of entries, commands.

    python bench/transactions.py [--events 60000] [--rounds 3]

Workloads on one database, read by a stream on it: transactions of ten operations in one oplog entry; the same in
chains of three entries (the server is told to put four operations into an entry); the same prepared, as transactions
over several shards are; a new collection with an index after every twenty writes, also with ``showExpandedEvents``; and
half inserts, half updates in runs of fifty on three servers, whose oplogs are merged. The sides are mongod's own change
stream (its CPU time, from ``/proc``; of the three servers, their streams without a merge), the plain stages and the
kernel. In the first round the events of all three are compared byte for byte. The bar is 0.15 of mongod's in every
line; exit status 1 where one is missed. ``bench/transform.py`` has these lines too.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import InsertOne, MongoClient, UpdateOne

from sides import BATCH_BYTES, COLLECTION, DATABASE, HEADER, Row, document, measure, mongod_cpu_s, split, text
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.merge import MergedStream
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.read.source.drive import answers_of, drive
from tailrace.read.source.mongod import MongodSource

Options: TypeAlias = Mapping[str, Any]

TRANSACTION = 10
RUN = 50
#: The server's parameter for chains.
CHAINED = {"maxNumberOfTransactionOperationsInSingleOplogEntry": 4}


def transactions(client: MongoClient, events: int) -> None:
    """Transactions of five inserts and five updates."""
    rng = random.Random(7)
    orders = client[DATABASE]["orders"]
    client[DATABASE].create_collection("orders")
    with client.start_session() as session:
        for number in range(events // TRANSACTION):
            new = [document(rng, number) for _ in range(TRANSACTION // 2)]
            with session.start_transaction():
                orders.insert_many(new, session=session)
                changes = [UpdateOne({"_id": one["_id"]}, {"$set": {"state": "paid"}}) for one in new]
                orders.bulk_write(changes, session=session)


def prepared(client: MongoClient, events: int) -> None:
    """The same transactions, each prepared before it is committed."""
    rng = random.Random(7)
    client[DATABASE].create_collection("orders")
    lsid = {"id": Binary(rng.randbytes(16), 4)}
    for number in range(events // TRANSACTION):
        fields = {"lsid": lsid, "txnNumber": Int64(number + 1), "autocommit": False}
        new = [document(rng, number) for _ in range(TRANSACTION // 2)]
        changes = [{"q": {"_id": one["_id"]}, "u": {"$set": {"state": "paid"}}} for one in new]
        client[DATABASE].command({"insert": "orders", "documents": new, "startTransaction": True, **fields})
        client[DATABASE].command({"update": "orders", "updates": changes, **fields})
        majority = {**fields, "writeConcern": {"w": "majority"}}
        reply = client.admin.command({"prepareTransaction": 1, **majority})
        client.admin.command({"commitTransaction": 1, "commitTimestamp": reply["prepareTimestamp"], **majority})


def commands(client: MongoClient, events: int) -> None:
    """A new collection and an index after every twenty inserts."""
    rng = random.Random(7)
    database = client[DATABASE]
    for number in range(events // 20):
        database["orders"].bulk_write([InsertOne(document(rng, number)) for _ in range(20)])
        database.create_collection(f"c{number % 50}")
        database[f"c{number % 50}"].create_index("total")
        if number % 50 == 49:
            for other in range(50):
                database.drop_collection(f"c{other}")


def in_turns(clients: list[MongoClient], events: int) -> None:
    """Half inserts, half updates, in runs of fifty writes on one server after the other, whose clocks hear of each
    other as those of a cluster's shards do."""
    rng = random.Random(7)
    heard: Mapping[str, Any] | None = None
    for number in range(events // RUN):
        client = clients[number % len(clients)]
        new = [document(rng, number) for _ in range(RUN // 2)]
        changes = [UpdateOne({"_id": one["_id"]}, {"$set": {"state": "paid", "note": text(rng, 150)}}) for one in new]
        with client.start_session() as session:
            if heard is not None:
                session.advance_cluster_time(heard)
            client[DATABASE][COLLECTION].bulk_write([*map(InsertOne, new), *changes], session=session)
            heard = session.cluster_time


class Sides:
    """The three sides of one workload; each gives the events' bytes."""

    def __init__(self, client: MongoClient, source: MongodSource, start: ClusterTime, options: Options) -> None:
        self.client, self.source, self.start, self.options = client, source, start, options
        self.batches = list(source.read(ClusterTime(start - 1), source.newest(), batch_bytes_max=BATCH_BYTES))
        self.events = 0

    def native(self) -> Iterator[bytes]:
        stage = {"$changeStream": {"startAtOperationTime": self.start.to_timestamp(), **self.options}}
        database = self.client.get_database(DATABASE, CodecOptions(RawBSONDocument))
        with database.aggregate([stage]) as cursor:
            for event in itertools.islice(cursor, self.events):
                yield event.raw

    def stream(self, kernel: KernelUse) -> Iterator[bytes]:
        stream = open_stream(plan_of(self.start, self.source, self.options), kernel=kernel)
        answers = answers_of(self.source)
        for batch in self.batches:
            stream.feed(ONE_OPLOG, batch)
            for made in drive(stream, answers):
                yield made.buffer[made.offsets[0] : made.offsets[-1]].tobytes()

    def plain(self) -> Iterator[bytes]:
        return self.stream("never")

    def kernel(self) -> Iterator[bytes]:
        return self.stream("always")


class MergedSides:
    """The same of several servers, whose events are merged."""

    def __init__(self, parts: list[Sides], start: ClusterTime) -> None:
        self.parts, self.start, self.events = parts, start, 0

    def native(self) -> Iterator[bytes]:
        for part in self.parts:
            part.events = part.events or sum(1 for _ in split(b"".join(part.kernel())))
        yield from heapq.merge(*(part.native() for part in self.parts), key=token_of)

    def stream(self, kernel: KernelUse) -> Iterator[bytes]:
        parts = {f"shard{number}": part for number, part in enumerate(self.parts)}
        stream = MergedStream(plan_of(self.start, self.parts[0].source, {}), parts, kernel=kernel)
        waiting = {name: iter(part.batches) for name, part in parts.items()}
        answers = answers_of(self.parts[0].source)
        ends = max(part.batches[-1].high_water for part in self.parts)
        while not stream.invalidated:
            for made in drive(stream, answers):
                yield made.buffer[made.offsets[0] : made.offsets[-1]].tobytes()
            name = next(iter(stream.waiting_for), None)
            batch = None if name is None else next(waiting[name], None)
            if name is None or (batch is None and stream.high_water >= ends):
                return
            # A part that was read to its end promises that nothing more will come.
            stream.feed(name, OplogBatch(b"", ends) if batch is None else batch)

    def plain(self) -> Iterator[bytes]:
        return self.stream("never")

    def kernel(self) -> Iterator[bytes]:
        return self.stream("always")


def plan_of(start: ClusterTime, source: MongodSource, options: Options) -> Plan:
    stage = {"startAtOperationTime": start.to_timestamp(), **options}
    return build_plan(StreamOptions.parse(Scope.of_database(DATABASE), stage), profile_for(source.server_version))


def token_of(event: bytes) -> bytes:
    token = raw_bson.find(event, b"_id")
    assert token is not None
    return event[token.value_start : token.end]


def run_merged(name: str, servers: int, asked: int, rounds: int) -> Row:
    with contextlib.ExitStack() as opened:
        sets = [opened.enter_context(ReplicaSet()) for _ in range(servers)]
        clients = [opened.enter_context(MongoClient(one.uri)) for one in sets]
        sources = [opened.enter_context(contextlib.closing(MongodSource(one.uri))) for one in sets]
        time.sleep(1)  # so that every oplog has an entry from before the start
        for client in clients:
            client[DATABASE]["ready"].insert_one({})
        start = max(source.newest() for source in sources).tick()
        time.sleep(1)
        in_turns(clients, asked)
        parts = [Sides(client, source, start, {}) for client, source in zip(clients, sources, strict=True)]
        return compare_and_measure(name, MergedSides(parts, start), [one.members[0].pid for one in sets], rounds)


def run(
    name: str,
    work: Callable[[MongoClient, int], None],
    asked: int,
    rounds: int,
    *,
    options: Options | None = None,
    **deployment: Any,
) -> Row:
    with (
        ReplicaSet(**deployment) as replica_set,
        MongoClient(replica_set.uri) as client,
        contextlib.closing(MongodSource(replica_set.uri)) as source,
    ):
        start = source.newest().tick()
        work(client, asked)
        sides = Sides(client, source, start, options or {})
        return compare_and_measure(name, sides, [replica_set.members[0].pid], rounds)


def compare_and_measure(name: str, sides: Sides | MergedSides, pids: Sequence[int | None], rounds: int) -> Row:
    ours = b"".join(sides.kernel())
    sides.events = sum(1 for _ in split(ours))
    for other in (sides.plain(), sides.native()):
        if not np.array_equal(np.frombuffer(ours, np.uint8), np.frombuffer(b"".join(other), np.uint8)):
            raise SystemExit(f"{name}: the events differ")
    took: dict[str, list[float]] = {"mongod": [], "plain": [], "kernel": []}
    for _ in range(rounds):
        before = sum(mongod_cpu_s(pid) for pid in pids if pid is not None)
        for _ in sides.native():
            pass
        took["mongod"].append(sum(mongod_cpu_s(pid) for pid in pids if pid is not None) - before)
        took["plain"].append(measure(sides.plain, None))
        took["kernel"].append(measure(sides.kernel, None))
    return Row(name, {side: [s / sides.events * 1e6 for s in times] for side, times in took.items()})


def transaction_rows(events: int, rounds: int, only: str = "") -> Iterator[Row]:
    """The lines, as they are measured; ``only`` those whose name has these words."""
    size = events, rounds
    lines: dict[str, Callable[[str], Row]] = {
        "transactions of ten operations": lambda name: run(name, transactions, *size),
        "transactions in chains of entries": lambda name: run(name, transactions, *size, parameters=CHAINED),
        "transactions, prepared": lambda name: run(name, prepared, *size, enable_test_commands=True),
        "commands (DDL) among writes": lambda name: run(name, commands, *size),
        "commands, showExpandedEvents": lambda name: run(name, commands, *size, options={"showExpandedEvents": True}),
        "three oplogs merged": lambda name: run_merged(name, 3, *size),
    }
    for name, line in lines.items():
        if only in name:
            yield line(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(HEADER)
    met = True
    try:
        for row in transaction_rows(asked.events, asked.rounds):
            print(row, flush=True)
            met &= row.is_met
    except TailraceError as error:
        print(f"bench/transactions.py: {error}", file=sys.stderr)
        return 1
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
