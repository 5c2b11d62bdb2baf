"""How fast does one stream catch up, through the gateway and native, with PyMongo as the client of both?

    python bench/gateway_throughput.py                       100,000 events, three rounds, medians
    python bench/gateway_throughput.py --events 20000 --rounds 5

Inserts of about 300 bytes, and updates, are written first; then a stream is resumed from before them and read to its
end. Events a second, and seconds of CPU of the client, the gateway and mongod. The sides take turns.

Bar: the gateway gives at least as many events a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any, Final

import pymongo
from bson import json_util
from pymongo import InsertOne, UpdateOne

from streams import cpu_s
from tailrace.embedded import ReplicaSet
from watchers import Gateway

SIDES: Final = ("native", "gateway")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=None, help="of the streams (default: the server's)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return read(json.loads(args.child, object_hook=json_util.object_hook))
    with ReplicaSet(1, oplog_size_mb=2000) as replica_set, pymongo.MongoClient[Any](replica_set.uri) as client:
        token = fill(client, args.events)
        gateway = Gateway(replica_set.uri)
        uris = {
            "native": replica_set.uri,
            "gateway": replica_set.uri.replace(replica_set.members[0].host, gateway.address),
        }
        pids = [replica_set.members[0].pid or 0, gateway.process.pid]
        task = {"token": token, "events": args.events, "batch_size": args.batch_size}
        rows: dict[str, list[tuple[float, ...]]] = {side: [] for side in SIDES}
        for number in range(args.rounds + 1):  # the first warms up
            for side in SIDES:
                row = measure({**task, "uri": uris[side]}, pids)
                if number:
                    rows[side].append(row)
        gateway.close()
    print(f"{'side':10}{'events/s':>10}{'client, s':>11}{'mongod, s':>11}{'gateway, s':>12}   of {args.events} events")
    rates = {}
    for side in SIDES:
        rates[side], *cpu = (statistics.median(column) for column in zip(*rows[side], strict=True))
        print(f"{side:10}{rates[side]:10.0f}{cpu[0]:11.2f}{cpu[1]:11.2f}{cpu[2]:12.2f}")
    ratio = rates["gateway"] / rates["native"]
    print(f"the gateway's / native: {ratio:.2f} ({'met' if ratio >= 1 else 'MISSED'})")
    return 0 if ratio >= 1 else 1


def fill(client: pymongo.MongoClient[Any], events: int) -> Any:
    """Write so many events. Returns the token from before them."""
    client.throughput.create_collection("c")
    with client.throughput.c.watch() as stream:
        token = stream.resume_token
    for begin in range(0, events, 1000):
        client.throughput.c.bulk_write(
            [
                InsertOne({"_id": number, "name": f"customer {number}", "amount": number * 1.5, "text": "x" * 200})
                if number % 2 == 0
                else UpdateOne({"_id": number - 1}, {"$set": {"amount": number * 2.5}})
                for number in range(begin, min(events, begin + 1000))
            ]
        )
    return token


def measure(task: dict[str, Any], pids: list[int]) -> tuple[float, ...]:
    before = [cpu_s([pid]) for pid in pids]
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(task, default=json_util.default)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, client_cpu = json.loads(done.stdout)
    return (task["events"] / seconds, client_cpu, *(cpu_s([pid]) - one for pid, one in zip(pids, before, strict=True)))


def read(task: dict[str, Any]) -> int:
    with pymongo.MongoClient[Any](task["uri"]) as client:
        client.admin.command("ping")
        begun, cpu = time.monotonic(), time.process_time()
        with client.throughput.c.watch(resume_after=task["token"], batch_size=task["batch_size"]) as stream:
            for _ in range(task["events"]):
                next(stream)
        print(json.dumps([time.monotonic() - begun, time.process_time() - cpu]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
