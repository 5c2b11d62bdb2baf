"""A file of a lake's quarantine that is lost or foreign is reported, and so is a ledger that cannot be the lake's."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.errors import SinkError, UsageError
from tailrace.lake import quarantine_files
from tailrace.lake.store import commit_log
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tests.unit.lake_events import STREAM, begin
from tests.unit.test_lake_commits import die_at
from tests.unit.test_lake_erasure import LAKE_COLUMNS
from tests.unit.test_lake_quarantine import begun, files_of, held, many, put


def refusals(root: Path) -> tuple[str, str]:
    """What ``status`` and ``verify`` say of a lake in which both find a fault."""
    with pytest.raises(SinkError) as caught:
        lake_status(root)
    return caught.value.message, "; ".join(verify(root).problems)


@pytest.mark.parametrize("after", ["commits", "merge", "erasure", "checkpoint"])
def test_a_file_of_the_quarantine_that_is_missing_is_told(
    after: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``status`` counted what it found, and ``verify`` found nothing wrong: tests of lost files were of data files, and
    of a store's index."""
    root = tmp_path / "lake"
    claim = many(root)
    if after == "merge":
        assert compact(root).aside_before == 6
        assert put(root, claim, 6, [18], [19]) is not None
    elif after == "erasure":
        assert erase(root, {"documentKey._id": {"$in": [1, 2, 4]}}).quarantined == 3
        assert len(files_of(root)) == 5, "one of them was erased as a whole"
    elif after == "checkpoint":
        opening = open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS)
        begin(tmp_path / "fresh")
        assert put(root, opening.claim, 0, [18], [19]) is not None
    expected = lake_status(root).quarantined
    assert (verify(root).problems, len(held(root))) == ([], expected)
    for name in files_of(root):
        path = root / "_quarantine" / name
        content = path.read_bytes()
        path.unlink()
        status, verified = refusals(root)
        assert f"{name} is missing: the quarantine held it" in status
        assert status in verified
        path.write_bytes(content)
    assert (lake_status(root).quarantined, verify(root).problems) == (expected, [])
    # Whoever has no copy goes on without it.
    (root / "_quarantine" / files_of(root)[0]).unlink()
    assert main(["lake", "compact", str(root), "--accept-lost"]) == 0
    assert "the quarantine goes on without 1 lost file\n" in capsys.readouterr().out
    assert lake_status(root).quarantined == len(held(root)) < expected
    assert verify(root).problems == []


def test_an_erasure_that_is_refused_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, [], [7, 8]) is not None
    with pytest.raises(UsageError, match="selects all 2 of them"):
        erase(root, {"operationType": "insert"})
    (path,) = (root / "_quarantine").iterdir()
    path.unlink()
    assert "is missing" in refusals(root)[0]


def ledger_of(root: Path) -> Path:
    return root / "_tailrace" / "quarantine-ledger.json"


def without_ledger(root: Path) -> Path:
    """Let the lake be one of a version without a ledger. Gives the place of the ledger."""
    identity = root / "_tailrace" / "lake.json"
    known = durable.read_sealed(identity)
    assert known is not None
    assert known.pop("quarantineLedger") is True
    durable.write_sealed(identity, known)
    ledger_of(root).unlink()
    return ledger_of(root)


def test_a_lake_that_an_older_version_has_merged_is_not_accused(tmp_path: Path) -> None:
    """It has no ledger. The next one knows only what comes after it."""
    root = tmp_path / "lake"
    claim = many(root)
    compact(root)
    ledger = without_ledger(root)
    assert (lake_status(root).quarantined, verify(root).problems) == (12, [])
    assert compact(root).aside_before == 0
    assert not ledger.exists()
    assert put(root, claim, 6, [18], [19]) is not None
    assert (lake_status(root).quarantined, verify(root).problems) == (13, [])
    (root / "_quarantine" / files_of(root)[-1]).unlink()
    assert "is missing" in refusals(root)[0]


