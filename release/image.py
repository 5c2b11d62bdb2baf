"""Build the images of ``deploy/container`` and use them as a cluster does: ``make images``. Needs buildah and root.

Each image is started with a root file system that is read-only, as a user that it does not know (1000), with no home
and no place to write. A mongod outside is filled with inserts. What must hold:

1. ``tailrace --version`` says the version, and the kernel's compiled code came with the image: nothing compiles.
2. ``tailrace watch`` gives the bytes that mongod's own change stream gives.
3. Through the gateway's image, started as its ``CMD`` says, a driver's stream gives the same bytes.

``--base`` is a root file system with Python (a tar file) in place of the image that the Dockerfile names, for a machine
that reaches no registry of images. ``mmdebstrap --variant=minbase --include=python3,python3-venv,ca-certificates
bookworm base.tar`` makes one. ``--wheel`` is a wheel that is there already: nothing is compiled then.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import bson
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.embedded import ReplicaSet

ROOT: Final = Path(__file__).parents[1]
CONTAINER: Final = ROOT / "deploy" / "container"
TARGETS: Final = ("gateway", "stores")
EVENTS: Final = 2_000
PATIENCE_S: Final = 120
#: A user's view of the image: read-only, with a /proc and the devices that every container has.
START: Final = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=755 tmpfs "$1/dev"
for device in null zero random urandom; do touch "$1/dev/$device"; mount --bind "/dev/$device" "$1/dev/$device"; done
mount -o remount,ro "$1/dev"
root=$1; shift
exec chroot --userspec=1000:1000 "$root" "$@"
"""
COMPILED: Final = "from tailrace.core.kernel.native import library; raise SystemExit(library() is None)"


class Builder:
    """Buildah with a store of its own."""

    def __init__(self, store: Path) -> None:
        self._words = ["buildah", "--root", str(store / "root"), "--runroot", str(store / "run")]
        self._environment = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def run(self, *words: str | Path, quiet: bool = True) -> str:
        done = subprocess.run(
            [*self._words, *map(str, words)],
            stdout=subprocess.PIPE if quiet else None,
            env=self._environment,
            text=True,
            check=True,
        )
        return (done.stdout or "").strip()

    def base(self, tar: Path) -> str:
        """The image of a root file system. Its name."""
        container = self.run("from", "scratch")
        self.run("add", "--quiet", container, tar, "/")
        self.run("run", container, "--", "ln", "--symbolic", "python3", "/usr/bin/python")
        self.run("commit", "--quiet", "--rm", container, "localhost/tailrace-base")
        return "localhost/tailrace-base"

    def build(self, target: str, context: Path, file: Path, base: str | None) -> Path:
        """The image of a stage of the Dockerfile, and where its files are."""
        certificates = "/etc/ssl/certs"  # a machine may reach the package index through a proxy that it trusts
        words: list[str | Path] = ["--layers", "--volume", f"{certificates}:{certificates}:ro", "--file", file]
        words += [] if base is None else ["--pull-never", "--build-arg", f"PYTHON={base}"]
        self.run("bud", *words, "--target", target, "--tag", f"tailrace-{target}", context, quiet=False)
        return Path(self.run("mount", self.run("from", f"localhost/tailrace-{target}")))


def context_with(wheel: Path, directory: Path) -> tuple[Path, Path]:
    """What to build from where the wheel is there already, and its Dockerfile: ours, but for the stage that makes a
    wheel."""
    text = (CONTAINER / "Dockerfile").read_text()
    stages = re.split(r"(?m)^(?=FROM )", text)
    made = "FROM scratch AS wheel\nCOPY wheels /wheels\n\n"
    stages = [made if " AS wheel\n" in stage else stage for stage in stages]
    shutil.copytree(CONTAINER, directory / "deploy" / "container")
    (directory / "wheels").mkdir()
    shutil.copy2(wheel, directory / "wheels")
    file = directory / "Dockerfile"
    file.write_text("".join(stages))
    return directory, file


