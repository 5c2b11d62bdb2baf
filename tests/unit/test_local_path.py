"""Where a lake may be. No test had used anything but a plain path, so a bucket's URI became a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.base.object_place import ObjectPlace
from tailrace.errors import UsageError
from tailrace.lake.spark.store.pipeline_file import load
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.layout import LakeLayout
from tailrace.lake.store.local_path import local_path

_AZURE = "abfss://container@account.dfs.core.windows.net/lake"
ELSEWHERE = [
    "s3a://bucket/lake",
    "S3://bucket/lake",
    "hdfs://namenode:8020/lake",
    "hdfs:///lake",
    "abfss://container@account.dfs.core.windows.net/lake",
    "gs://bucket/lake",
    "gcs://bucket/lake",
    "dbfs:/lake",
    "https://host/lake",
    "file://other-host/lake",
    "file:////other-host/share",
    "s3a://key:s3cret@bucket/lake",
]


@pytest.mark.parametrize("text", ELSEWHERE)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_uri_of_anything_but_a_local_file_is_refused(text: str, kind: Any, tmp_path: Path) -> None:
    if kind is Path and text.startswith("file://"):
        pytest.skip("pathlib has made a local path of it")
    with pytest.raises(
        UsageError, match=r"the lake is a URI that begins with '\w+:', and must be a directory"
    ) as found:
        local_path(kind(text), "the lake", tmp_path)
    assert "s3cret" not in str(found.value)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("file:///data/lake", "/data/lake"),
        ("file://localhost/data/lake", "/data/lake"),
        ("file:/data/a%20b", "/data/a b"),
        (Path("file:///data/lake"), "/data/lake"),
        ("/data/lake", "/data/lake"),
        ("lake", "/base/lake"),
        ("./a:b", "/base/a:b"),
        ("C:/lake", "/base/C:/lake"),
        ("day=2026-11-22T10:00/x", "/base/day=2026-11-22T10:00/x"),
    ],
    ids=str,
)
def test_what_is_local_is_taken(given: Any, path: str) -> None:
    assert local_path(given, "the lake", Path("/base")) == Path(path)


@pytest.mark.parametrize(("key", "scheme"), [("path", "dbfs"), ("checkpoint", "s3a"), ("checkpoint", "dbfs")])
def test_the_pipeline_file_refuses_it_by_its_key(key: str, scheme: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    places = {"path": "lake", "checkpoint": "checkpoint", key: f"{scheme}://bucket/lake"}
    file.write_text("source: {uri: 'mongodb://h'}\nlake: " + str(places).replace("'", '"'))
    with pytest.raises(UsageError, match=rf"pipeline\.yaml: lake\.{key} is a URI that begins with '{scheme}:'"):
        load(file)


@pytest.mark.parametrize(
    ("lake", "error"),
    [
        ("path: s3a://bucket/lake", "lake.path is in an object store: it needs a state directory"),
        ("path: lake, state: state", "a state directory belongs to a lake in an object store"),
        ("path: gcs://bucket/lake, state: state", "a place in Google Cloud Storage begins with gs://"),
        ("path: gs://bucket/lake", "lake.path is in an object store: it needs a state directory"),
        ("path: gs://bucket/lake, state: state, iceberg: 'sqlite:///x.db'", "a lake in Google Cloud Storage cannot"),
        ("path: 'hdfs:///lake'", "HDFS cannot replace a file on the condition"),
        ("path: 's3://key:s3cret@bucket/lake', state: state", "must be s3://BUCKET/PREFIX, without keys"),
        ("path: s3://bucket/lake, state: 5", "lake.state must be text"),
        ("path: s3://bucket/lake, state: s3://bucket/state", "the state is a URI that begins with 's3:'"),
        (f"path: {_AZURE}, state: state, iceberg: 'sqlite:///x.db'", "a lake in Azure cannot have Iceberg snap"),
    ],
)
def test_what_a_pipeline_file_says_of_a_lake_in_a_store(lake: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"source: {{uri: 'mongodb://h'}}\nlake: {{{lake}}}\n")
    with pytest.raises(UsageError, match=error) as found:
        load(file)
    assert "s3cret" not in f"{found.value} {found.value.hint}"


def test_a_lake_in_a_store_and_its_state(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("source: {uri: 'mongodb://h'}\nlake: {path: 's3://bucket/a/lake', state: ./shop}\n")
    root = load(file).lake
    assert isinstance(root, ObjectPlace)
    assert (str(root), root.bucket.beside) == ("s3://bucket/a/lake", tmp_path / "shop")
    assert LakeLayout(root).default_checkpoint == tmp_path / "shop" / "checkpoint"


@pytest.mark.parametrize(
    ("which", "error"),
    [
        ("lake", "the lake is in an object store: it needs a state directory"),
        ("checkpoint", "the checkpoint is a URI that begins with 's3a:'"),
    ],
)
def test_write_stream_refuses_it_before_it_asks_anybody(
    which: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nobody: Any = None
    places = {"lake": "lake", "checkpoint": "checkpoint", which: "s3a://bucket/lake"}
    with pytest.raises(UsageError, match=error):
        write_stream(nobody, {"uri": "mongodb://127.0.0.1:1"}, places["lake"], checkpoint=places["checkpoint"])
    assert list(tmp_path.iterdir()) == []
