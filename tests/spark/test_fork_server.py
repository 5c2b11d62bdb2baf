"""A Python that is loaded once and forked for each one that Spark starts behaves like one that was started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tailrace.lake.spark.runtime import fork_server, launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

#: The fork server with less to load.
_SERVER = """
import sys
from pathlib import Path
from tailrace.lake.spark.runtime import fork_server
fork_server._LOADED = ("json", "decimal")
fork_server.serve(Path(sys.argv[1]))
"""
_ASKED = """
import os, sys
print(os.getcwd(), os.environ["COLOUR"], "decimal" in sys.modules, sys.argv[1:], sys.path[:2], __name__)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""
_LOADED = """
import sys
import pyarrow as pa
from tailrace.core import kernel
before = set(sys.modules)
pa.array([1, 2])
if kernel.comes_compiled():
    kernel.process_batch, kernel.locate, kernel.encode_variants, kernel.merge_blocks
print(sorted(name for name in set(sys.modules) - before))
"""
Server = tuple[subprocess.Popen[bytes], Path]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    path = tmp_path / "s" / "fork"
    path.parent.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    process = subprocess.Popen([sys.executable, "-c", _SERVER, str(path)], stdin=subprocess.PIPE, env=environment)
    while not path.is_socket():
        assert process.poll() is None
        time.sleep(0.02)
    yield process, path
    process.communicate(timeout=300)
    assert not path.parent.exists(), "nothing is left of a server that has ended"


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    (tmp_path / "asked.py").write_text(_ASKED)
    return tmp_path


def start(path: Path | None, arguments: list[str], where: Path, **environment: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if name not in {launcher.SOCKET, "PYTHONHASHSEED"}}
    if path is not None:
        known[launcher.SOCKET] = str(path)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", launcher.__file__, *arguments],
        env={**known, "PYTHONPATH": str(where), **environment},
        cwd=where,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_forked_process_has_the_streams_the_surroundings_and_the_status_of_its_own(
    server: Server, asked: Path
) -> None:
    done = start(server[1], ["-m", "asked", "a b"], asked, COLOUR="grün")
    out, err = done.communicate("said", timeout=300)
    assert out.splitlines() == [f"{asked} grün True ['a b'] ['{asked}', '{asked}'] __main__"]
    assert err == "said\n"
    assert done.returncode == 7


def test_nothing_is_left_that_each_worker_would_load_at_its_first_events(server: Server, tmp_path: Path) -> None:
    """Only the time of a first query showed it: each of four workers loaded pandas, since pyarrow asks for it when it
    makes an array, and the half of the kernel that transforms events."""
    (tmp_path / "loaded.py").write_text(_LOADED)
    loaded, err = start(server[1], ["-m", "loaded"], tmp_path).communicate(timeout=300)
    assert loaded.splitlines() == ["[]"], err


@pytest.mark.parametrize("why", ["no server", "gone", "another seed", "no module"])
def test_where_the_server_cannot_help_python_starts_as_ever(server: Server, asked: Path, why: str) -> None:
    path = {"no server": None, "gone": asked / "nobody"}.get(why, server[1])
    if why == "no module":
        done = start(path, ["-c", _ASKED, "a b"], asked, COLOUR="red")
    else:
        done = start(path, ["-m", "asked", "a b"], asked, COLOUR="red", PYTHONHASHSEED="3")
    out, err = done.communicate("said", timeout=300)
    assert "red False ['a b']" in out
    assert (err, done.returncode) == ("said\n", 7)


def test_who_ends_the_launcher_ends_the_process(server: Server, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    for end in (signal.SIGTERM, signal.SIGKILL):
        begun = start(server[1], ["-m", "waiting"], tmp_path)
        assert begun.stdout is not None
        process = int(begun.stdout.readline())
        begun.send_signal(end)
        begun.communicate(timeout=300)
        assert begun.returncode == -end
        while _lives(process):
            time.sleep(0.02)


def test_a_process_that_fails_or_is_killed_is_said_to_have(server: Server, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("raise ValueError('seen')\n")
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    failing = start(server[1], ["-m", "failing"], tmp_path)
    assert "ValueError: seen" in failing.communicate(timeout=300)[1]
    assert failing.returncode == 1
    killed = start(server[1], ["-m", "killed"], tmp_path)
    killed.communicate(timeout=300)
    assert killed.returncode == 128 + 9


def test_half_a_request_does_not_stop_the_server(server: Server, asked: Path) -> None:
    for sent in (b"", b"\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x09{}"):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(server[1]))
            other.sendall(sent)
            other.shutdown(socket.SHUT_WR)
    done = start(server[1], ["-m", "asked"], asked, COLOUR="red")
    assert "True" in done.communicate("", timeout=300)[0]


def test_the_server_gets_its_name_when_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection between the two steps was refused, and its Python was started the usual way. A client that waits for
    the name nearly always comes later."""
    path, seen = tmp_path / "fork", []

    class Watched(socket.socket):
        def listen(self, backlog: int = 64, /) -> None:
            seen.append(path.exists())
            super().listen(backlog)

    monkeypatch.setattr(fork_server.socket, "socket", Watched)
    served = fork_server._Server(path)
    assert seen == [False]
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(path))
    served._socket.close()


def test_sparks_workers_are_forked_from_the_server(spark: SparkSession) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            daemon = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
            yield pa.record_batch({"parent": [Path(f"/proc/{daemon}/cmdline").read_bytes()]})

    row = spark.range(1).coalesce(1).mapInArrow(look, "parent binary").first()
    assert row is not None
    assert b"fork_server" in bytes(row.parent)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may vanish between opening and reading
        return False
