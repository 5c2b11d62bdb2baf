"""What does one more stream cost, where thousands of tenants watch collections of their own through a gateway?

    python bench/fan_out.py                                      1 and 10,000 streams, 1,000 writes a second
    python bench/fan_out.py --streams 1 2000 --rate 200 --writes 2000
    python bench/fan_out.py --processes 1 2

There are 1,000 collections (`--collections`), and the writes go to them in turn. The streams are spread over them
too, so with 10,000 streams each write is an event of ten, and with 1,000 writes a second the gateway sends 10,000
events a second; a stream gets one event a second. (If every stream got every event, these would be ten million a
second.) Every second stream has a plain `$match` that all of its events pass. One client process has a connection for
each stream, whose getMore waits.

Twice as many writes as there are collections come before those that are measured: the compiled code is loaded then,
and every connection has its second getMore. For each line: mongod's CPU with the writes, the CPU of the gateway's
processes together, how many events were sent, and the gateway's CPU for each event and stream: all of it, from the
getMore's bytes to the reply's, less what it takes with one stream for the same writes.

Bars: mongod's CPU under 1.2 times that with one stream; under 0.05 ms of the gateway's CPU an event and stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import pymongo

from streams import COLLECTIONS, DATABASE, cpu_s
from tailrace.embedded import ReplicaSet
from watchers import Child, Gateway, compile_kernel, settle, told
from wire_client import WireConnection, WireStream, many_files

_BAR_CPU: Final = 1.2
_BAR_MS: Final = 0.05
_AT_ONCE: Final = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10_000])
    parser.add_argument("--writes", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=1_000.0, help="writes a second")
    parser.add_argument("--collections", type=int, default=COLLECTIONS)
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="of the gateway")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    many_files()
    if args.child:
        return asyncio.run(read(json.loads(args.child)))
    compile_kernel()
    good = True
    with ReplicaSet(1, oplog_size_mb=2000) as replica_set, pymongo.MongoClient[Any](replica_set.uri) as client:
        for number in range(args.collections):
            client[DATABASE].create_collection(f"c{number}")
        print(f"{args.writes} writes at {args.rate:.0f}/s to {args.collections} collections in turn\n")
        print(f"{'processes':>9}{'streams':>9}{'mongod, s':>11}{'gateway, s':>12}{'events':>9}{'ms each':>9}")
        for processes in args.processes:
            one: dict[str, float] | None = None
            for count in args.streams:
                row = measure(client, replica_set, count, processes, args)
                one = one or row
                events = row["events"] - one["events"]
                each = 1000 * (row["gateway"] - one["gateway"]) / events if events else 0.0
                print(
                    f"{processes:9}{count:9}{row['mongod']:11.2f}{row['gateway']:12.2f}{row['events']:9.0f}{each:9.3f}",
                    flush=True,
                )
                if events:
                    good &= told(
                        f"mongod: {row['mongod'] / one['mongod']:.2f} times that with one stream",
                        row["mongod"] < _BAR_CPU * one["mongod"],
                    )
                    good &= told(f"{each:.3f} ms an event and stream", each < _BAR_MS)
    return 0 if good else 1


def measure(
    client: pymongo.MongoClient[Any], replica_set: ReplicaSet, count: int, processes: int, args: argparse.Namespace
) -> dict[str, float]:
    mongod = replica_set.members[0].pid or 0
    settle(mongod)
    gateway = Gateway(replica_set.uri, "--processes", str(processes))
    try:
        with FanOutChild({"address": gateway.address, "streams": count, "collections": args.collections}) as child:
            write(client, 2 * args.collections, args.rate, args.collections)
            child.take(2 * args.collections)
            time.sleep(1.0)
            before = cpu_s([mongod]), cpu_s(family(gateway.process.pid))
            write(client, args.writes, args.rate, args.collections)
            row = child.take(args.writes)
            after = cpu_s([mongod]), cpu_s(family(gateway.process.pid))
    except SystemExit:
        print(gateway.log.read_text()[-2000:], file=sys.stderr)  # its reasons, where it closed connections
        raise
    finally:
        gateway.close()
    return {"mongod": after[0] - before[0], "gateway": after[1] - before[1], "events": row["sent"]}


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def write(client: pymongo.MongoClient[Any], writes: int, rate: float, collections: int) -> None:
    begun = time.monotonic()
    for number in range(writes):
        time.sleep(max(0.0, begun + number / rate - time.monotonic()))
        client[DATABASE][f"c{number % collections}"].insert_one({"at": time.monotonic(), "text": "x" * 200})


class FanOutChild(Child):
    """The client, whose streams all are told apart by their collection alone."""

    program = __file__

    def expected(self, writes: int) -> int:
        """How many events all streams together get of so many writes."""
        streams, collections = int(self._task["streams"]), int(self._task["collections"])
        watchers = [streams // collections + (number < streams % collections) for number in range(collections)]
        return sum(watchers[number % collections] for number in range(writes))


# ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def read(task: dict[str, Any]) -> int:
    host, _, port = task["address"].rpartition(":")
    room = asyncio.Semaphore(_AT_ONCE)
    seen = [0]

    async def opened(number: int) -> WireStream:
        async with room:
            stages = [{"$match": {"operationType": "insert"}}] if number % 2 else []
            connection = await WireConnection.to(host, int(port))
            stream = WireStream(connection, DATABASE, f"c{number % task['collections']}", stages)
            await stream.open()
            return stream

    async def follow(stream: WireStream) -> None:
        while True:
            count = len(await stream.batch())  # apart: others count meanwhile
            seen[0] += count

    streams = await asyncio.gather(*(opened(number) for number in range(task["streams"])))
    tasks = [asyncio.create_task(follow(stream)) for stream in streams]
    print("ready", flush=True)
    while wanted := await asyncio.to_thread(sys.stdin.readline):
        while seen[0] < int(wanted) and not any(each.done() for each in tasks):
            await asyncio.sleep(0.05)
        for each in tasks:
            if each.done():
                each.result()
        print(json.dumps({"events": seen[0], "sent": seen[0]}), flush=True)
        seen[0] = 0
    for each in tasks:
        each.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
