"""How long from an acknowledged write to its event in the client, native and through the gateway?

    python bench/latency.py                    1,000 writes, one stream on each side
    python bench/latency.py --writes 5000 --rate 50

Both streams are PyMongo's and see the same writes in one run, each with a process of its own. Milliseconds from the
write's acknowledgement to ``next()`` returning the event; below 0 where the event is faster than the acknowledgement.

Bar: p50 through the gateway within 2 ms of native.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any, Final

import pymongo

from tailrace.embedded import ReplicaSet
from watchers import Gateway

_BAR_MS: Final = 2.0
_WARM_UP: Final = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--writes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=100.0, help="writes a second")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return read(json.loads(args.child))
    count = args.writes + _WARM_UP
    with ReplicaSet(1) as replica_set, pymongo.MongoClient[Any](replica_set.uri) as client:
        client.latency.create_collection("c")
        gateway = Gateway(replica_set.uri)
        uris = {
            "native": replica_set.uri,
            "gateway": replica_set.uri.replace(replica_set.members[0].host, gateway.address),
        }
        children = {
            side: subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps({"uri": uri, "count": count})],
                stdout=subprocess.PIPE,
                text=True,
            )
            for side, uri in uris.items()
        }
        for child in children.values():
            assert child.stdout is not None
            child.stdout.readline()  # the stream waits
        acknowledged = []
        begun = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, begun + number / args.rate - time.monotonic()))
            client.latency.c.insert_one({"_id": number, "text": "x" * 200})
            acknowledged.append(time.monotonic())
        print(f"{'side':10}{'p50 ms':>8}{'p99 ms':>8}   of {args.writes} writes at {args.rate:.0f}/s")
        p50 = {}
        for side, child in children.items():
            came = json.loads(child.communicate()[0])
            delays = sorted((then - at) * 1000 for then, at in list(zip(came, acknowledged, strict=True))[_WARM_UP:])
            p50[side] = delays[len(delays) // 2]
            print(f"{side:10}{p50[side]:8.2f}{delays[len(delays) * 99 // 100]:8.2f}")
        gateway.close()
    more = p50["gateway"] - p50["native"]
    print(f"p50, more than native: {more:.2f} ms ({'met' if more < _BAR_MS else 'MISSED'})")
    return 0 if more < _BAR_MS else 1


def read(task: dict[str, Any]) -> int:
    with pymongo.MongoClient[Any](task["uri"]) as client, client.latency.c.watch() as stream:
        stream.try_next()
        print("ready", flush=True)
        came = []
        for _ in range(task["count"]):
            next(stream)
            came.append(time.monotonic())
    print(json.dumps(came), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
