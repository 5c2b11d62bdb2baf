"""The quarantine of a lake in an object store: an event is there once, whatever dies, is lost or is written twice.

In a directory: tests/unit/test_lake_quarantine.py.
"""

from __future__ import annotations

import json
import shutil
import signal
from datetime import date
from pathlib import Path
from typing import Any

import obstore
import polars
import pyarrow as pa
import pytest

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, object_place
from tailrace.cli.main import main
from tailrace.errors import SinkError, UsageError
from tailrace.lake import quarantine_files
from tailrace.lake.store import quarantine, quarantine_index
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import drop_days, erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tests.tables.object_server import REPEATED, ObjectServer, as_given, held_in, put_back
from tests.tables.test_lake_in_store import die_at, keys_from, numbers_in
from tests.tables.unkind_proxy import Fault, UnkindProxy
from tests.unit.lake_events import STREAM, begin
from tests.unit.test_lake_erasure import LAKE_COLUMNS
from tests.unit.test_lake_quarantine import planned, put, stage

#: An event in quarantine, and a row.
THREE_AND_FOUR = {"documentKey._id": {"$in": [3, 4]}}
ANNA = {"fullDocument.who": "anna@example.com"}


@pytest.fixture
def root(object_store: ObjectServer, prefix: str, tmp_path: Path) -> ObjectPlace:
    return object_store.place(prefix, tmp_path / "state")


def begun(root: Any, checkpoint: Path) -> str:
    claim = open_lake(root, checkpoint, STREAM, LAKE_COLUMNS).claim
    begin(checkpoint)
    return claim


def aside_in(root: Any) -> list[int]:
    """The numbers of the events in quarantine."""
    log = CommitLog(root)
    files = quarantine.files_of(log.layout, log.newest_batch(log.head()))
    assert quarantine_files(root) == [str(file) for file in files]
    rows = [row for file in files for row in quarantine.read_checked(file).to_pylist()]
    return sorted(int(row["reason"].split()[1]) for row in rows)


def objects_in(root: ObjectPlace) -> set[str]:
    return {one.name for one in root.objects() if one.name.startswith("_quarantine/")}


def test_the_quarantine_is_that_of_a_lake_in_a_directory(root: ObjectPlace, tmp_path: Path) -> None:
    """Commits, replays, merges, erasures, dropped days: the same events, and no other objects."""
    found = []
    for place, checkpoint in ((root, tmp_path / "one"), (tmp_path / "local" / "lake", tmp_path / "other")):
        claim = begun(place, checkpoint)
        assert put(place, claim, 0, range(1, 5), [2_000, 5]) is not None
        assert put(place, claim, 0, range(1, 5), [2_000, 5]) is None
        assert put(place, claim, 1, [], [2_010]) is not None
        assert put(place, claim, 2, [86_400], [86_410, 86_411]) is not None
        steps = [aside_in(place), lake_status(place).quarantined, verify(place, full=True).quarantined]
        merged = compact(place)
        steps += [merged.aside_before, merged.aside_after, aside_in(place)]
        steps += [erase(place, ANNA).quarantined, aside_in(place)]
        steps += [drop_days(place, date(2026, 11, 22)).quarantined, aside_in(place)]
        assert open_lake(place, checkpoint, STREAM, LAKE_COLUMNS).claim == claim
        assert put(place, claim, 3, [86_412], [86_413]) is not None
        report = verify(place, full=True)
        found.append((*steps, aside_in(place), report.problems, report.leftovers))
        log = CommitLog(place)
        files = quarantine.files_of(log.layout, None)
        tables = [quarantine.read_checked(file).drop(["noticed"]) for file in files]
        found.append(pa.concat_tables(tables).to_pylist())
    assert found[:2] == found[2:]
    assert found[0][:4] == ([5, 2_000, 2_010, 86_410, 86_411], 5, 5, 3)
    assert len(objects_in(root)) == 2
    assert list((tmp_path / "state" / "uploads").iterdir()) == []