def started(
    image: Path, *words: str, environment: dict[str, str] | None = None, log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """A program of the image. The network is this machine's."""
    inside = {"PATH": "/opt/tailrace/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    program = [f"/opt/tailrace/bin/{words[0]}", *words[1:]]
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", START, "sh", str(image), *program],
        stdout=subprocess.PIPE,
        stderr=log,
        env=inside | {"PATH": f"{inside['PATH']}:/usr/sbin:/sbin"},
    )


def said(image: Path, *words: str) -> bytes:
    output, _ = started(image, *words).communicate(timeout=PATIENCE_S)
    return output


def events_of(client: pymongo.MongoClient[Any], start: bson.Timestamp, count: int) -> list[bytes]:
    """The first events of a stream, as their bytes."""
    raw = client.get_database("shop", codec_options=CodecOptions(RawBSONDocument))
    with raw["orders"].watch(start_at_operation_time=start) as stream:
        return [stream.next().raw for _ in range(count)]


def try_watch(image: Path, uri: str, start: bson.Timestamp, wanted: list[bytes]) -> None:
    words = ("--format", "bson", "--start-at-operation-time", f"{start.time},{start.inc}")
    begun = time.monotonic()
    program = started(image, "tailrace", "watch", uri, "shop.orders", *words)
    assert program.stdout is not None
    try:
        first = program.stdout.read(4)
        seconds = time.monotonic() - begun
        rest = program.stdout.read(sum(map(len, wanted)) - len(first))
    finally:
        program.terminate()
        program.wait()
    if first + rest != b"".join(wanted):
        raise SystemExit("watch gave other events than mongod")
    print(f"watch: the first event after {seconds:.2f} s, start of the program included; {len(wanted)} as mongod's")


@contextmanager
def gateway(image: Path, uri: str) -> Iterator[str]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryFile() as log:
        words = ("gateway", "--listen", place, "--log", "json")
        program = started(image, "tailrace", *words, environment={"TAILRACE_URI": uri}, log=log)
        try:
            yield f"mongodb://{place}/?directConnection=true&serverSelectionTimeoutMS={PATIENCE_S * 1000}"
        finally:
            program.terminate()
            program.wait()
            log.seek(0)
            sys.stderr.write("".join(line for line in log.read().decode().splitlines(True) if '"error"' in line))


def try_gateway(image: Path, uri: str, start: bson.Timestamp, wanted: list[bytes]) -> None:
    begun = time.monotonic()
    with gateway(image, uri) as place, pymongo.MongoClient[Any](place) as client:
        client.admin.command("ping")
        seconds = time.monotonic() - begun
        if events_of(client, start, len(wanted)) != wanted:
            raise SystemExit("the gateway gave other events than mongod")
    whole = time.monotonic() - begun
    print(f"gateway: answers after {seconds:.2f} s; {len(wanted)} events as mongod's, after {whole:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a root file system with Python")
    parser.add_argument("--wheel", type=Path, help="the wheel to install")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ReplicaSet() as replica_set:
        builder = Builder(Path(directory) / "store")
        base = None if wanted.base is None else builder.base(wanted.base)
        context, file = ROOT, CONTAINER / "Dockerfile"
        if wanted.wheel is not None:
            context, file = context_with(wanted.wheel, Path(directory) / "context")
        try:
            images = {target: builder.build(target, context, file, base) for target in TARGETS}
            with pymongo.MongoClient[Any](replica_set.uri) as client:
                begun = client.admin.command("ping")["operationTime"]
                start = bson.Timestamp(begun.time, begun.inc + 1)
                client["shop"]["orders"].insert_many([{"_id": number, "text": "x" * 300} for number in range(EVENTS)])
                events = events_of(client, start, EVENTS)
            for target, image in images.items():
                size = sum(
                    path.lstat().st_size for path in image.rglob("*") if path.is_file() and not path.is_symlink()
                )
                print(f"{target}: {size / 1e6:.0f} MB; {said(image, 'tailrace', '--version').decode().strip()}")
                if started(image, "python", "-c", COMPILED).wait(PATIENCE_S):
                    raise SystemExit("the image has no compiled kernel")
                try_watch(image, replica_set.uri, start, events)
            try_gateway(images["gateway"], replica_set.uri, start, events)
        finally:
            builder.run("umount", "--all")
            builder.run("rm", "--all")


if __name__ == "__main__":
    main()
