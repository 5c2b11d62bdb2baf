"""Tables and archives in Azure Blob Storage: its rights and readers. Everything else is tested for each kind of store
(``test_object_store.py``, ``differential/test_archive_in_store.py``)."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import duckdb
import obstore
import polars
import pytest
from deltalake import DeltaTable

from tailrace.base.object_place import ObjectPlace, StoreAwayError, object_place
from tailrace.base.store_probe import check_store
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.names import place_of
from tests.tables.azure_server import ACCOUNT, AzureServer, signature_for
from tests.tables.equality import in_collection
from tests.tables.test_object_store import assert_equal, brought_up, change, collection, commands_fail_at

# The same without a store: unit/test_object_place.py
pytestmark = [pytest.mark.mongod, pytest.mark.slow, pytest.mark.parametrize("object_store", ["azure"], indirect=True)]
__all__ = ["collection"]


def signed(store: AzureServer, prefix: str, rights: str, state: Path, container: str = "tests") -> ObjectPlace:
    """A place, accessed with a signature with these rights."""
    options = store.without_key() | {"azure_storage_sas_token": signature_for(rights, container)}
    return object_place(f"az://{container}/{prefix}", beside=state, options=options, retry=timedelta(seconds=1))


def secret_of(place: ObjectPlace) -> str:
    return parse_qs(place.bucket.options["azure_storage_sas_token"])["sig"][0]


def test_least_rights(
    replica_set: ReplicaSet, object_store: AzureServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """A writer needs five rights, a reader two of them. No refusal shows the signature."""
    writer = signed(object_store, prefix, "rcwdl", tmp_path / "state")
    for turn in range(3):
        change(collection, turn)
        brought_up(replica_set.uri, writer, collection, compact_every=1, grace_h=0.0)
    assert_equal(writer, collection)
    reader = signed(object_store, prefix, "rl", tmp_path / "state")
    assert_equal(reader, collection)
    for rights in ("rl", "rcwl", "rwdl", "cwdl", "rcwd"):
        place = signed(object_store, prefix, rights, tmp_path / "state")
        if rights in ("rwdl",):  # "w" allows what "c" does
            check_store(place)
            continue
        with pytest.raises(StoreAwayError) as caught:
            check_store(place)
        text = f"{caught.value} {caught.value.hint} {place!r} {place.bucket!r} {place.bucket.store!r}"
        assert secret_of(place) not in text
        assert "sig=" not in text
        assert "is not authorized to perform this operation" in text, rights
    assert_equal(writer, collection)


def test_a_signature_in_the_environment(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: AzureServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As commands get it. A command that only reads writes nothing, and needs no message."""
    for name, value in object_store.without_key().items():
        monkeypatch.setenv(name.upper(), value)
    where = [f"abfss://tests@{ACCOUNT}.dfs.core.windows.net/{prefix}", "--state", str(tmp_path / "state")]
    write = ["tables", "write", replica_set.uri, *where, f"{collection.database.name}.*", "--once"]
    tokens = {rights: signature_for(rights) for rights in ("rl", "rcwdl")}
    for rights, status in (("rl", 1), ("rcwdl", 0)):
        change(collection, status)
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", tokens[rights])
        assert main(write) == status
    assert main(["tables", "verify", replica_set.uri, *where]) == 0
    text = capsys.readouterr()
    assert "equal at" in text.out
    assert "is not authorized" in text.err
    assert not any(parse_qs(one)["sig"][0] in text.out + text.err or "sig=" in text.err for one in tokens.values())


def test_a_container_that_does_not_exist(
    replica_set: ReplicaSet,
    object_store: AzureServer,
    collection: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The container is named in the error and not created; and the message does not claim that there is no archive."""
    change(collection, 0)
    place = object_place("az://nowhere/a", beside=tmp_path / "state", options=object_store.options())
    with pytest.raises(StoreAwayError, match="ContainerNotFound"):
        brought_up(replica_set.uri, place, collection)
    commands_fail_at(str(place), replica_set.uri, object_store, tmp_path)
    assert capsys.readouterr().err.count("ContainerNotFound") == 3


def test_readers(
    replica_set: ReplicaSet, object_store: AzureServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """By both URIs, with the rights of a reader. By themselves DuckDB and Spark need an extension or a jar."""
    change(collection, 0)
    brought_up(replica_set.uri, object_store.place(prefix, tmp_path / "state"), collection)
    truth = in_collection(collection)
    for root in ("az://tests", f"abfss://tests@{ACCOUNT}.dfs.core.windows.net"):
        options = object_store.without_key() | {"azure_storage_sas_token": signature_for("rl")}
        place = object_place(f"{root}/{prefix}", beside=tmp_path / "state", options=options)
        assert_equal(place, collection)
        uri = str(place_of(place, collection.full_name))
        rows = [DeltaTable(uri, storage_options=options).to_pyarrow_table()]
        rows.append(polars.scan_delta(uri, storage_options=options).collect().to_arrow())
        with duckdb.connect() as connection:
            connection.register("t", DeltaTable(uri, storage_options=options).to_pyarrow_dataset())
            rows.append(connection.execute("SELECT _key, _bson FROM t").to_arrow_table())
        for one in rows:
            assert dict(zip(one.column("_key").to_pylist(), one.column("_bson").to_pylist(), strict=True)) == truth


def test_a_large_file_appears_whole_or_not_at_all(object_store: AzureServer, prefix: str, tmp_path: Path) -> None:
    """It is sent in blocks, which the last request joins into a file."""
    path, place = tmp_path / "large", object_store.place(prefix, tmp_path) / "large"
    path.write_bytes(os.urandom(12 << 20))
    place.upload(path)
    content = path.read_bytes()
    assert place.read_bytes() == content
    assert place.end(1000) == (content[-1000:], len(content))
    assert place.end(1 << 30) == (content, len(content))
    empty = object_store.place(prefix, tmp_path) / "empty"
    empty.create(b"")
    assert empty.end(1000) == (b"", 0)
    with pytest.raises(FileExistsError):
        place.create(b"another")
    etag = place.head()[1]
    place.upload(path)
    assert place.head()[1] != etag, "of the same bytes too: it is no digest"
    obstore.delete(place.bucket.store, place.key)
    place.unlink()  # as in S3, it is no error that there is none
