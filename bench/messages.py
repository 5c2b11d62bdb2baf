"""How many changes a second become messages, one request for each change and several changes in a request?

    python bench/messages.py [--changes 5000] [--rounds 3] [--brokers redis,nats,kafka]

A listener with a commit every 100 changes publishes the same backlog of inserts to a real redis-server (appendfsync
always and everysec), a real nats-server with JetStream, and the mock cluster inside Kafka's client. "One by one" hands
the relay one change at a time, as any other handler; "together" hands it whatever has come by then. Sides take turns;
medians, counted from the first message to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tailrace
from tailrace.consumer import Listener, MemoryLeaseStore
from tailrace.consumer.messages import ChangeMessages, MessageRelay
from tailrace.embedded import ReplicaSet

#: A broker that is ready: gives publishers, each to be closed.
Publishers = Callable[[], Any]


@contextmanager
def running(program: str, directory: Path, *arguments: str) -> Iterator[int]:
    """A server process of Debian's package on a free port, which replaces PORT in the arguments."""
    found = shutil.which(program, path=f"/usr/sbin:/usr/bin:{os.environ.get('PATH', '')}")
    if found is None:
        raise SystemExit(f"{program} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    directory.mkdir()
    command = [found, *(one.replace("PORT", str(port)).replace("DIR", str(directory)) for one in arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def redis_broker(directory: Path, fsync: str) -> Iterator[Publishers]:
    """Redis that writes what it acknowledges as ``fsync`` says."""
    from tailrace.consumer.messages.redis_streams import RedisPublisher  # noqa: PLC0415

    options = ["--port", "PORT", "--bind", "127.0.0.1", "--dir", "DIR", "--save", "", "--appendonly", "yes"]
    with running("redis-server", directory, *options, "--appendfsync", fsync) as port:
        yield lambda: RedisPublisher(f"redis://127.0.0.1:{port}/0")


@contextmanager
def nats_broker(directory: Path) -> Iterator[Publishers]:
    """NATS with a stream on disk."""
    import nats  # noqa: PLC0415

    from tailrace.consumer.messages.nats_jetstream import NatsPublisher  # noqa: PLC0415

    with running("nats-server", directory, "-a", "127.0.0.1", "-p", "PORT", "-js", "-sd", "DIR") as port:
        url = f"nats://127.0.0.1:{port}"

        async def add_stream() -> None:
            client = await nats.connect(url)
            # No duplicate window: each round publishes the same changes.
            await client.jetstream().add_stream(name="ORDERS", subjects=["orders"], duplicate_window=0.1)
            await client.close()

        asyncio.run(add_stream())
        yield lambda: NatsPublisher(url)


@contextmanager
def kafka_broker(_directory: Path) -> Iterator[Publishers]:
    """The mock cluster of three brokers."""
    from confluent_kafka import Producer  # noqa: PLC0415

    from tailrace.consumer.messages.kafka import KafkaPublisher  # noqa: PLC0415

    owner = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3, "log_level": 0})
    brokers = owner.list_topics(timeout=30).brokers.values()
    servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    yield lambda: KafkaPublisher(servers)
    owner.flush(5)


BROKERS: dict[str, Callable[[Path], Any]] = {
    "redis, fsync always": lambda directory: redis_broker(directory, "always"),
    "redis, fsync each second": lambda directory: redis_broker(directory, "everysec"),
    "nats": nats_broker,
    "kafka (mock)": kafka_broker,
}


def rate(orders: Any, publisher: Any, changes: int, *, together: bool) -> float:
    """Changes a second."""
    relay = MessageRelay(publisher, ChangeMessages("orders"))
    handler: Any = relay if together else relay.__call__  # a plain function is given one change at a time
    # All orders are made beforehand: the listener starts at the oldest entry, with a store of its own.
    listener = Listener(orders, handler, resource="bench", store=MemoryLeaseStore(), commit_every=100)
    with listener:
        while listener.statistics.handled == 0:
            time.sleep(0.001)
        first, begin = listener.statistics.handled, time.monotonic()
        while listener.statistics.handled < changes:
            time.sleep(0.001)
        seconds = time.monotonic() - begin
    publisher.close()
    return (changes - first) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--brokers", default="", help="only those whose name has this in it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ReplicaSet(1) as members, tailrace.connect(members.uri) as client:
        orders = client["shop"]["orders"]
        orders.insert_many([{"_id": n, "name": "x" * 200} for n in range(args.changes)])
        print(
            f"{args.changes:,} changes, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians of {args.rounds}"
        )
        print(f"{'':30}{'one by one':>12}{'together':>12}{'ratio':>8}   changes/s")
        for number, (name, broker) in enumerate(BROKERS.items()):
            if args.brokers not in name:
                continue
            with broker(Path(scratch) / str(number)) as publishers:
                found: dict[bool, list[float]] = {False: [], True: []}
                for _ in range(args.rounds):
                    for together, rates in found.items():
                        rates.append(rate(orders, publishers(), args.changes, together=together))
            single, many = (statistics.median(found[together]) for together in (False, True))
            print(f"{name:30}{single:>12,.0f}{many:>12,.0f}{many / single:>8.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
