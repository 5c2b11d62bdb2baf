"""When a program that watches gets the kernel, and in which thread.

The loader used to import in a thread of its own, which took ten seconds beside a busy reader in place of 0.65. No test
saw it, since all of them waited for that thread before they looked.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import bson
import pytest

from tailrace.core import kernel
from tailrace.core.event.event_block import EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.kernel_choice import merge_with
from tailrace.watch.client import kernel_loader
from tailrace.watch.gateway import engine
from tests.property.test_block_merge import event

ENOUGH = kernel_loader.BYTES_MIN


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which modules of the kernel were imported, one for each module."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(kernel_loader, "import_module", lambda name: threads.append(threading.current_thread()))
    monkeypatch.setattr(kernel_loader.kernel, "available", lambda: True)
    return threads


def test_compiled_code_is_loaded_by_the_thread_that_reads_after_the_first_reply(
    imported: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_loader, "_is_compiled", lambda stamp: True)
    loader = kernel_loader._KernelLoader()
    loader.read(ENOUGH)
    assert not loader.ready  # a stream's first event waits for nothing
    loader.read(1)
    assert loader.ready
    assert set(imported) == {threading.current_thread()}


def test_a_large_first_reply_goes_to_the_plain_stages_with_its_beginning_alone(
    imported: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went there whole, two thousand entries of it: a program of 20,000 events waited 70 ms more. Tests looked only
    at whether the first event has to wait."""
    monkeypatch.setattr(kernel_loader, "_is_compiled", lambda stamp: True)
    monkeypatch.setattr(kernel_loader, "_loader", kernel_loader._KernelLoader())
    entries = [bson.encode({"ts": bson.Timestamp(1, number), "text": "x" * 1000}) for number in range(1, 501)]
    batch = OplogBatch(b"".join(entries), ClusterTime.of(1, 600))
    head, rest = kernel_loader.shortened(batch)
    assert rest is not None
    assert head.raw + rest.raw == batch.raw
    assert 0 < len(head.raw) <= 1 << 16
    assert bson.decode_all(head.raw)[-1]["ts"] == head.high_water.to_timestamp()  # no promise for what comes after it
    assert rest.high_water == batch.high_water
    assert not kernel_loader.works_on(len(head.raw))
    assert kernel_loader.works_on(len(rest.raw))
    assert kernel_loader.shortened(batch) == (batch, None)  # only the first of a process
    assert imported


def test_a_small_reply_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loader, "_loader", kernel_loader._KernelLoader())
    batch = OplogBatch(bson.encode({"ts": bson.Timestamp(1, 1)}) * 100, ClusterTime.of(1, 1))
    assert kernel_loader.shortened(batch) == (batch, None)


def test_a_quiet_stream_never_loads_it(imported: list[threading.Thread]) -> None:
    loader = kernel_loader._KernelLoader()
    for _ in range(10):
        loader.read(ENOUGH // 11)
    assert not loader.ready
    assert imported == []


def test_a_batch_of_one_small_entry_is_left_to_the_plain_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway had such a floor, and ``watch()`` none."""
    monkeypatch.setattr(kernel_loader._loader, "ready", True)
    assert not kernel_loader.works_on(400)
    assert kernel_loader.works_on(4000)
    assert kernel_loader.is_ready(400)  # whether it is loaded is another question


@pytest.mark.parametrize("use", [kernel_loader.works_on, engine._kernel_works_on])
def test_a_merge_is_done_in_compiled_code_once_it_is_loaded(
    use: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The floor for small batches refused every merge of ``watch()`` and of the gateway over a cluster: 17 us of CPU an
    event where the shards write at the same time. Tests compared the two merges, not which of them is taken."""
    merges: list[int] = []
    monkeypatch.setattr(kernel, "merge_blocks", lambda blocks: merges.append(len(blocks)) or blocks[0])
    blocks = [EventBlock.of_bson([event((1, 1), shard, 0)]) for shard in range(2)]
    monkeypatch.setattr(kernel_loader._loader, "ready", False)
    assert len(merge_with(blocks, use)) == 2
    assert merges == []
    monkeypatch.setattr(kernel_loader._loader, "ready", True)
    merge_with(blocks, use)
    assert merges == [2]


def test_what_is_not_compiled_is_compiled_elsewhere_and_loaded_by_the_next_batch(
    imported: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(kernel_loader, "_is_compiled", lambda stamp: False)
    monkeypatch.setattr(kernel_loader._KernelLoader, "_compile", lambda self, stamp: compiled.wait(300))
    loader = kernel_loader._KernelLoader()
    loader.read(ENOUGH)
    loader.read(1)
    loader.read(1)
    assert not loader.ready
    compiled.set()
    loader.join()
    assert not loader.ready
    loader.read(1)
    assert loader.ready
    assert set(imported) == {threading.current_thread()}


def test_the_compiling_ends_with_the_process_that_wanted_it(tmp_path: Path) -> None:
    """A service that was killed and started in a loop had eighteen of them; tests only ended in good order."""
    command = [sys.executable, "-c", kernel_loader._COMPILE, *sys.path]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    compiling = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    assert compiling.stdin is not None
    compiling.stdin.close()  # what the system does for a process that is killed
    assert compiling.wait(300) == 1


@pytest.mark.parametrize("content", ["", "\0", "no such directory"])
def test_a_stamp_whose_cache_is_gone_says_nothing(tmp_path: Path, content: str) -> None:
    stamp = tmp_path / "stamp"
    assert not kernel_loader._is_compiled(stamp)
    stamp.write_text(content)
    assert not kernel_loader._is_compiled(stamp)
    stamp.write_text(f"{tmp_path}\n")
    assert not kernel_loader._is_compiled(stamp)
    (tmp_path / "transform.it.nbi").write_bytes(pickle.dumps("index"))
    assert kernel_loader._is_compiled(stamp)


@pytest.mark.parametrize("name", ["transform.it.nbi", "transform.it.1.nbc", "columns.it.nbi"])
@pytest.mark.parametrize("size", [0, 100])
def test_a_cache_with_a_file_cut_short_is_compiled_elsewhere(tmp_path: Path, name: str, size: int) -> None:
    """The thread that reads would have met the damage. Tests had undamaged caches, or none."""
    stamp = tmp_path / "stamp"
    stamp.write_text(f"{tmp_path}\n")
    for each in ("transform.it.nbi", "transform.it.1.nbc", "columns.it.nbi"):
        (tmp_path / each).write_bytes(pickle.dumps("x" * 200))
    assert kernel_loader._is_compiled(stamp)
    os.truncate(tmp_path / name, size)
    assert not kernel_loader._is_compiled(stamp)
