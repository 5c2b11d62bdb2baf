"""What do many watchers cost through the gateway, each on a collection of its own, beside native streams?

    python bench/watchers.py                                     1, 10, 100, 1,000 and 10,000 streams
    python bench/watchers.py --streams 1 1000 --native-max 100
    python bench/watchers.py --streams 10 --rounds 3             medians of three; the sides take turns to go first

The same writes for every number of streams: half of them to the first stream's collection, the others to 1,000
collections in turn. One client, the same for both sides, has a connection for each stream, whose getMore waits; the
client, the writer, the gateway and mongod are processes of their own. For each line: mongod's CPU less what the writes
cost without any stream, the gateway's CPU, milliseconds from before the write to the event in the client, and what the
gateway has in memory for a quiet stream and its two connections.

Bars: mongod's CPU with 1,000 streams under 1.2 times that with one; under 100 kB a quiet stream; from 10 streams on,
mongod and gateway together cheaper than native. The last is judged within each round: what native streams cost mongod,
minus what the gateway's streams cost both. The cost of the writes is in both figures and changes from round to round.
Both sides are warm when they are measured: the kernel is compiled before the first gateway starts, and before the
measured writes come as many others as a gateway looks at before it chooses what it reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pymongo

from streams import COLLECTIONS, DATABASE, cpu_s, place, write
from tailrace.embedded import ReplicaSet
from wire_client import WireConnection, WireStream, delay_ms, many_files

SIDES: Final = ("native", "gateway")
_BAR_CPU: Final = 1.2
_BAR_KB: Final = 100.0
#: Writes before those that are measured.
_WARM_UP: Final = 600
_AT_ONCE: Final = 50
#: Seconds of CPU that an idle server may take in a second and a half.
_QUIET_S: Final = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 100, 1000, 10_000])
    parser.add_argument("--native-max", type=int, default=1000, help="how many native streams at most")
    parser.add_argument("--writes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=200.0, help="writes a second")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    many_files()
    if args.child:
        return asyncio.run(read(json.loads(args.child)))
    compile_kernel()
    with ReplicaSet(1, oplog_size_mb=2000) as replica_set, pymongo.MongoClient[Any](replica_set.uri) as client:
        mongod = replica_set.members[0].pid
        assert mongod is not None
        for number in range(COLLECTIONS):
            client[DATABASE].create_collection(f"c{number}")
        write(client, 200, args.rate)
        print(f"{args.writes} writes at {args.rate:.0f}/s\n")
        print(
            f"{'streams':>8} {'side':8}{'mongod, s':>10}{'with writes':>12}{'gateway, s':>11}{'p50 ms':>8}{'p99 ms':>9}"
            f"{'kB each':>9}"
        )
        found: dict[tuple[str, int], list[dict[str, float]]] = {}
        bares = []
        for number in range(args.rounds):
            settle(mongod)
            # What the writes cost alone changes with the machine: it is measured beside every round.
            bares.append(cost([mongod], lambda: write(client, args.writes, args.rate))[0])
            print(f"without a stream the writes cost mongod {bares[-1]:.2f} s of CPU")
            for count in args.streams:
                for side in SIDES[:: -1 if number % 2 else 1]:
                    if side == "gateway" or count <= args.native_max:
                        row = measure(client, replica_set, side, count, writes=args.writes, rate=args.rate)
                        found.setdefault((side, count), []).append(row)
                        print(line(side, count, row, bares[-1]), flush=True)
        bare = statistics.median(bares)
        rows = {
            place: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            for place, rounds in found.items()
        }
        if args.rounds > 1:
            print(f"\nmedians; without a stream {bare:.2f} s, from {min(bares):.2f} to {max(bares):.2f}")
            for (side, count), row in rows.items():
                print(line(side, count, row, bare))
        return verdict(rows, bare, spread(found))


def compile_kernel() -> None:
    """Compile the kernel of this installation, which takes up to minutes once. A gateway that starts before that makes
    events in plain Python, reads in a thread, and loads the compiled code beside its work."""
    loading = (
        "import time; from tailrace.watch.client import kernel_loader as loader; loader.prepare()\n"
        "while not (loader.is_ready(1) or loader.is_missing()): time.sleep(0.1)"
    )
    subprocess.run([sys.executable, "-c", loading], check=True)


def line(side: str, count: int, row: dict[str, float], bare: float) -> str:
    return (
        f"{count:8} {side:8}{row['mongod'] - bare:10.2f}{row['mongod']:12.2f}{row['gateway']:11.2f}"
        f"{row['p50']:8.2f}{row['p99']:9.2f}{row['kB']:9.1f}"
    )


def spread(found: dict[tuple[str, int], list[dict[str, float]]]) -> dict[int, float]:
    """How much less than native streams the gateway and mongod took, by the number of streams: the median of the
    rounds. The writes' own cost is in both."""
    medians = {}
    for (side, count), rounds in found.items():
        if side == "gateway" and ("native", count) in found:
            natives = found["native", count]
            spared = [
                native["mongod"] - ours["mongod"] - ours["gateway"]
                for ours, native in zip(rounds, natives, strict=True)
            ]
            medians[count] = statistics.median(spared)
            shown = " ".join(f"{one:+.2f}" for one in spared)
            print(f"{count} streams: saved {medians[count]:+.2f} s of CPU (rounds: {shown})")
    return medians