@pytest.mark.parametrize("what", ["a copy", "another table", "no table", "another table with a name of ours"])
def test_a_file_in_the_quarantine_that_is_not_the_lakes_is_told(what: str, tmp_path: Path) -> None:
    """A copy was counted, and ``verify`` ended in a KeyError at another table."""
    root = tmp_path / "lake"
    many(root)
    folder = root / "_quarantine"
    first = files_of(root)[0]
    ours = f"{first[:17]}{'0' * 32}.parquet"
    path = folder / (ours if "ours" in what else "mine.parquet")
    path.write_bytes((folder / first).read_bytes() if what == "a copy" else b"none")
    if "table with" in what or what == "another table":
        pq.write_table(pa.table({"a": [1, 2]}), path)
    for said in refusals(root):
        assert f"{path} is not a" in said
    path.unlink()
    assert (lake_status(root).quarantined, verify(root).problems) == (12, [])


def test_a_file_of_an_older_version_is_missed_once_the_ledger_has_begun(tmp_path: Path) -> None:
    """The ledger asked only for what came after it. No test had lost an older file than that."""
    root = tmp_path / "lake"
    claim = many(root)
    without_ledger(root)
    assert put(root, claim, 6, [18], [19]) is not None
    assert verify(root).problems == []
    (root / "_quarantine" / files_of(root)[0]).unlink()
    assert "is missing" in refusals(root)[0]


@pytest.fixture
def few_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of the log come soon, and remove commits soon."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 4)
    monkeypatch.setattr(commit_log, "COMMITS_KEPT", 8)


@pytest.mark.usefixtures("few_commits")
@pytest.mark.parametrize("before", ["commits", "merge", "erasure", "crash"])
def test_a_file_is_missed_whose_commit_the_log_has_dropped(before: str, tmp_path: Path) -> None:
    """Then nobody knew its name any more. No test had a log so long with a quarantine."""
    root = tmp_path / "lake"
    claim = many(root)
    if before == "merge":
        compact(root)
    elif before == "erasure":
        assert erase(root, {"documentKey._id": {"$in": [1, 2, 4]}}).quarantined == 3
    elif before == "crash":
        assert die_at("quarantine.noted", 1, lambda: compact(root)) == -signal.SIGKILL
    aside = lake_status(root).quarantined
    for number in range(6, 30):
        assert put(root, claim, number, [100 + number], []) is not None
    assert not any(one.quarantined for one in CommitLog(root).commits())
    assert (lake_status(root).quarantined, verify(root, full=True).problems) == (aside, [])
    for name in files_of(root):
        path = root / "_quarantine" / name
        content = path.read_bytes()
        path.unlink()
        assert f"{name} is missing" in refusals(root)[0]
        path.write_bytes(content)
    assert erase(root, {"documentKey._id": 5}).quarantined == 1
    compact(root)
    assert (lake_status(root).quarantined, verify(root, full=True).problems) == (aside - 1, [])


