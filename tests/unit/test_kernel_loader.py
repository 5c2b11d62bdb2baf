"""When a program that watches gets the kernel, and in which thread.

The loader used to import in a thread of its own, which took ten seconds beside a busy reader instead of 0.65. No test
noticed, since all of them waited for that thread first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

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
    monkeypatch.setattr(kernel_loader.kernel, "comes_compiled", lambda: True)
    return threads


def test_compiled_code_is_loaded_by_the_thread_that_reads_after_the_first_reply(
    imported: list[threading.Thread],
) -> None:
    loader = kernel_loader._KernelLoader()
    loader.read(ENOUGH)
    assert not loader.ready  # nothing delays a stream's first event
    loader.read(1)
    assert loader.ready
    assert set(imported) == {threading.current_thread()}


def test_a_large_first_reply_goes_to_the_plain_stages_with_its_beginning_alone(
    imported: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its two thousand entries went there: a program with 20,000 events waited 70 ms more. Tests only checked
    whether the first event has to wait."""
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
    """The minimum batch size excluded every merge of ``watch()`` and of the gateway over a cluster: 17 us of CPU for an
    event when the shards write at the same time. Tests compared the two merges, but not which of them is used."""
    merges: list[int] = []
    monkeypatch.setattr(kernel, "merge_blocks", lambda blocks: merges.append(len(blocks)) or blocks[0])
    blocks = [EventBlock.of_bson([event((1, 1), shard, 0)]) for shard in range(2)]
    monkeypatch.setattr(kernel_loader._loader, "ready", False)
    assert len(merge_with(blocks, use)) == 2
    assert merges == []
    monkeypatch.setattr(kernel_loader._loader, "ready", True)
    merge_with(blocks, use)
    assert merges == [2]


def test_what_is_not_compiled_is_compiled_beside_the_stream(
    imported: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()
    monkeypatch.setattr(kernel_loader.kernel, "comes_compiled", lambda: False)
    monkeypatch.setattr(kernel_loader, "import_module", lambda name: may.wait(300))
    loader = kernel_loader._KernelLoader()
    for _ in range(3):
        loader.read(ENOUGH)
    assert not loader.ready
    may.set()
    loader.join()
    assert loader.ready


def test_where_nothing_can_be_compiled_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_loader.kernel, "available", lambda: False)
    loader = kernel_loader._KernelLoader()
    for _ in range(3):
        loader.read(ENOUGH)
    assert loader.missing
    assert not loader.ready
    [record] = caplog.records
    assert "pip install 'tailrace[jit]'" in record.getMessage()
