"""Which shards an archive follows and up to when, and from when on its streams may begin.

The first version asked for every change since the cluster began, and took a shard that had been removed and added again
long ago for a removed one: it was silently not archived. Nobody had archived a cluster with a history.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import SourceError
from tailrace.read.archive import recorder
from tailrace.read.archive.layout import HEAD, Membership, Reach, describe
from tailrace.read.archive.record import write_record
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.source.membership import ShardChange
from tailrace.read.source.topology import OpenView


def at(seconds: int) -> ClusterTime:
    return ClusterTime.of(seconds, 1)


class Cluster:
    """The parts of a cluster that a recorder uses: shards ``a`` and ``b``, read just after ``at(50)``."""

    def __init__(self) -> None:
        self.views = 0

    def open_view(self) -> OpenView:
        self.views += 1
        return OpenView(at(51 + self.views), at(50 + self.views), ("a", "b"))

    def server_version(self) -> str:
        return "6.0.27"

    def config_client(self) -> Any:
        return None

    def client(self, name: str) -> str:
        return name

    def client_at(self, address: Any) -> str:
        return str(address.name)


class Starts(Recorder):
    """Notes which oplogs would be archived, and from which time on."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(None, cluster, folder, ArchivePolicy())  # type: ignore[arg-type]
        self.started: dict[str, ClusterTime | None] = {}
        self.ends: dict[str, ClusterTime] = {}

    def _start(self, name: str, client: Any, begin: ClusterTime | None, until: ClusterTime | None) -> None:
        self.started[name] = begin
        if until is not None:
            self.ends[name] = until


class Source:
    """A shard's oplog: that of ``gone`` cannot be read."""

    gone: str | None = None

    def __init__(self, client: Any, retry_seconds: float = 1.0) -> None:
        self._client = client

    def oldest(self) -> tuple[ClusterTime, bool]:
        if self._client == self.gone:
            raise SourceError("no server answers")
        return at(1), True


PAST = [
    ShardChange(at(10), "a", None, None),
    ShardChange(at(20), "a", "ra/x:1", None),
    ShardChange(at(30), "c", None, None),
]


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[ShardChange]:
    """What the config server's oplog says about the shards."""
    told = list(PAST)
    monkeypatch.setattr(recorder, "Connection", lambda client: None)
    monkeypatch.setattr(recorder, "MongodSource", Source)
    monkeypatch.setattr(recorder, "remembered_host", lambda connection, name: f"r{name}/x:1")
    monkeypatch.setattr(recorder, "cluster_id", lambda connection: "c1")
    monkeypatch.setattr(recorder, "changes", lambda connection, after: [one for one in told if one.time > after])
    return told


def test_what_came_and_went_before_the_archive_leaves_every_shard_of_today_in_it(
    tmp_path: Path, history: list[ShardChange]
) -> None:
    made = Starts(tmp_path, Cluster())
    found = made._begin_cluster(made._cluster, None)  # type: ignore[arg-type]
    assert found.shards == {"a": Membership(ZERO), "b": Membership(ZERO)}
    assert found.since == at(30)
    assert made.started == {"config.shards": None, "a": None, "b": None}
    assert describe(tmp_path) == found


def test_what_came_and_went_since_is_followed_also_by_the_next_run(tmp_path: Path, history: list[ShardChange]) -> None:
    made = Starts(tmp_path, Cluster())
    made._begin_cluster(made._cluster, None)  # type: ignore[arg-type]
    history += [ShardChange(at(60), "d", "rd/x:1", None), ShardChange(at(70), "b", None, None)]
    again = Starts(tmp_path, Cluster())
    found = again._begin_cluster(again._cluster, describe(tmp_path))  # type: ignore[arg-type]
    assert found.shards == {"a": Membership(ZERO), "b": Membership(ZERO, at(70)), "d": Membership(at(60))}
    assert again.started == {"config.shards": None, "a": None, "b": None, "d": at(60)}
    assert again.ends == {"b": at(70)}
    assert again._follow_members(found) == found


def test_the_rest_of_a_removed_shard_is_archived_once(
    tmp_path: Path, history: list[ShardChange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silently left out: the archive, and so its replay, ended for ever before its entries. This module's own
    test had required that, and no test had removed a shard while nobody archived."""
    made = Starts(tmp_path, Cluster())
    made._begin_cluster(made._cluster, None)  # type: ignore[arg-type]
    history += [
        ShardChange(at(60), "d", "rd/x:1", None),
        ShardChange(at(70), "b", None, None),
        ShardChange(at(80), "d", None, None),
    ]
    for name in "bd":
        monkeypatch.setattr(Source, "gone", name)
        again = Starts(tmp_path, Cluster())
        said = rf"the shard {name} was removed from the cluster at .*, and nothing of it is archived, and it cannot be"
        with pytest.raises(SourceError, match=said):
            again._begin_cluster(again._cluster, describe(tmp_path))  # type: ignore[arg-type]
    monkeypatch.setattr(Source, "gone", None)
    for name, until, begun in (("b", at(69), True), ("b", at(70), False), ("d", at(79), True), ("d", at(81), False)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        write_record(folder / HEAD, Reach(at(1), until).document())
        monkeypatch.setattr("tailrace.read.archive.layout.first_hole", lambda reach, found: None)
        again = Starts(tmp_path, Cluster())
        again._begin_cluster(again._cluster, describe(tmp_path))  # type: ignore[arg-type]
        assert (name in again.started) is begun, (name, until)
        if begun:
            assert again.ends[name] == (at(70) if name == "b" else at(80))


def test_a_shard_that_is_added_again_under_its_name_is_an_error(tmp_path: Path, history: list[ShardChange]) -> None:
    made = Starts(tmp_path, Cluster())
    found = made._begin_cluster(made._cluster, None)  # type: ignore[arg-type]
    history += [ShardChange(at(60), "a", None, None), ShardChange(at(61), "a", "ra/y:1", None)]
    with pytest.raises(SourceError, match="added again"):
        made._follow_members(found)


def test_a_change_during_the_look_has_it_looked_again(tmp_path: Path, history: list[ShardChange]) -> None:
    cluster = Cluster()
    history.append(ShardChange(at(52), "b", "rb/x:1", None))
    made = Starts(tmp_path, cluster)
    assert made._begin_cluster(cluster, None).since == at(52)  # type: ignore[arg-type]
    assert cluster.views == 2
