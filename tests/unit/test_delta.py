"""Commits of lakes and tables as they are written: to the byte, since readers of earlier versions read them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tailrace.lake.store.delta_log import decode, encode, table_metadata
from tailrace.lake.store.manifest import BatchMark, Commit, FileEntry, PlannedRange, Removal
from tailrace.lake.store.partitioning import BY_DAY
from tailrace.lake.tables import delta_commit, versions
from tailrace.lake.tables.delta_commit import Actions, Batch, NewFile, TableFile
from tailrace.version import version

AT: Final = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
FIRST, LAST = "82695735550000000129", "82695735560000000129"
PLANNED: Final = PlannedRange(ClusterTime.of(0x69573555, 0), ClusterTime.of(0x69573557, 2))
STATS: Final = '{"numRecords": 2, "minValues": {"token": "' + FIRST + '"}, "maxValues": {"token": "' + LAST + '"}}'
NAME: Final = f"day=2026-01-02/6957355500000001-00000-a{7:032x}.parquet"
ADDED: Final = FileEntry(NAME, 2, 99, "ab" * 32, FIRST, LAST, STATS)
REMOVED: Final = Removal(f"day=2026-01-02/6957355400000001-00000-m{8:032x}.parquet", AT, 55)


def text_of(content: bytes) -> str:
    """A commit's file, without the version of Tailrace that wrote it."""
    return content.decode().replace(f'"engineInfo": "tailrace/{version()}"', '"engineInfo": "tailrace"')


def test_a_commit_of_a_lake_is_written_as_it_always_was() -> None:
    mark = BatchMark(3, "c", 2, PLANNED, FIRST, LAST, 2)
    commit = Commit(
        3, "append", "c é", "p", (ADDED,), (REMOVED,), batch=2, planned=PLANNED, newest=mark, committed_at=AT
    )
    schema = {"type": "struct", "fields": [{"name": "é"}]}
    content = encode(commit, table_metadata("an-id", schema, BY_DAY, (), AT))
    planned = '{"after": [1767322965, 0], "until": [1767322967, 2]}'
    tokens = f'"firstToken": "{FIRST}", "lastToken": "{LAST}"'
    assert text_of(content).splitlines() == [
        '{"commitInfo": {"timestamp": 1767323045678, "operation": "STREAMING UPDATE", "operationParameters": '
        '{"epochId": "2", "outputMode": "Append"}, "isBlindAppend": true, "engineInfo": "tailrace", "tailrace": '
        '{"format": 2, "kind": "append", "claim": "c \\u00e9", "previous": "p", "committedAt": '
        '"2026-01-02T03:04:05.678000+00:00", "newest": {"number": 3, "claim": "c", "batch": 2, "planned": '
        f'{planned}, {tokens}, "rows": 2}}, "batch": 2, "planned": {planned}, "rows": 2, {tokens}, '
        '"lastWallTime": null, "follows": null}}}',
        '{"metaData": {"id": "an-id", "format": {"provider": "parquet", "options": {}}, "schemaString": '
        '"{\\"type\\": \\"struct\\", \\"fields\\": [{\\"name\\": \\"\\\\u00e9\\"}]}", "partitionColumns": ["day"], '
        '"configuration": {"delta.appendOnly": "true", "delta.enableExpiredLogCleanup": "false", '
        '"delta.dataSkippingStatsColumns": "token", "delta.deletedFileRetentionDuration": "interval 30 days", '
        '"tailrace.gaps": "[]", "tailrace.erasures": "[]", "tailrace.serverVersions": "[]"}, '
        '"createdTime": 1767323045678}}',
        '{"txn": {"appId": "tailrace/c \\u00e9", "version": 2, "lastUpdated": 1767323045678}}',
        f'{{"remove": {{"path": "{REMOVED.name}", "deletionTimestamp": 1767323045678, "dataChange": true, '
        '"extendedFileMetadata": true, "partitionValues": {"day": "2026-01-02"}, "size": 55}}',
        f'{{"add": {{"path": "{NAME}", "partitionValues": {{"day": "2026-01-02"}}, "size": 99, '
        '"modificationTime": 1767323045678, "dataChange": true, "stats": '
        f'"{STATS.replace(chr(34), chr(92) + chr(34))}", "tags": {{"tailrace.sha256": "{"ab" * 32}"}}}}}}',
    ]
    assert decode(content, 3, "it") == commit


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table's directory. Time stands still."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_767_323_045_678_901_234)
    (tmp_path / "_delta_log").mkdir()
    return tmp_path


