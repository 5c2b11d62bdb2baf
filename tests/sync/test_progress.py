"""The progress of a sync, in words and numbers; and which entries are somebody's writes."""

from __future__ import annotations

import json
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp

from tailrace.act.sync.cutover import changed, refuse_written
from tailrace.act.sync.progress import Counted, SyncProgress
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry
from tailrace.errors import UsageError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_copy_s_end_is_estimated_from_its_rate() -> None:
    clock = Clock()
    counted = Counted(clock)
    counted.copied(0, 1000, 0)
    assert counted.fields()["seconds_left"] is None
    clock.now = 10.0
    counted.copied(250, 1000, 5_000_000)
    assert counted.fields()["seconds_left"] == 30.0
    assert "250 of about 1,000 documents, 5 MB, about 30 s left" in str(
        SyncProgress("sync", phase="copy", **counted.fields())
    )


def test_more_documents_than_were_estimated_are_the_new_estimate() -> None:
    counted = Counted(Clock())
    counted.copied(1200, 1000, 0)
    assert counted.fields()["of"] == 1200


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    clock = Clock()
    counted = Counted(clock)
    for second in range(1, 41):
        clock.now = float(second)
        counted.changed(100 if second > 20 else 1000)
    assert counted.fields()["changes"] == 22_000
    assert counted.fields()["changes_per_second"] == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (SyncProgress("a"), "a: new"),
        (SyncProgress("a", phase="follow", paused=True), "a: paused"),
        (
            SyncProgress("a", phase="follow", is_consistent=True, time=ClusterTime.of(7, 2)),
            "equal to the source at 7,2",
        ),
        (SyncProgress("a", phase="catchUp", time=ClusterTime.of(7, 2)), "not yet equal, at 7,2"),
        (
            SyncProgress("a", phase="follow", lag_s=3.0, reach_s=7200.0),
            "3 s behind; the oplog holds what comes next for 7,200 s more",
        ),
        (SyncProgress("a", phase="follow", blocked_by="drop shop.a"), "applying drop shop.a"),
        (
            SyncProgress("a", phase="follow", verified={"time": "7,2", "differences": 0}),
            "verified at 7,2: 0 differences",
        ),
        (
            SyncProgress("a", phase="cutOver", held_limits=2),
            "expireAfterSeconds not restored on 2 indexes of the target",
        ),
    ],
)
def test_what_is_said_in_a_line(progress: SyncProgress, words: str) -> None:
    assert words in str(progress)
    assert json.loads(json.dumps(progress.to_json()))["name"] == "a"


def entry(op: str, ns: str, o: dict[str, Any], **more: Any) -> Any:
    return parse_entry(bson.encode({"ts": Timestamp(5, 1), "op": op, "ns": ns, "o": o, **more}))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (entry("i", "shop.a", {"_id": 1}), {"shop.a"}),
        (entry("d", "shop.a", {"_id": 1}), {"shop.a"}),
        (entry("i", "left.out", {"_id": 1}), set()),
        (entry("n", "", {"msg": "periodic noop"}), set()),
        (entry("i", "shop.a", {"_id": 1}, fromMigrate=True), set()),
        (entry("i", "config.transactions", {"_id": 1}), set()),
        (entry("i", "shop.system.views", {"_id": "shop.v"}), {"shop.system.views"}),
        (entry("c", "shop.$cmd", {"drop": "a"}), {"shop"}),
        (entry("c", "shop.$cmd", {"startIndexBuild": "a"}), set()),
        (entry("c", "admin.$cmd", {"abortTransaction": 1}), set()),
        (entry("c", "config.$cmd", {"create": "a"}), set()),
    ],
)
def test_which_entries_are_somebody_s_writes(given: Any, names: set[str]) -> None:
    assert changed(given, lambda namespace: namespace.startswith("shop.")) == names


def test_who_writes_is_named() -> None:
    refuse_written([], "nothing")
    with pytest.raises(UsageError, match=r"given up: somebody wrote .* \(shop\.a, shop\.b\)"):
        refuse_written({"shop.b", "shop.a"}, "given up")