LEDGERS = {
    "half written": ("is damaged", lambda content: content[: len(content) // 2]),
    "empty": ("is damaged", lambda _: b""),
    "of a newer release": ("has format 3, and this version of Tailrace knows format 2", lambda _: b""),
    "another lake's": ("is another lake's", lambda _: b""),
    "deleted": ("is missing, and the lake has a quarantine", lambda _: None),
    "not sealed": ("was changed after it was written", lambda content: content.replace(b'"commit": ', b'"commit": 1')),
    "a name of another kind": ("cannot be a file of the quarantine", lambda _: b""),
    "no number": ("is damaged", lambda _: b""),
}


def spoil(root: Path, what: str, tmp_path: Path) -> None:
    ledger = ledger_of(root)
    content = LEDGERS[what][1](ledger.read_bytes())
    known = durable.read_sealed(ledger)
    assert known is not None
    if content is None:
        ledger.unlink()
    elif content or what == "empty":
        ledger.write_bytes(content)
    elif what == "another lake's":
        many(tmp_path / "other" / "lake")
        ledger.write_bytes(ledger_of(tmp_path / "other" / "lake").read_bytes())
    else:
        forged: dict[str, dict[str, object]] = {
            "of a newer release": {"format": 3},
            "a name of another kind": {"replaced": {"../x": None}},
            "no number": {"commit": True},
        }
        durable.write_sealed(ledger, {**known, **forged[what]})


@pytest.mark.parametrize("what", LEDGERS)
def test_a_ledger_that_cannot_be_the_lakes_is_refused_by_all(what: str, tmp_path: Path) -> None:
    """One that was deleted, or another lake's, let a lost file go unnoticed: the only test of a bad ledger damaged
    it."""
    root = tmp_path / "lake"
    claim = many(root)
    whole = ledger_of(root).read_bytes()
    spoil(root, what, tmp_path)
    (root / "_quarantine" / files_of(root)[0]).unlink()
    everybody: list[Callable[[], object]] = [
        lambda: lake_status(root),
        lambda: verify(root),
        lambda: quarantine_files(root),
        lambda: compact(root),
        lambda: put(root, claim, 6, [18], [19]),
        lambda: open_lake(root, tmp_path / "fresh", STREAM, LAKE_COLUMNS),
    ]
    for one in everybody:
        with pytest.raises(SinkError, match=rf"quarantine-ledger\.json.*{LEDGERS[what][0]}"):
            one()
    ledger_of(root).write_bytes(whole)
    assert "is missing" in refusals(root)[0]
    spoil(root, what, tmp_path / "again")
    assert main(["lake", "compact", str(root), "--accept-lost"]) == 0
    assert (lake_status(root).quarantined, verify(root).problems) == (10, [])
    (root / "_quarantine" / files_of(root)[0]).unlink()
    assert "is missing" in refusals(root)[0]


@pytest.mark.usefixtures("few_commits")
@pytest.mark.parametrize("since", ["commits", "merge", "erasure", "dropped commits", "dropped commits and all files"])
def test_an_older_copy_of_the_ledger_hides_nothing(since: str, tmp_path: Path) -> None:
    """``status`` and ``verify`` say what is missing, or that there is more than the ledger knows of."""
    root = tmp_path / "lake"
    claim = many(root)
    older = ledger_of(root).read_bytes()
    if since == "commits":
        assert put(root, claim, 6, [18], [19]) is not None
    elif since == "merge":
        compact(root)
    elif since == "erasure":
        assert erase(root, {"documentKey._id": {"$in": [1, 2, 4]}}).quarantined == 3
    else:
        for number in range(6, 30):
            assert put(root, claim, number, [100 + 2 * number], [101 + 2 * number]) is not None
    expected = lake_status(root).quarantined
    newer = ledger_of(root).read_bytes()
    ledger_of(root).write_bytes(older)
    lost = root / "_quarantine" / files_of(root)[-1]
    content = lost.read_bytes()
    lost.unlink()
    if since.startswith("dropped"):
        if since.endswith("files"):
            for name in files_of(root)[6:]:
                (root / "_quarantine" / name).unlink()
        for one in (lake_status, verify, quarantine_files):
            with pytest.raises(SinkError, match="is older than the lake's log"):
                one(root)
        assert put(root, claim, 30, [530], []) is not None
        with pytest.raises(SinkError, match="is older than the lake's log"):
            put(root, claim, 31, [531], [])  # the log would drop commits
        return
    assert "is missing" in refusals(root)[0]
    lost.write_bytes(content)
    ledger_of(root).write_bytes(newer)
    assert (lake_status(root).quarantined, verify(root).problems) == (expected, [])


@pytest.mark.parametrize("step", ["quarantine.ledger", "commit.files", "commit.log"])
def test_killed_while_the_ledger_begins(step: str, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = begun(root)
    assert put(root, claim, 0, [1], []) is not None
    assert die_at(step, 1, lambda: put(root, claim, 1, [2], [3])) == -signal.SIGKILL
    assert verify(root).problems == []
    put(root, claim, 1, [2], [3])
    assert put(root, claim, 2, [4], [5]) is not None
    assert (held(root), lake_status(root).quarantined, verify(root, full=True).problems) == ([3, 5], 2, [])
    ledger_of(root).unlink()
    with pytest.raises(SinkError, match="is missing, and the lake has a quarantine"):
        lake_status(root)
