"""CPU time an event where the oplog is not one plain write after the other: transactions, chains of entries, commands.

    python bench/transactions.py [--events 60000] [--rounds 3]

Three workloads on one database, read by a stream on it: transactions of ten operations in one oplog entry; the same in
chains of three entries (the server is told to put four operations into an entry); and a new collection with an index
after every twenty writes. The sides are mongod's own change stream (its CPU time, from ``/proc``), the plain stages and
the kernel. In the first round the events of all three are compared byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator

import numpy as np
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import InsertOne, MongoClient, UpdateOne

from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.pipeline.kernel import KernelUse
from tailrace.pipeline.stream import ONE_OPLOG, open_stream
from tailrace.plan.options import StreamOptions
from tailrace.plan.plan import build_plan
from tailrace.plan.profile import profile_for
from tailrace.source.drive import answers_of, drive
from tailrace.source.mongod import MongodSource
from transform import BATCH_BYTES, DATABASE, document, measure, split

TRANSACTION = 10
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


class Sides:
    """The three sides of one workload; each gives the events' bytes."""

    def __init__(self, client: MongoClient, source: MongodSource, start: ClusterTime) -> None:
        self.client, self.source, self.start = client, source, start
        self.batches = list(source.read(ClusterTime(start - 1), source.newest(), batch_bytes_max=BATCH_BYTES))
        self.events = 0

    def native(self) -> Iterator[bytes]:
        stage = {"$changeStream": {"startAtOperationTime": self.start.to_timestamp()}}
        database = self.client.get_database(DATABASE, CodecOptions(RawBSONDocument))
        with database.aggregate([stage]) as cursor:
            for event in itertools.islice(cursor, self.events):
                yield event.raw

    def stream(self, kernel: KernelUse) -> Iterator[bytes]:
        stage = {"startAtOperationTime": self.start.to_timestamp()}
        options = StreamOptions.parse(Scope.of_database(DATABASE), stage)
        stream = open_stream(build_plan(options, profile_for(self.source.server_version)), kernel=kernel)
        answers = answers_of(self.source)
        for batch in self.batches:
            stream.feed(ONE_OPLOG, batch)
            for made in drive(stream, answers):
                yield made.buffer[made.offsets[0] : made.offsets[-1]].tobytes()

    def plain(self) -> Iterator[bytes]:
        return self.stream("never")

    def kernel(self) -> Iterator[bytes]:
        return self.stream("always")


def run(
    name: str, work: Callable[[MongoClient, int], None], parameters: dict[str, object], asked: int, rounds: int
) -> None:
    with (
        ReplicaSet(parameters=parameters) as replica_set,
        MongoClient(replica_set.uri) as client,
        contextlib.closing(MongodSource(replica_set.uri)) as source,
    ):
        pid = replica_set.members[0].pid
        start = source.newest().tick()
        work(client, asked)
        sides = Sides(client, source, start)
        ours = b"".join(sides.kernel())
        sides.events = sum(1 for _ in split(ours))
        for other in (sides.plain(), sides.native()):
            if not np.array_equal(np.frombuffer(ours, np.uint8), np.frombuffer(b"".join(other), np.uint8)):
                raise SystemExit(f"{name}: the events differ")
        took: dict[str, list[float]] = {"mongod": [], "plain": [], "kernel": []}
        for _ in range(rounds):
            took["mongod"].append(measure(sides.native, pid))
            took["plain"].append(measure(sides.plain, None))
            took["kernel"].append(measure(sides.kernel, None))
    mongod, plain, kernel = (statistics.median(took[side]) / sides.events * 1e6 for side in took)
    print(f"{name:34}{sides.events:9,}{mongod:10.2f}{plain:10.2f}{kernel:10.2f}{kernel / mongod:12.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{'CPU us an event':34}{'events':>9}{'mongod':>10}{'plain':>10}{'kernel':>10}{'of mongod':>12}")
    try:
        run("transactions of ten operations", transactions, {}, asked.events, asked.rounds)
        run("the same in chains of entries", transactions, CHAINED, asked.events, asked.rounds)
        run("a command after ten writes", commands, {}, asked.events, asked.rounds)
    except TailraceError as error:
        print(f"bench/transactions.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
