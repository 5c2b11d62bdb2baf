"""Whose history an archive holds: this is checked before it is written to, and before a stream begins in it.

An archive knew its replica set only by name. If it had no entry, or its last entry had left the oplog, any deployment
of that name could continue it. No test had restored anything.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

import tailrace
from tailrace.core.oplog.witness import DeploymentIdentity, Witness
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError, SinkError
from tailrace.read.archive.layout import DESCRIPTION, HEAD, Reach, head, listed
from tailrace.read.archive.record import read_record, write_record
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import verify
from tailrace.read.source.mongod import MongodSource
from tests.differential.test_archive_live import archive_now, entries_of
from tests.server_in_use import SERVER_VERSION

pytestmark = pytest.mark.mongod


@pytest.fixture(scope="module")
def replica_set() -> Iterator[ReplicaSet]:
    """One of this file's own: what archives an oplog from its beginning would archive all that others wrote before."""
    with ReplicaSet(1, enable_test_commands=True, parameters={"disableLogicalSessionCacheRefresh": True}) as running:
        yield running


def write(uri: str, count: int = 5) -> None:
    with MongoClient[dict[str, Any]](uri) as client:
        client.history.c.insert_many([{"n": number} for number in range(count)])


def check_whole(uri: str, folder: Path) -> None:
    """The archive verifies, and holds what the oplog does."""
    assert [report.faults for report in verify(folder)] == [[]]
    archived = ArchiveSource(folder)
    with closing(MongodSource(uri)) as live:
        got = entries_of(archived, archived.start, archived.newest())
        assert got == entries_of(live, archived.start, archived.newest())


def forget_identity(folder: Path) -> None:
    """Make the archive one whose writer may not read the replica set's id."""
    for path in (folder / DESCRIPTION, folder / "rs0" / HEAD):
        known = read_record(path)
        assert known is not None
        known.pop("replicaSetId", None)
        if "identity" in known:
            known["identity"] = Witness(DeploymentIdentity({"rs0": ""})).to_document()
        write_record(path, known)


def refuse(uri: str, folder: Path, said: str) -> None:
    """Neither a writer nor a stream goes on with the archive, and nothing in it is changed."""
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    with pytest.raises(OtherHistoryError, match=said):
        archive_now(uri, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()} == before


def refuse_stream(uri: str, folder: Path, said: str) -> None:
    start = ArchiveSource(folder).oldest()[0].to_timestamp()
    with tailrace.connect(uri, archive=folder) as client, pytest.raises(OtherHistoryError, match=said):
        client.history.watch(start_at_operation_time=start)


def test_another_deployment_of_the_same_name_is_refused(
    replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    write(replica_set.uri)
    archive_now(replica_set.uri, folder)
    other = start_replica_set().uri
    refuse(other, folder, "is the archive of another deployment: the id of the replica set rs0 was")
    refuse_stream(
        other, folder, r"the entries in .* were read from another deployment: the id of the replica set rs0 was"
    )
    # An archive that does not know whose it is goes by its last entry.
    forget_identity(folder)
    said = r"the entries in .* were read (from another history|up to)"
    refuse(other, folder, said)
    refuse_stream(other, folder, said)
    # Its own deployment goes on, and it knows from then on.
    archive_now(replica_set.uri, folder)
    reach = head(folder / "rs0")
    assert reach is not None
    assert reach.replica_set
    refuse(other, folder, "the id of the replica set rs0 was")
    check_whole(replica_set.uri, folder)
    # Without any entry there is only the identity.
    for segment in listed(folder / "rs0"):
        segment.path.unlink()
        segment.images_path.unlink(missing_ok=True)
    write_record(folder / "rs0" / HEAD, Reach(reach.start, reach.start, "", reach.replica_set).document())
    refuse(other, folder, "the id of the replica set rs0 was")


@pytest.mark.parametrize(
    "version", [SERVER_VERSION, *(pytest.param(old, marks=pytest.mark.slow) for old in ("5.0.4", "4.4.2"))]
)
def test_a_set_that_was_restored_from_an_older_backup_is_refused(tmp_path: Path, version: str) -> None:
    """Then the archive is newer than its deployment, which writes another history under the same id."""
    data, backup, folder = tmp_path / "data", tmp_path / "backup", tmp_path / "archive"
    with ReplicaSet(data_dir=data, version=version) as replica_set:
        write(replica_set.uri)
    shutil.copytree(data, backup)
    with ReplicaSet(data_dir=data, version=version) as replica_set:
        archive_now(replica_set.uri, folder)
        write(replica_set.uri)
        archive_now(replica_set.uri, folder)
        archive_now(replica_set.uri, folder)
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    with ReplicaSet(data_dir=data, version=version) as replica_set:
        write(replica_set.uri)
        said = r"the entries in .* were read from another history: the oplog of rs0 has (no|another) entry at"
        refuse(replica_set.uri, folder, said)
        refuse_stream(replica_set.uri, folder, said)


def test_an_older_copy_of_an_archive_goes_on_and_so_do_two(replica_set: ReplicaSet, tmp_path: Path) -> None:
    folder, copy = tmp_path / "archive", tmp_path / "copy"
    write(replica_set.uri)
    archive_now(replica_set.uri, folder)
    shutil.copytree(folder, copy)
    for _ in range(2):
        write(replica_set.uri)
        archive_now(replica_set.uri, folder)
    check_whole(replica_set.uri, folder)
    archive_now(replica_set.uri, copy)
    check_whole(replica_set.uri, copy)
    # The files of both in one directory are one oplog still.
    for path in (copy / "rs0").iterdir():
        if path.name != HEAD and not (folder / "rs0" / path.name).exists():
            shutil.copy(path, folder / "rs0")
    check_whole(replica_set.uri, folder)


def test_a_disk_that_is_full_in_the_middle_of_the_head_costs_nothing(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "archive"
    write(replica_set.uri)
    archive_now(replica_set.uri, folder)
    before = (folder / "rs0" / HEAD).read_bytes()
    write(replica_set.uri)
    whole = json.dump
    heads = 0

    def half(value: Any, file: Any, **options: Any) -> None:
        nonlocal heads
        heads += "until" in value
        if heads == 2:  # the one after the segment
            file.write(json.dumps(value)[:40])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(value, file, **options)

    with monkeypatch.context() as patched:
        patched.setattr("tailrace.base.durable.json.dump", half)
        with pytest.raises(SinkError, match=r"no room left to write .*head.json"):
            archive_now(replica_set.uri, folder)
    assert (folder / "rs0" / HEAD).read_bytes() == before
    check_whole(replica_set.uri, folder)
    archive_now(replica_set.uri, folder)
    check_whole(replica_set.uri, folder)


def test_an_archive_is_for_its_owner_alone(
    replica_set: ReplicaSet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, shared = tmp_path / "archive", tmp_path / "shared"
    with caplog.at_level(logging.WARNING, "tailrace.archive"):
        archive_now(replica_set.uri, folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert caplog.messages == []
        shared.mkdir(mode=0o755)
        archive_now(replica_set.uri, shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    assert [message for message in caplog.messages if "users other than its owner" in message] == caplog.messages[:1]