def test_a_commit_of_a_table_is_written_as_it_always_was(root: Path) -> None:
    batch = Batch(4, ClusterTime.of(5, 1), ClusterTime.of(9, 2), "a-uuid", "a-state")
    metadata = delta_commit.metadata_action("an-id", [{"name": "é"}], {"k": "v"})
    gone = TableFile("b%20c.parquet", 7)
    actions = Actions("create", [NewFile("d é.parquet", 6, 1, {"minValues": {"a": "\U0001f600"}})], [gone], metadata)
    digest = delta_commit.publish(root, 0, "tailrace/shop.orders", batch, actions, previous={})
    content = (root / "_delta_log" / f"{0:020d}.json").read_bytes()
    assert digest == delta_commit.digest(content)
    info, *lines = text_of(content).splitlines()
    seal = delta.info_of(delta.actions_in(content))["tailrace.seal"]
    assert info == (
        '{"commitInfo": {"timestamp": 1767323045678, "operation": "CREATE TABLE", "operationParameters": '
        '{"mode": "Append"}, "isBlindAppend": false, "engineInfo": "tailrace", "tailrace.clusterTime": "9,2", '
        '"tailrace.after": "5,1", "tailrace.token": "8200000009000000032B0229296E04", "tailrace.batch": "4", '
        '"tailrace.kind": "create", "tailrace.collection": "a-uuid", "tailrace.state": "a-state", '
        f'"tailrace.previous": "{{}}", "tailrace.seal": "{seal}"}}}}'
    )
    assert lines == [
        '{"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}',
        '{"metaData": {"id": "an-id", "format": {"provider": "parquet", "options": {}}, "schemaString": '
        '"{\\"type\\": \\"struct\\", \\"fields\\": [{\\"name\\": \\"\\\\u00e9\\"}]}", "partitionColumns": [], '
        '"configuration": {"k": "v"}, "createdTime": 1767323045678}}',
        '{"txn": {"appId": "tailrace/shop.orders", "version": 4, "lastUpdated": 1767323045678}}',
        '{"remove": {"path": "b%20c.parquet", "deletionTimestamp": 1767323045678, "dataChange": true, '
        '"extendedFileMetadata": true, "partitionValues": {}, "size": 7}}',
        '{"add": {"path": "d%20%C3%A9.parquet", "partitionValues": {}, "size": 6, "modificationTime": 1767323045678, '
        '"dataChange": true, "stats": "{\\"numRecords\\": 1, \\"minValues\\": {\\"a\\": \\"\U0001f600\\"}}"}}',
    ]


def test_a_merge_of_a_tables_files_changes_no_rows(root: Path) -> None:
    delta_commit.publish_compaction(root, 1, [NewFile("b", 6, 1, {})], [TableFile("c", 7)], {0: "d"})
    info, removed, added = text_of((root / "_delta_log" / f"{1:020d}.json").read_bytes()).splitlines()
    assert info.startswith(
        '{"commitInfo": {"timestamp": 1767323045678, "operation": "OPTIMIZE", "operationParameters": {}, '
        '"engineInfo": "tailrace", "tailrace.previous": "{\\"0\\": \\"d\\"}", "tailrace.seal": "'
    )
    assert '"dataChange": false' in removed
    assert '"dataChange": false' in added
    with pytest.raises(SinkError, match=r"another program has changed the table .* \(version 1\)"):
        delta_commit.publish_compaction(root, 1, [], [], {})


@pytest.mark.parametrize("content", [b"", b"[]\n", b"{}\n7\n", b"{", b"\xff\n", b'{"a": ' + b"[" * 100_000])
def test_what_is_not_a_commit_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  of json, of Unicode or of ours
        delta.actions_in(content)


def test_a_directory_of_a_log_is_listed_as_commits_and_checkpoints(root: Path) -> None:
    log = root / "_delta_log"
    parts = [f"{3:020d}.checkpoint.{part:010d}.{2:010d}.parquet" for part in (1, 2)]
    newer = f"{5:020d}.checkpoint.0123-ab.json"
    names = [f"{7:020d}.json", f"{6:020d}.json", f"{4:020d}.checkpoint.parquet", *parts, newer]
    for name in [*names, "_last_checkpoint", f".{8:020d}.json.12", "7.json", "x.checkpoint.parquet"]:
        (log / name).touch()
    commits, checkpoints = delta.listed(root)
    assert commits == [6, 7]
    assert checkpoints == {3: [log / part for part in parts], 4: [delta.checkpoint_path(root, 4)], 5: [log / newer]}
    assert delta.listed(root / "elsewhere") == ([], {})


def test_all_files_of_a_checkpoint_go_with_it(root: Path) -> None:
    """If a checkpoint has several files, which other programs write, the first ones stayed for ever."""
    log = root / "_delta_log"
    parts = [f"{1:020d}.checkpoint.{part:010d}.{2:010d}.parquet" for part in (1, 2)]
    for name in [*parts, *(f"{number:020d}.json" for number in range(6)), f"{4:020d}.checkpoint.parquet"]:
        (log / name).touch()
    versions._remove_log(root, {}, recent=[5], kept=[], fed=[])
    assert delta.listed(root) == ([4, 5], {4: [delta.checkpoint_path(root, 4)]})
