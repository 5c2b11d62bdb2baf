"""What does one more stream cost, where thousands of tenants watch collections of their own through a gateway?

    python bench/fan_out.py                                      1 and 10,000 streams, 1,000 writes a second
    python bench/fan_out.py --streams 1 2000 --rate 200 --writes 2000
    python bench/fan_out.py --processes 1 2

There are 1,000 collections (`--collections`), and the writes go to them in turn. The streams are spread over them too,
so with 10,000 streams each write is an event for ten of them. With 1,000 writes a second the gateway sends 10,000
events a second, and a stream gets one event a second. (If every stream got every event, these would be ten million a
second.) Every second stream has a plain `$match` that all of its events pass. One client process has a connection for
each stream, whose getMore waits.

Twice as many writes as there are collections come before those that are measured: the compiled code is loaded then,
and every connection has its second getMore. For each line: mongod's CPU with the writes, the CPU of the gateway's
processes together, how many events were sent, and the gateway's CPU for each event and stream: all of it, from the
getMore's bytes to the reply's, less what it takes with one stream for the same writes.

The lines "bare" are a lower bound for anything in Python on asyncio: a server without a database and without any logic,
which has the same client with as many streams, and as often sends each waiting one the same bytes when its collection's
turn comes. (`--no-bare` leaves them out.) Compare the two on a machine that does other work, too.

A waiting stream has a connection of its own, as with any driver: a getMore that waits holds it. A mongod takes two
files for a connection; the gateway closes its own to the server for a stream that waits, so the client lets each stream
wait twice for a millisecond before the next ones are opened, and 10,000 streams fit into a limit of 20,000 open files.

Bars: mongod's CPU under 1.2 times that with one stream; under 0.05 ms of the gateway's CPU an event and stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

import bson
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
    parser.add_argument("--no-bare", action="store_true", help="leave out what a bare server takes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    many_files()
    if args.child:
        task = json.loads(args.child)
        return asyncio.run(serve_bare(task) if task.get("bare") else read(task))
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
        for count in [] if args.no_bare else args.streams[1:]:
            used, events = bare(count, args)
            print(f"{'bare':>9}{count:9}{'':11}{used:12.2f}{events:9}{1000 * used / max(events, 1):9.3f}", flush=True)
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
        print(gateway.log.read_text()[-2000:], file=sys.stderr)  # why it closed connections, if it did
        raise
    finally:
        gateway.close()
    return {"mongod": after[0] - before[0], "gateway": after[1] - before[1], "events": row["sent"]}


def bare(count: int, args: argparse.Namespace) -> tuple[float, int]:
    """The CPU, in seconds, of a server that only sends the same bytes, and how many events it sent."""
    task = {"bare": True, "rate": args.rate, "collections": args.collections}
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with FanOutChild({"address": address, "streams": count, "collections": args.collections}) as child:
            for writes in (2 * args.collections, args.writes):
                before = cpu_s([server.pid])
                server.stdin.write(f"{writes}\n")
                server.stdin.flush()
                row = child.take(writes)
                used = cpu_s([server.pid]) - before
        server.stdin.close()
    return used, int(row["sent"])


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
    """The client. Its streams differ only in their collections."""

    program = __file__

    def expected(self, writes: int) -> int:
        """How many events all streams together get from so many writes."""
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
            for _ in range(2):
                await stream.batch(1)
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


# ── a server that does nothing ───────────────────────────────────────────────────────────────────────────────────────


class BareProtocol(asyncio.BufferedProtocol):
    """Answers at once what opens a stream, and a getMore when its collection's turn comes."""

    def __init__(self, streams: dict[str, list[BareProtocol]], buffer: bytearray, event: bytes) -> None:
        self._streams, self._buffer, self._event = streams, memoryview(buffer), event
        self._head = b""
        #: The size of its getMores, once it is a stream that waits; and the number of events that came, less that of
        #: getMores.
        self._size = self._due = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        message = bytes(self._buffer[:nbytes])
        self._head = message[4:8]
        if nbytes != self._size:
            command = bson.decode(message[21:])
            if "aggregate" in command:
                self._streams.setdefault(command["aggregate"], []).append(self)
            if command.get("maxTimeMS", 1) == 1:
                batch = "nextBatch" if "getMore" in command else "firstBatch"
                self._send(bson.encode({"cursor": {batch: [], "id": bson.int64.Int64(1), "ns": ""}, "ok": 1.0}))
                return
            self._size = nbytes
        self._due -= 1
        if self._due >= 0:
            self._send(self._event)

    def give(self) -> None:
        self._due += 1
        if self._due <= 0:
            self._send(self._event)

    def _send(self, document: bytes) -> None:
        size = (21 + len(document)).to_bytes(4, "little")
        self._transport.write(b"".join([size, self._head, self._head, b"\xdd\x07\0\0\0\0\0\0\0", document]))


async def serve_bare(task: dict[str, Any]) -> int:
    streams: dict[str, list[BareProtocol]] = {}
    token = {"_data": "8" * 140}
    event = {"_id": token, "operationType": "insert", "fullDocument": {"at": 1.0, "text": "x" * 200}}
    event |= {"ns": {"db": DATABASE, "coll": "c100"}, "documentKey": {"_id": bson.ObjectId()}, "pad": "x" * 80}
    cursor = {"nextBatch": [event], "postBatchResumeToken": token, "id": bson.int64.Int64(1), "ns": DATABASE}
    reply = bson.encode({"cursor": cursor, "ok": 1.0, "$clusterTime": {"pad": "x" * 60}})
    buffer, loop = bytearray(1 << 16), asyncio.get_running_loop()
    server = await loop.create_server(lambda: BareProtocol(streams, buffer, reply), "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()
    print(f"{host}:{port}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        begun = loop.time()
        for number in range(int(line)):
            await asyncio.sleep(max(0.0, begun + number / task["rate"] - loop.time()))
            for stream in streams.get(f"c{number % task['collections']}", []):
                stream.give()
    return 0


if __name__ == "__main__":
    sys.exit(main())
