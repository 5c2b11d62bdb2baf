"""What does a console cost while somebody looks at it, at 1,000 events a second and with 500 streams at a gateway?

    python bench/console.py                                  30 s at 1,000 events a second, 500 streams
    python bench/console.py --rate 100 --streams 10
    python bench/console.py --images                         and collections that keep pre- and post-images

A mongod, a gateway with streams that wait on collections of their own, a writer (half inserts, half updates, of ten
collections), and ``tailrace console`` with one page that reads what it is sent, are processes of their own. The figure
is the console's CPU beside the time that has passed. Bar: 5 % of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import pymongo

from streams import cpu_s
from tailrace.cli.stream_arguments import address_of
from tailrace.embedded import ReplicaSet
from watchers import Gateway, compile_kernel, told
from wire_client import WireConnection, WireStream, many_files

_BAR: Final = 0.05
_DATABASE: Final = "bench"
_COLLECTIONS: Final = 10
#: Writes are sent in so many groups a second, so that the writer keeps up.
_GROUPS: Final = 20
_WARM_UP_S: Final = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, default=1000, help="events a second")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--images", action="store_true", help="collections keep pre- and post-images")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "WHERE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    many_files()
    if args.child:
        what, where = args.child
        return write(where, args.rate) if what == "write" else asyncio.run(wait(where, args.streams))
    compile_kernel()
    with ReplicaSet(1, oplog_size_mb=2000) as replica_set, pymongo.MongoClient[Any](replica_set.uri) as client:
        kept = {"changeStreamPreAndPostImages": {"enabled": True}} if args.images else {}
        for number in range(_COLLECTIONS):
            client[_DATABASE].create_collection(f"c{number}", **kept)
        gateway = Gateway(replica_set.uri)
        children = [child("wait", gateway.address, args), child("write", replica_set.uri, args)]
        try:
            wait_for_streams(gateway.address, args.streams)
            used, seen = measured(replica_set.uri, gateway.address, args.seconds)
        finally:
            for one in children:
                one.kill()
            gateway.close()
    images = ", with images" if args.images else ""
    print(f"{args.rate} events a second{images}, {args.streams} streams, a page that gets {seen / 1e3:.1f} kB/s")
    return 0 if told(f"the console takes {used:.1%} of a core", used <= _BAR) else 1


def child(what: str, where: str, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    counts = ["--rate", str(args.rate), "--streams", str(args.streams)]
    return subprocess.Popen([sys.executable, __file__, "--child", what, where, *counts])


def write(uri: str, rate: int) -> int:
    """Insert and update until killed."""
    with pymongo.MongoClient[Any](uri) as client:
        begun, number = time.monotonic(), 0
        for group in range(1 << 30):
            time.sleep(max(0.0, begun + group / _GROUPS - time.monotonic()))
            there = client[_DATABASE][f"c{group % _COLLECTIONS}"]
            some = range(number, number + rate // _GROUPS // 2)
            number = some.stop
            there.insert_many([{"_id": one, "text": "x" * 200, "price": one / 7} for one in some])
            there.bulk_write([pymongo.UpdateOne({"_id": one}, {"$set": {"state": "paid"}}) for one in some])
    return 0


async def wait(address: str, count: int) -> int:
    """Streams at a gateway, on collections of their own in which nothing happens."""
    streams = []
    for number in range(count):
        connection = await WireConnection.to(*address_of(address, "--child"))
        streams.append(WireStream(connection, _DATABASE, f"quiet{number}"))
        await streams[-1].open()

    async def follow(stream: WireStream) -> None:
        while True:
            await stream.batch(10_000)

    await asyncio.gather(*map(follow, streams))
    return 0


def wait_for_streams(gateway: str, count: int) -> None:
    with pymongo.MongoClient[Any](f"mongodb://{gateway}/") as client:
        while len(client.admin.command("tailraceStreams")["streams"]) < count:
            time.sleep(0.2)


def measured(uri: str, gateway: str, seconds: float) -> tuple[float, float]:
    """The console's share of a core, and the bytes a second that its page gets."""
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    with log.open("w") as sink:
        console = subprocess.Popen(
            [sys.executable, "-m", "tailrace", "console", uri, "--listen", "127.0.0.1:0",
             "--gateway", f"mongodb://{gateway}/"],
            stderr=sink,
        )  # fmt: skip
    try:
        while (found := re.search(r"http://(127\.0\.0\.1:\d+)/", log.read_text())) is None:
            if console.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        received = [0]
        threading.Thread(target=look, args=(found[1], received), daemon=True).start()
        time.sleep(_WARM_UP_S)
        before, at, got = cpu_s([console.pid]), time.monotonic(), received[0]
        time.sleep(seconds)
        passed = time.monotonic() - at
        return (cpu_s([console.pid]) - before) / passed, (received[0] - got) / passed
    finally:
        console.terminate()
        console.wait()
        log.unlink()


def look(address: str, received: list[int]) -> None:
    """Read as an open page does."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/api/live")
    answer = connection.getresponse()
    while data := answer.read1(1 << 16):
        received[0] += len(data)


if __name__ == "__main__":
    sys.exit(main())
