"""A program that forks while a stream is open: what the child and the parent get, beside PyMongo's stream.

With PyMongo both go on with one cursor of the server: what the child reads, the parent does not, unless one of them
closes it. The same goes for a stream of ours that is alone on its client. Streams that share a read lose it in the
child and begin by themselves there, so both processes get everything. Only shared ones had been tried."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tailrace.embedded import ReplicaSet

pytestmark = pytest.mark.mongod

_PROGRAM = """
import os, sys, warnings
import pymongo, tailrace
warnings.simplefilter("ignore")  # both clients warn of the fork
uri, flavour, ends = sys.argv[1:]
if flavour == "pymongo":
    client = pymongo.MongoClient(uri)
else:
    client = tailrace.connect(uri, engine="server" if flavour == "server" else "oplog")
numbers = client["forks"][flavour]
streams = [numbers.watch(max_await_time_ms=100) for _ in range(3 if flavour == "shared" else 1)]
while flavour == "shared" and client.tail_statistics.joined < 3:
    assert [stream.try_next() for stream in streams] == [None] * 3
stream = streams[-1]

def told(last):
    found = []
    while last not in found:
        found.append(stream.next()["documentKey"]["_id"])
    return found

numbers.insert_one({"_id": "before"})
child = os.fork()
if child == 0:
    numbers.insert_one({"_id": "child"})
    if ends != "leaves":
        print("child:", *told("child"), flush=True)
    if ends != "reads":
        stream.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
numbers.insert_one({"_id": "after"})
print("parent:", *told("after"))
for stream in streams:
    stream.close()
numbers.drop()
"""


@pytest.mark.parametrize("ends", ["leaves", pytest.param("reads", marks=pytest.mark.slow), "reads and closes"])
def test_what_a_child_and_its_parent_get(replica_set: ReplicaSet, ends: str) -> None:
    said = {}
    for flavour in ("pymongo", "server", "oplog", "shared"):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, replica_set.uri, flavour, ends],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (done.stderr, done.returncode) == ("", 0)
        said[flavour] = done.stdout
    assert said["server"] == said["oplog"] == said["pymongo"]
    everything = "parent: before child after\n"
    child = "" if ends == "leaves" else "child: before child\n"
    assert said["shared"] == child + everything
    assert said["pymongo"] == (child + "parent: after\n" if ends == "reads" else child + everything)
