"""Hostile tenants beside an honest one, through one gateway: every honest event comes, and soon.

    python -m tests.gateway.siege --seconds 3600              six kinds of tenants, two of each
    python -m tests.gateway.siege --seconds 60 --kinds events,constants --tenants 4
    make gateway-siege SECONDS=3600

The honest client pings, writes and reads two streams, one plain and one with an expression. It is alone for a quarter
of the time (at most a minute), and then runs beside the others, which have a process of their own. Exit code 1 if an
event was lost or came twice, or if a 99th percentile is more than ten times that of the quiet time; the last line is
the verdict. Progress is reported on standard error twice a minute. Run nothing else meanwhile: the percentiles depend
on the machine too.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

from tailrace.embedded import ReplicaSet
from tests.gateway.running import GatewayProcess

RATIO_MAX = 10.0
_QUIET_S_MAX = 60.0
_PAUSE_S = 0.01
_PATIENCE_S = 300.0
_PROGRESS_S = 30.0

Client = pymongo.MongoClient[dict[str, Any]]


# ── the hostile ones ─────────────────────────────────────────────────────────────────────────────────────────────────


def _streaming(client: Client, stages: list[dict[str, Any]], document: dict[str, Any]) -> None:
    """Open a stream, give it an event and ask for it a few times."""
    with client.hostile.c.watch(stages, max_await_time_ms=200) as stream:
        client.hostile.c.insert_one(dict(document))
        for _ in range(3):
            stream.try_next()


def events(client: Client, draw: random.Random) -> None:
    """Each event takes hours."""
    numbers = {"$range": [0, draw.randint(10_000, 30_000)]}
    inner = {"$map": {"input": numbers, "as": "b", "in": {"$add": ["$$a", "$$b"]}}}
    _streaming(client, [{"$set": {"x": {"$size": {"$map": {"input": numbers, "as": "a", "in": inner}}}}}], {})


def constants(client: Client, draw: random.Random) -> None:
    """Opening the stream takes minutes."""
    first = draw.randint(0, 1000)
    parts = [{"$size": {"$setUnion": [{"$range": [first + one, 900_000]}, [one]]}} for one in range(100)]
    _streaming(client, [{"$match": {"$expr": {"$lt": [{"$add": parts}, 1]}}}], {})


def patterns(client: Client, draw: random.Random) -> None:
    """A regular expression that tries every way to divide a text."""
    text = "a" * draw.randint(25, 40) + "b"
    _streaming(client, [{"$match": {"fullDocument.text": {"$regex": "^(a+)+$"}}}], {"text": text})


def paths(client: Client, draw: random.Random) -> None:
    """A path of numbers over nested arrays, each tried as an index and as a name."""
    nested: Any = 1
    for _ in range(40):
        nested = [{"0": nested}]
    path = ".".join(["fullDocument.x", *["0"] * draw.randint(40, 70)])
    _streaming(client, [{"$match": {path: 2}}], {"x": nested})


def memory(client: Client, draw: random.Random) -> None:
    """Values that fill any memory."""
    many = {f"a{number}": {"$concat": ["$fullDocument.text", f"{number}"]} for number in range(200)}
    document = {"text": "x" * draw.randint(5_000_000, 12_000_000)}
    _streaming(client, [{"$set": {"x": {"$let": {"vars": many, "in": 1}}}}], document)


def halves(client: Client, draw: random.Random) -> None:
    """Connections that announce a large message and send half of it."""
    address = client.address
    assert address is not None
    sockets = []
    try:
        for _ in range(20):
            opened = socket.create_connection(address, timeout=10)
            sockets.append(opened)
            opened.sendall(struct.pack("<iiii", 40_000_000, 1, 0, 2013) + bytes(draw.randint(0, 200_000)))
        time.sleep(1)
    finally:
        for each in sockets:
            each.close()


KINDS: dict[str, Callable[[Client, random.Random], None]] = {
    kind.__name__: kind for kind in (events, constants, patterns, paths, memory, halves)
}


def uri_of_root(upstream: str, gateway: GatewayProcess) -> str:
    """The gateway's address with root's name and password and the upstream URI's options."""
    login, _, rest = upstream.partition("@")
    return f"{login}@{gateway.address}/{rest.partition('/')[2]}"


def _as_user(uri: str, user: str) -> str:
    """The URI of root, changed to that of another user, whose password is its name."""
    rest = uri.partition("@")[2]
    return f"mongodb://{user}:{user}@{rest}"


def make_users(uri: str, kinds: Sequence[str], tenants: int) -> None:
    """A user for the honest client, and one for each hostile tenant."""
    with Client(uri) as client:
        for user in ("honest", *(f"{kind}{number}" for kind in kinds for number in range(tenants))):
            client.admin.command("createUser", user, pwd=user, roles=["readWriteAnyDatabase"])


def besiege(uri: str, kinds: Sequence[str], tenants: int, seconds: float, seed: int) -> None:
    """Act as the hostile tenants, so many of each kind, for so long."""
    until = time.monotonic() + seconds

    def be(kind: str, number: int) -> None:
        draw = random.Random(f"{seed} {kind} {number}")
        with Client(_as_user(uri, f"{kind}{number}")) as client:
            while time.monotonic() < until:
                with suppress(PyMongoError, OSError):
                    KINDS[kind](client, draw)
                time.sleep(_PAUSE_S)

    for kind in kinds:
        for number in range(tenants):
            threading.Thread(target=be, args=(kind, number), daemon=True).start()
    time.sleep(seconds)