class _Work:
    """One change of the lake in another process, which opens the store for itself."""

    def __init__(self, root: ObjectPlace, what: str, claim: str, checkpoint: Path) -> None:
        self.place = str(root), str(root.bucket.beside), dict(root.bucket.options)
        self.what, self.claim, self.checkpoint = what, claim, checkpoint

    def __call__(self) -> None:
        uri, state, options = self.place
        options = {name: value for name, value in options.items() if name not in REPEATED}
        root = object_place(uri, beside=Path(state), options=options)
        if self.what == "commit":
            commit_batch(root, self.claim, 2, planned(7, 9), stage(root, [7, 9], [8]))
        elif self.what == "compact":
            compact(root)
        elif self.what == "erase":
            erase(root, THREE_AND_FOUR)
        else:
            open_lake(root, self.checkpoint, STREAM, LAKE_COLUMNS)


@pytest.mark.parametrize(
    ("what", "step"),
    [
        ("commit", "commit.log"),
        ("compact", "quarantine.merged"),
        ("erase", "quarantine.noted"),
        ("open", "claim.quarantine"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)  # the same loop over the other steps
            for one in (
                ("commit", "commit.files"),
                ("commit", "commit.head"),
                ("commit", "commit.quarantine"),
                ("compact", "quarantine.noted"),
                ("compact", "quarantine.removed"),
                ("erase", "commit.log"),
                ("erase", "quarantine.removed"),
                ("open", "claim.start"),
            )
        ),
    ],
)
def test_killed_at_any_step_an_event_is_there_once(root: ObjectPlace, tmp_path: Path, what: str, step: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    claim = begun(root, checkpoint)
    for number in range(2):
        assert put(root, claim, number, [3 * number + 1], [3 * number + 2, 3 * number + 3]) is not None
    assert die_at(step, 1, _Work(root, what, claim, checkpoint)) == -signal.SIGKILL
    committed = what == "commit" and step != "commit.files"
    expected = [2, 3, 5, 6, 8] if committed else [2, 3, 5, 6]
    erased = what == "erase" and step != "commit.log"
    assert aside_in(root) == [one for one in expected if not erased or one != 3]
    assert verify(root).problems == []
    if what == "erase":
        erase(root, THREE_AND_FOUR)
        expected.remove(3)
        assert verify(root).leftovers <= 1, "what an interrupted erasure left is removed by the next one"
    assert begun(root, checkpoint) == claim
    assert (put(root, claim, 2, [7, 9], [8]) is None) == committed
    assert aside_in(root) == sorted({*expected, 8})
    assert compact(root).aside_after == 1
    assert aside_in(root) == sorted({*expected, 8})
    assert len(objects_in(root)) == 1
    report = verify(root, full=True)
    assert (report.problems, report.leftovers, report.quarantined) == ([], 0, len({*expected, 8}))
    assert numbers_in(root) == ([1, 7, 9] if what == "erase" else [1, 4, 7, 9])


def test_another_machine_cannot_change_what_was_taken_over(
    object_store: ObjectServer, prefix: str, tmp_path: Path
) -> None:
    """It checked ``lake.json`` and uploaded what it merged just before the other stream came, which removes that as a
    leftover."""
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    claim = begun(one, tmp_path / "first")
    for number in range(2):
        assert put(one, claim, number, [3 * number + 1], [3 * number + 2, 3 * number + 3]) is not None
    before = objects_in(one)
    claims: list[str] = []
    read = quarantine_index._ours

    def changed_by(machine: ObjectPlace, *, late: bool) -> None:
        """Compact; the other stream comes around the second reading of the index, which is for the exchange."""
        calls = 0

        def observed(layout: Any) -> Any:
            nonlocal calls
            calls += 1
            known = read(layout) if late else None
            if calls == 2:
                with pytest.MonkeyPatch.context() as straight:
                    straight.setattr(quarantine_index, "_ours", read)
                    claims.append(begun(other, tmp_path / f"other{len(claims)}"))
            return known or read(layout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quarantine_index, "_ours", observed)
            compact(machine)

    with pytest.raises(SinkError, match="another state directory"):
        changed_by(one, late=False)
    assert (len(claims), objects_in(one), aside_in(other)) == (1, before, [2, 3, 5, 6])
    begun(one, tmp_path / "third")  # the first machine takes it back
    with pytest.raises(SinkError, match="another program has changed"):
        changed_by(one, late=True)
    assert (len(claims), objects_in(one), aside_in(other)) == (2, before, [2, 3, 5, 6])
    assert put(other, claims[-1], 0, [7], [8]) is not None
    assert compact(other).aside_after == 1
    assert aside_in(other) == [2, 3, 5, 6, 8]
    assert verify(other, full=True).problems == []


@pytest.mark.parametrize("fault", ["lost", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_bad_day(object_store: ObjectServer, prefix: str, tmp_path: Path, fault: Fault) -> None:
    """The first try to write each object goes wrong."""
    tried: set[str] = set()

    def chosen(_: int, method: str, path: str) -> Fault | None:
        is_first = method == "PUT" and path not in tried
        tried.update([path] if method == "PUT" else ())
        return fault if is_first else None

    straight = object_store.place(prefix, tmp_path / "state")
    with UnkindProxy(object_store.address, chosen) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        claim = begun(root, tmp_path / "checkpoint")
        for number in range(2):
            tried.clear()
            assert put(root, claim, number, [3 * number + 1], [3 * number + 2, 3 * number + 3]) is not None
        tried.clear()
        assert compact(root).aside_before == 2
        tried.clear()
        assert erase(root, {"documentKey._id": 3}).quarantined == 1
        assert proxy.faults[fault] > 5
    assert aside_in(straight) == [2, 5, 6]
    assert len(objects_in(straight)) == 1
    assert verify(straight, full=True).problems == []


def test_an_index_that_was_lost_or_set_back_or_damaged_is_refused(root: ObjectPlace, tmp_path: Path) -> None:
    """In that case nothing is removed as a leftover."""
    checkpoint, index = tmp_path / "checkpoint", root / "_tailrace" / "quarantine.json"
    claim = begun(root, checkpoint)
    empty = index.read_bytes()
    assert put(root, claim, 0, [1], [2]) is not None
    older = index.read_bytes()
    assert put(root, claim, 1, [3], [4]) is not None
    assert put(root, claim, 2, [5], []) is not None
    whole, names = index.read_bytes(), objects_in(root)
    forged = durable.sealed({**json.loads(empty), "files": ["../x"]} | {"sha256": ""})
    for content, said in (
        (None, "missing, and the lake has a quarantine"),
        (empty, "older than the lake's log"),
        (older, "older than the lake's log"),
        (whole[:-30], "damaged|cannot be read|not"),
        (forged, "damaged|cannot be"),
    ):
        index.unlink()
        if content is not None:
            index.create(content)
        # The status counted what the index named, so that a lost one said that nothing was put aside.
        for look in (lambda: quarantine_files(root), lambda: begun(root, checkpoint), lambda: lake_status(root)):
            with pytest.raises(SinkError, match=said):
                look()
        assert objects_in(root) == names
    index.unlink()
    index.create(whole)
    (lost, *_) = sorted(names)
    content = (root / lost).read_bytes()
    (root / lost).unlink()
    for look in (lambda: quarantine_files(root), lambda: begun(root, checkpoint), lambda: lake_status(root)):
        with pytest.raises(SinkError, match="is missing: the quarantine names it"):
            look()
    assert "missing" in " ".join(verify(root).problems)
    obstore.put(root.bucket.store, f"{root.key}/{lost}", content[:200] + b"x" + content[201:])
    assert "the quarantine cannot be read" in verify(root).problems[0]
    with pytest.raises(SinkError, match=r"cannot be read|damaged"):
        erase(root, {"documentKey._id": 2})
    obstore.put(root.bucket.store, f"{root.key}/{lost}", content)
    assert begun(root, checkpoint) == claim
    assert (aside_in(root), verify(root, full=True).problems) == ([2, 4], [])


def test_only_what_counts_is_listed(root: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who read all objects of the prefix met events twice after a kill, and there was no list of those that count."""
    claim = begun(root, tmp_path / "checkpoint")
    assert quarantine_files(root) == []
    for number in range(2):
        assert put(root, claim, number, [3 * number + 1], [3 * number + 2, 3 * number + 3]) is not None
    before = quarantine_files(root)
    assert [name.removeprefix(f"{root}/") for name in before] == sorted(objects_in(root))
    frame = polars.read_parquet(before, storage_options=as_given(root))  # as on the page
    assert [int(one.split()[1]) for one in frame["reason"]] == [2, 3, 5, 6]
    assert die_at("quarantine.merged", 1, _Work(root, "compact", claim, tmp_path / "checkpoint")) == -signal.SIGKILL
    assert die_at("commit.files", 1, _Work(root, "commit", claim, tmp_path / "checkpoint")) == -signal.SIGKILL
    assert (quarantine_files(root), len(objects_in(root))) == (before, 4)

    listed, came = quarantine_index.objects_present, 0

    def late(layout: Any) -> set[str]:
        """Another machine merges them after the index was read."""
        nonlocal came
        came += 1
        if came == 1:
            compact(root)
        return listed(layout)

    monkeypatch.setattr(quarantine_index, "objects_present", late)
    (merged,) = quarantine_files(root)
    assert came > 1
    assert merged not in before
    assert aside_in(root) == [2, 3, 5, 6]
    with pytest.raises(UsageError, match="is not a lake"):
        quarantine_files(root / "elsewhere")


def test_a_place_whose_objects_have_all_gone_is_empty(root: ObjectPlace, tmp_path: Path) -> None:
    """SeaweedFS lists the folders that they were in, and a lake could not be begun there: the other tests have places
    of their own."""
    claim = begun(root, tmp_path / "checkpoint")
    assert put(root, claim, 0, [1], [2]) is not None
    put_back(root, {})
    claim = begun(root, tmp_path / "other")
    assert put(root, claim, 0, [3], [4]) is not None
    assert (numbers_in(root), aside_in(root)) == ([3], [4])
    put_back(root, {})
    obstore.put(root.bucket.store, f"{root.key}/day=1/x.parquet", b"x")
    with pytest.raises(UsageError, match="is not empty and not a lake"):
        begun(root, tmp_path / "third")


def test_a_store_that_was_set_back_and_a_state_that_was_lost(root: ObjectPlace, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    claim = begun(root, checkpoint)
    assert commit_batch(root, claim, 0, planned(1, 2), stage(root, [1], [2]), checkpoint=checkpoint) is not None
    copy = held_in(root)
    range_ = planned(3, 4)
    assert commit_batch(root, claim, 1, range_, stage(root, [3], [4]), checkpoint=checkpoint) is not None
    put_back(root, copy)
    with pytest.raises(SinkError, match="older than its checkpoint"):
        open_lake(root, checkpoint, STREAM, LAKE_COLUMNS)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(SinkError, match="another state directory"):
        erase(root, {"documentKey._id": 2})
    fresh = begun(root, tmp_path / "fresh")
    assert put(root, fresh, 0, [3], [4]) is not None
    assert (aside_in(root), verify(root, full=True).problems) == ([2, 4], [])
    assert erase(root, {"documentKey._id": 2}).quarantined == 1
    assert aside_in(root) == [4]


def test_the_commands(
    object_store: ObjectServer,
    root: ObjectPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys_from(object_store, monkeypatch)
    claim = begun(root, tmp_path / "checkpoint")
    for number in range(2):
        assert put(root, claim, number, [10 * number + 1], [10 * number + 2, 10 * number + 10]) is not None
    uri, state = str(root), ["--state", str(tmp_path / "state")]
    assert main(["lake", "status", uri]) == 0
    assert "4 events in quarantine" in capsys.readouterr().out
    assert main(["lake", "compact", uri, *state]) == 0
    assert "in the quarantine, 2 files became 1" in capsys.readouterr().out
    assert main(["lake", "erase", uri, *state, "--match", json.dumps(ANNA), "--dry-run"]) == 0
    assert "2 events would be erased from the quarantine" in capsys.readouterr().out
    assert main(["lake", "erase", uri, *state, "--match", json.dumps(ANNA)]) == 0
    assert "2 events erased from the quarantine" in capsys.readouterr().out
    assert aside_in(root) == [2, 12]
    assert main(["lake", "expire", uri, *state, "--older-than", "0s"]) == 0
    assert main(["lake", "verify", uri, "--full"]) == 0
    assert not any(b"anna" in content for name, content in held_in(root).items() if name.startswith("_quarantine"))
