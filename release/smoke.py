"""Check that an installed Tailrace works: run by the Python of an environment that has nothing else of the project.

The dumps of real servers in ``tests/golden/data`` are replayed, and the events must be the bytes that the server gave.
The environment has no extras, so what needs one must say so and not fail in another way.

    python release/smoke.py [--compiled]

``--compiled``  the kernel must come as machine code
"""

from __future__ import annotations

import argparse
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

DATA = Path(__file__).parents[1] / "tests" / "golden" / "data"
RECORDINGS = ("updates_4.4.2", "updates_5.0.4", "updates_6.0.27", "updates_7.0.28", "ddl_6.0.27", "definitions_7.0.28")
#: How many streams of each recording are replayed, with one command each.
STREAMS = 4
RAW = CodecOptions(document_class=RawBSONDocument)
BIN = Path(sys.executable).parent
#: How an installation into a directory is found, and the libraries of a system that another machine is emulated with.
ELSEWHERE = ("PYTHONPATH", "QEMU_LD_PREFIX")


def tailrace(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command of this environment, with a home directory that cannot be written."""
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "LANG": "C.UTF-8"}
    environment |= {name: os.environ[name] for name in ELSEWHERE if name in os.environ}
    command = [str(BIN / "tailrace")] if "PYTHONPATH" not in environment else [sys.executable, "-m", "tailrace"]
    return subprocess.run(
        [*command, *words], input=stdin, capture_output=True, env=environment, check=False, timeout=300
    )


def streams_of(recording: Any) -> Iterator[tuple[list[str], list[str], list[bytes]]]:
    """For each plain or expanded stream: the options and the scope of a replay, and the server's events."""
    for stream in recording["streams"]:
        command = bson.decode(stream["command"].raw)
        (first, *others) = command["pipeline"]
        spec = first["$changeStream"]
        whole = spec.pop("allChangesForCluster", False)
        plain = not others and set(spec) <= {"startAtOperationTime", "showExpandedEvents"}
        if not plain or stream["error"] or set(command) - {"aggregate", "pipeline", "cursor"}:
            continue
        start = spec["startAtOperationTime"]
        options = ["--start-at-operation-time", f"{start.time},{start.inc}"]
        options += ["--show-expanded-events"] * ("showExpandedEvents" in spec)
        name = stream["database"] if command["aggregate"] == 1 else f"{stream['database']}.{command['aggregate']}"
        yield options, [] if whole else [name], [event.raw for event in stream["events"]]


def dump_of(recording: Any) -> bytes:
    """The recording's oplog as a dump. It has to reach back to the start of the first stream, but a recording begins
    with the first entry that its streams have seen."""
    entries = [entry.raw for entry in recording["oplog"]]
    pipelines = [bson.decode(stream["command"].raw)["pipeline"] for stream in recording["streams"]]
    start = min(stages[0]["$changeStream"]["startAtOperationTime"] for stages in pipelines)
    if bson.decode(entries[0])["ts"] > start:
        entries.insert(0, bson.encode({"ts": start, "t": 1, "v": 2, "op": "n", "ns": "", "o": {"msg": "start"}}))
    return b"".join(entries)


def replayed(directory: Path) -> int:
    """Replay the recordings, compare, and count the events that were equal."""
    equal = 0
    for name in RECORDINGS:
        recording = RawBSONDocument(lzma.decompress((DATA / f"{name}.bson.xz").read_bytes()), RAW)
        dump = directory / "oplog.bson"
        dump.write_bytes(dump_of(recording))
        compared = 0
        version = name.rsplit("_", 1)[1]
        for options, scope, events in islice(streams_of(recording), STREAMS):
            words = "replay", "--format", "bson", "--server-version", version, *options, str(dump), *scope
            done = tailrace(*words)
            if done.returncode or done.stdout != b"".join(events):
                raise SystemExit(f"not what {version} gave: tailrace {' '.join(words)}: {done.stderr.decode()}")
            compared += len(events)
        if not compared:
            raise SystemExit(f"{name}: nothing was compared")
        equal += compared
    return equal


def kernel_is_compiled() -> bool:
    """Whether the kernel's machine code came with the package."""
    from tailrace.core.kernel import native  # noqa: PLC0415  only needed if it is asked for

    return native.library() is not None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true")
    wanted = parser.parse_args()
    for words in (("--version",), ("--help",), ("watch", "--help")):
        done = tailrace(*words)
        if done.returncode or done.stderr:
            raise SystemExit(f"tailrace {' '.join(words)}: {done.stderr.decode()}")
    if wanted.compiled and not kernel_is_compiled():
        raise SystemExit("the wheel has no compiled kernel")
    with tempfile.TemporaryDirectory() as directory:
        equal = replayed(Path(directory))
    print(
        f"Python {sys.version.split()[0]}, PyMongo {__import__('pymongo').version}: {equal} events as the server gave"
    )


if __name__ == "__main__":
    main()