@contextmanager
def besieged(uri: str, kinds: Sequence[str], tenants: int, seconds: float, seed: int) -> Iterator[None]:
    """Hostile tenants in a process of their own."""
    words = ["--hostile", uri, "--kinds", ",".join(kinds), "--tenants", f"{tenants}"]
    words += ["--seconds", f"{seconds}", "--seed", f"{seed}"]
    process = subprocess.Popen([sys.executable, "-m", "tests.gateway.siege", *words])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# ── the honest one ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """What the honest client has measured, in seconds, and the numbers of the events that each stream gave."""

    pings: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    streams: list[list[int]] = field(default_factory=lambda: [[], []])
    written: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether each stream gave each event once, in order."""
        return self.written > 0 and all(given == list(range(self.written)) for given in self.streams)


_HONEST = ([{"$match": {"operationType": "insert"}}], [{"$set": {"next": {"$add": ["$fullDocument._id", 1]}}}])


class Progress:
    """Reports the last half minute on standard error."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._begun = self._told = time.monotonic()
        self._from = (0, 0)

    def tell(self, seen: Seen) -> None:
        now = time.monotonic()
        if now - self._told < _PROGRESS_S:
            return
        pings, delays = seen.pings[self._from[0] :], seen.delays[self._from[1] :]
        self._told, self._from = now, (len(seen.pings), len(seen.delays))
        missing = sum(seen.written - len(given) for given in seen.streams)
        ping, delay = (f"{percentile(one) * 1000:.1f} ms" if one else "none" for one in (pings, delays))
        told = f"{seen.written} events written, {missing} on their way; 99th percentiles: ping {ping}, event {delay}"
        print(f"{self._name}: {now - self._begun:.0f} of {self._seconds:.0f} s, {told}", file=sys.stderr, flush=True)


def honest(uri: str, seconds: float, name: str = "honest") -> Seen:
    """Ping, write and read for so long, and then until everything written has arrived. ``name`` is printed with the
    progress."""
    seen = Seen()
    progress = Progress(name, seconds)
    written_at: dict[int, float] = {}
    over = threading.Event()
    faults: list[BaseException] = []

    def read(client: Client, number: int, opened: threading.Event) -> None:
        try:
            with client.honest.c.watch(_HONEST[number], max_await_time_ms=500) as stream:
                opened.set()
                limit = time.monotonic() + seconds + _PATIENCE_S
                while not (over.is_set() and len(seen.streams[number]) >= seen.written):
                    assert time.monotonic() < limit, "events are missing"
                    event = stream.try_next()
                    if event is not None:
                        given = event["documentKey"]["_id"]
                        seen.delays.append(time.monotonic() - written_at[given])
                        seen.streams[number].append(given)
        except BaseException as error:  # noqa: BLE001  raised by the caller
            faults.append(error)
            opened.set()

    with Client(_as_user(uri, "honest"), socketTimeoutMS=int(_PATIENCE_S * 1000)) as client:
        client.honest.c.drop()
        threads = []
        for number in range(len(_HONEST)):
            opened = threading.Event()
            threads.append(threading.Thread(target=read, args=(client, number, opened), daemon=True))
            threads[-1].start()
            assert opened.wait(_PATIENCE_S), "a stream was not opened"
        until = time.monotonic() + seconds
        while time.monotonic() < until and not faults:
            written_at[seen.written] = time.monotonic()
            client.honest.c.insert_one({"_id": seen.written})
            seen.written += 1
            begun = time.monotonic()
            client.admin.command("ping")
            seen.pings.append(time.monotonic() - begun)
            progress.tell(seen)
            time.sleep(_PAUSE_S)
        over.set()
        for thread in threads:
            thread.join(seconds + _PATIENCE_S)
    if faults:
        raise faults[0]
    return seen


def percentile(values: list[float]) -> float:
    """The 99th, in seconds."""
    return sorted(values)[int(len(values) * 0.99)]


def report(quiet: Seen, siege: Seen) -> bool:
    """Print both sides. Returns whether all is well."""
    well = quiet.is_whole and siege.is_whole
    for name, before, beside in (("ping", quiet.pings, siege.pings), ("event", quiet.delays, siege.delays)):
        ratio = percentile(beside) / percentile(before)
        well = well and ratio <= RATIO_MAX
        print(
            f"{name}: p99 {percentile(before) * 1000:.1f} ms quiet, {percentile(beside) * 1000:.1f} ms besieged, "
            f"{ratio:.1f} times ({RATIO_MAX:.0f} at most); longest {max(beside) * 1000:.0f} ms"
        )
    whole = "all, once, in order" if quiet.is_whole and siege.is_whole else "LOST, TWICE OR OUT OF ORDER"
    print(f"events: {siege.written} written, two streams: {whole}")
    print("held" if well else "NOT held")
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="default: 60")
    parser.add_argument("--tenants", type=int, default=2, help="of each kind (default: 2)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--version", help="of the server")
    parser.add_argument("--hostile", metavar="URI", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    # Like Ctrl-C: the server, the gateway and the tenants end with the siege.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.hostile is not None:
        besiege(args.hostile, kinds, args.tenants, args.seconds, args.seed)
        return 0
    with (
        ReplicaSet(1, version=args.version, root_password="root") as deployment,
        tempfile.TemporaryDirectory() as folder,
        GatewayProcess(deployment.uri, Path(folder) / "log") as gateway,
    ):
        uri = uri_of_root(deployment.uri, gateway)
        make_users(uri, kinds, args.tenants)
        quiet = honest(uri, min(args.seconds / 4, _QUIET_S_MAX), "quiet")
        with besieged(uri, kinds, args.tenants, args.seconds + _PATIENCE_S, args.seed):
            siege = honest(uri, args.seconds, "besieged")
        return 0 if report(quiet, siege) else 1


if __name__ == "__main__":
    sys.exit(main())