def verdict(rows: dict[tuple[str, int], dict[str, float]], bare: float, spared: dict[int, float]) -> int:
    good = True
    if ("gateway", 1000) in rows and ("gateway", 1) in rows:
        ratio = rows["gateway", 1000]["mongod"] / rows["gateway", 1]["mongod"]
        good &= told(f"mongod's CPU with 1,000 streams / with one: {ratio:.2f}", ratio < _BAR_CPU)
    for count in sorted({count for _, count in rows}):
        ours, native = rows.get(("gateway", count)), rows.get(("native", count))
        if ours and count >= 100:
            good &= told(f"{count} streams: {ours['kB']:.0f} kB of the gateway's memory each", ours["kB"] < _BAR_KB)
        if ours and native and count >= 10:
            alone = native["mongod"] - bare
            both = alone - spared[count]
            good &= told(
                f"{count} streams: {both:.2f} s of CPU for {alone:.2f} s native, {both / alone:.2f} times", both < alone
            )
    return 0 if good else 1


def told(what: str, good: bool) -> bool:
    print(f"{what} ({'met' if good else 'MISSED'})")
    return good


class Gateway:
    """``tailrace gateway`` in a process of its own."""

    def __init__(self, uri: str, *more: str) -> None:
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tailrace", "gateway", "--upstream", uri, "--listen", "127.0.0.1:0", *more],
                stdout=sink,
                stderr=sink,
            )
        while (found := re.search(r"listening at (\S+:\d+)", self.log.read_text())) is None:
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.05)
        self.address = found[1]

    def resident_kb(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.unlink()


def measure(
    client: pymongo.MongoClient[Any], replica_set: ReplicaSet, side: str, count: int, *, writes: int, rate: float
) -> dict[str, float]:
    settle(replica_set.members[0].pid or 0)
    gateway = Gateway(replica_set.uri) if side == "gateway" else None
    try:
        pids = [replica_set.members[0].pid or 0] + ([gateway.process.pid] if gateway else [])
        address = gateway.address if gateway else replica_set.members[0].host
        task = {"address": address, "streams": 3}
        if gateway:  # what every gateway has, however many streams
            with Child(task) as child:
                write(client, _WARM_UP, 4 * rate)
                child.take(_WARM_UP)
            before = gateway.resident_kb()
        with Child({**task, "streams": count}) as child:
            quiet_kb = (gateway.resident_kb() - before) / count if gateway else 0.0
            write(client, _WARM_UP, 2 * rate)
            child.take(_WARM_UP)
            time.sleep(1.0)
            used = cost(pids, lambda: write(client, writes, rate))
            row = child.take(writes)
    finally:
        if gateway:
            gateway.close()
    return {"mongod": used[0], "gateway": sum(used[1:]), "kB": quiet_kb, **row}


def settle(pid: int) -> None:
    """Wait until a server has cleaned up the streams of clients that have gone: a thousand native ones leave it work to
    do."""
    limit = time.monotonic() + 120
    while cost([pid], lambda: time.sleep(1.0))[0] > _QUIET_S and time.monotonic() < limit:
        pass


def cost(pids: list[int], work: Any) -> list[float]:
    """Seconds of CPU of each process while ``work`` runs, and half a second longer."""
    before = [cpu_s([pid]) for pid in pids]
    work()
    time.sleep(0.5)
    return [cpu_s([pid]) - one for pid, one in zip(pids, before, strict=True)]


class Child:
    """The client, with its streams open and waiting."""

    program = __file__

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._process = subprocess.Popen(
            [sys.executable, self.program, "--child", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def take(self, writes: int) -> dict[str, float]:
        """What the client measured over so many writes. Raises SystemExit if other events came than were expected."""
        assert self._process.stdin is not None
        expected = self.expected(writes)
        self._process.stdin.write(f"{expected}\n")
        self._process.stdin.flush()
        row: dict[str, float] = json.loads(self._line())
        if row.pop("events") != expected:
            raise SystemExit(f"{self._task}: not the {expected} events that were to come")
        return row

    def expected(self, writes: int) -> int:
        """How many events come from so many writes."""
        return sum(place(number) < self._task["streams"] for number in range(writes))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._task}: the client ended")
        return line

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


# ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def read(task: dict[str, Any]) -> int:
    host, _, port = task["address"].rpartition(":")
    gate = asyncio.Semaphore(_AT_ONCE)
    delays: list[float] = []

    async def opened(number: int) -> WireStream:
        async with gate:
            stream = WireStream(await WireConnection.to(host, int(port)), DATABASE, f"c{number}")
            await stream.open()
            await stream.batch(1)
            return stream

    async def follow(stream: WireStream) -> None:
        while True:
            for event in await stream.batch():
                delays.append(delay_ms(event))

    async def watched(number: int) -> asyncio.Task[None]:
        return asyncio.create_task(follow(await opened(number)))  # it waits as soon as it is open, as a driver's does

    following = await asyncio.gather(*(watched(number) for number in range(task["streams"])))
    await asyncio.sleep(1.0 + len(following) / 2000)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        limit = time.monotonic() + 120
        while len(delays) < int(line) and time.monotonic() < limit and not any(one.done() for one in following):
            await asyncio.sleep(0.05)
        every = sorted(delays)
        delays.clear()
        p50, p99 = (every[len(every) * part // 100] if every else 0.0 for part in (50, 99))
        print(json.dumps({"events": len(every), "p50": p50, "p99": p99}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
