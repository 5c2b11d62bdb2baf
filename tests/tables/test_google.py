"""Tables, archives and lakes in Google Cloud Storage: its conditions, limits, rights and readers. Everything else is
tested for each kind of store (``test_object_store.py``, ``test_lake_in_store.py``,
``differential/test_archive_in_store.py``)."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import obstore
import polars
import pytest
from deltalake import DeltaTable

from tailrace.base.object_place import ObjectPlace, StoreAwayError, object_place
from tailrace.base.store_probe import check_store
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.store.verification import verify
from tailrace.lake.tables.names import place_of
from tests.differential.stored_archives import archive
from tests.differential.stored_archives import assert_equal as assert_archived
from tests.tables.equality import in_collection
from tests.tables.google_keys import READER, STRANGER, WRITER, key_file, private_key
from tests.tables.google_server import GoogleServer
from tests.tables.object_server import free_ports
from tests.tables.test_lake_in_store import numbers_in, opened, put
from tests.tables.test_object_store import assert_equal, brought_up, change, collection, commands_fail_at
from tests.tables.unkind_proxy import Fault, UnkindProxy

pytestmark = pytest.mark.parametrize("object_store", ["google"], indirect=True)
__all__ = ["collection"]


class OnceASecond:
    """Google's limit: an object may change about once a second, and the answer to further changes is 429. The parts of
    an upload do not count as changes."""

    def __init__(self) -> None:
        self.changed: dict[str, float] = {}
        self.refused: Counter[str] = Counter()

    def __call__(self, _: int, method: str, path: str) -> Fault | None:
        name, _, query = path.partition("?")
        if method in ("GET", "HEAD") or "partNumber" in query or query.startswith("uploads"):
            return None
        if time.monotonic() - self.changed.get(name, -1.0) < 1:
            self.refused[name.rpartition("/")[2]] += 1
            return "too many"
        self.changed[name] = time.monotonic()
        return None


def held_back(root: ObjectPlace, store: GoogleServer, who: str) -> ObjectPlace:
    """The same place with another account."""
    return store.place(root.key, root.bucket.beside, retry_s=1, google_service_account_key=key_file(who))


def test_an_object_is_compared_by_its_generation(object_store: GoogleServer, prefix: str, tmp_path: Path) -> None:
    """``obstore`` refuses an ETag here."""
    one = object_store.place(prefix, tmp_path) / "one"
    tag = one.create(b"first")
    assert tag.isdigit()
    assert (one.read(), one.head(), one.end(3)) == ((b"first", tag), (5, tag), (b"rst", 5))
    with pytest.raises(FileExistsError):
        one.create(b"other")
    newer = one.swap(b"second", tag)
    assert int(newer) > int(tag)
    for stale in (tag, "1", str(int(newer) + 1)):
        with pytest.raises(FileExistsError):
            one.swap(b"third", stale)
    assert one.read() == (b"second", newer)
    assert int(one.swap(b"second", newer)) > int(newer), "of the same bytes too: it is no digest"
    one.unlink()
    with pytest.raises(FileExistsError):
        one.swap(b"third", newer)
    one.unlink()  # it is no error that there is none


def test_of_writers_at_one_moment_one_wins(object_store: GoogleServer, prefix: str, tmp_path: Path) -> None:
    """Each of eight counts up ten times. A write that the store had not compared would lose a count."""
    root = object_store.place(prefix, tmp_path)
    place = root / "count"

    def count(worker: int) -> int:
        made = 0
        for turn in range(10):
            while True:
                try:
                    content, tag = place.read()
                except FileNotFoundError:
                    content, tag = b"0", ""
                more = f"{int(content.split()[0]) + 1} {worker} {turn}".encode()
                try:
                    place.swap(more, tag) if tag else place.create(more)
                except FileExistsError:
                    continue
                made += 1
                break
        return made

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(count, range(8))) == 80
    assert place.read_bytes().split()[0] == b"80"


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        (2, r"written only once \(x-goog-if-generation-match: 0\)"),
        (3, r"does not compare before it replaces an object \(x-goog-if-generation-match\)"),
    ],
)
def test_a_store_that_ignores_generations_is_refused(
    object_store: GoogleServer, prefix: str, tmp_path: Path, ignored: int, said: str
) -> None:
    puts = 0

    def chosen(_: int, method: str, __: str) -> Fault | None:
        nonlocal puts
        puts += method == "PUT"
        return "no condition" if method == "PUT" and puts == ignored else None

    straight = object_store.place(prefix, tmp_path)
    check_store(straight)
    with UnkindProxy(object_store.address, chosen) as proxy, pytest.raises(SinkError, match=said):
        check_store(object_store.place(prefix, tmp_path, address=proxy.address))
    assert not list(straight.objects())


def test_a_listing_of_more_than_one_page(object_store: GoogleServer, prefix: str, tmp_path: Path) -> None:
    root = object_store.place(prefix, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        names = [f"{number:04}" for number in range(object_store.page + 5)]
        list(pool.map(lambda name: obstore.put(root.bucket.store, f"{root.key}/many/{name}", b""), names))
    assert [one.name for one in (root / "many").objects()] == names
    assert [one.name for one in (root / "many").objects(names[3])] == names[4:]
    assert [one.name for one in root.iterdir()] == ["many"]


def test_a_large_file_appears_whole_or_not_at_all(object_store: GoogleServer, prefix: str, tmp_path: Path) -> None:
    """It is sent in parts, which the last request joins into an object."""
    path, place = tmp_path / "large", object_store.place(prefix, tmp_path) / "large"
    path.write_bytes(os.urandom(12 << 20))
    place.upload(path)
    content = path.read_bytes()
    assert place.read_bytes() == content
    assert place.end(1000) == (content[-1000:], len(content))
    assert place.end(1 << 30) == (content, len(content))
    with pytest.raises(FileExistsError):
        place.create(b"another")
    tag = place.head()[1]
    place.upload(path)
    assert place.head()[1] != tag


# -- credentials ------------------------------------------------------------------------------------------------------


def test_no_refusal_shows_a_key(
    object_store: GoogleServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an account that may only read, of one that the store does not know, and of none."""
    root = object_store.place(prefix, tmp_path / "state")
    (root / "there").create(b"content")
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{free_ports(1)[0]}")  # for the machine's own account
    bare = object_place(str(root), beside=tmp_path, options=object_store.without_key(), retry=timedelta(seconds=1))
    for place, said in (
        (held_back(root, object_store, READER), "AccessDenied: Access denied."),
        (held_back(root, object_store, STRANGER), "AuthenticationRequired"),
        (bare, "Error performing token request"),
    ):
        with pytest.raises(StoreAwayError, match=said) as caught:
            check_store(place)
        text = f"{caught.value} {caught.value.hint} {place!r} {place.bucket!r} {place.bucket.store!r}"
        for who in (WRITER, READER, STRANGER):
            assert not any(line in text for line in private_key(who).splitlines()[1:-1])
        assert "Bearer" not in text
        assert "Start again when the store answers and the rights are there" in str(caught.value.hint)
    assert (held_back(root, object_store, READER) / "there").read_bytes() == b"content"
    assert [one.name for one in held_back(root, object_store, READER).objects()] == ["there"]


@pytest.mark.mongod
@pytest.mark.slow
def test_a_key_in_the_environment(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: GoogleServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As commands get it: in a file that Google's own variable names, in another's, and as text."""
    change(collection, 0)
    for name, value in object_store.without_key().items():
        monkeypatch.setenv(name.upper(), value)
    file = tmp_path / "key.json"
    where = [object_store.uri(prefix), "--state", str(tmp_path / "state")]
    write = ["tables", "write", replica_set.uri, *where, f"{collection.database.name}.*", "--once"]
    named = {"GOOGLE_APPLICATION_CREDENTIALS": str(file), "GOOGLE_SERVICE_ACCOUNT": str(file)}
    for turn, (variable, value) in enumerate({**named, "GOOGLE_SERVICE_ACCOUNT_KEY": key_file(WRITER)}.items()):
        change(collection, turn + 1)
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            file.write_text(key_file(READER) if value == str(file) else "")
            if value == str(file):
                assert main(write) == 1
                file.write_text(key_file(WRITER))
            assert main(write) == 0
            assert main(["tables", "verify", replica_set.uri, *where]) == 0
    text = capsys.readouterr()
    assert text.out.count("equal at") == 3
    assert text.err.count("AccessDenied") == 2
    assert not any(line in text.out + text.err for line in key_file(WRITER).split("\\n")[1:-2])


@pytest.mark.mongod
@pytest.mark.slow
def test_a_bucket_that_does_not_exist(
    replica_set: ReplicaSet,
    object_store: GoogleServer,
    collection: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is named in the error and not created; and the message does not claim that there is no archive."""
    change(collection, 0)
    place = object_place("gs://nowhere/a", beside=tmp_path / "state", options=object_store.options())
    with pytest.raises(StoreAwayError, match="NoSuchBucket"):
        brought_up(replica_set.uri, place, collection)
    commands_fail_at(str(place), replica_set.uri, object_store, tmp_path)
    assert capsys.readouterr().err.count("NoSuchBucket") == 3


@pytest.mark.mongod
@pytest.mark.slow
def test_readers(
    replica_set: ReplicaSet, object_store: GoogleServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """With the rights of a reader."""
    change(collection, 0)
    root = object_store.place(prefix, tmp_path / "state")
    brought_up(replica_set.uri, root, collection)
    truth = in_collection(collection)
    place = held_back(root, object_store, READER)
    assert_equal(place, collection)
    uri, options = str(place_of(place, collection.full_name)), object_store.options(who=READER)
    rows = [DeltaTable(uri, storage_options=options).to_pyarrow_table()]
    rows.append(polars.scan_delta(uri, storage_options=options).collect().to_arrow())
    with duckdb.connect() as connection:
        connection.register("t", DeltaTable(uri, storage_options=options).to_pyarrow_dataset())
        rows.append(connection.execute("SELECT _key, _bson FROM t").to_arrow_table())
    for one in rows:
        assert dict(zip(one.column("_key").to_pylist(), one.column("_bson").to_pylist(), strict=True)) == truth


# -- its limit --------------------------------------------------------------------------------------------------------


@pytest.mark.mongod
@pytest.mark.slow
def test_an_object_that_may_change_once_a_second(
    replica_set: ReplicaSet, object_store: GoogleServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """Commits wait for the store, and nothing is written twice. Tables replace no object at each commit, a lake and an
    archive their head."""
    limit = OnceASecond()
    with UnkindProxy(object_store.address, limit) as proxy:
        tables, lake, archived = (
            object_store.place(f"{prefix}/{name}", tmp_path / name, address=proxy.address)
            for name in ("tables", "lake", "archive")
        )
        for turn in range(4):
            change(collection, turn)
            brought_up(replica_set.uri, tables, collection)
            archive(collection, archived)
        assert_equal(tables, collection)
        assert_archived(archived, collection)
        claim = opened(lake, tmp_path / "checkpoint")
        for number in range(6):
            put(lake, claim, number, range(number * 10, number * 10 + 10), tmp_path / "checkpoint")
        assert numbers_in(lake) == list(range(60))
        assert verify(lake, full=True, checkpoint=tmp_path / "checkpoint").problems == []
    assert limit.refused["head.json"]
    assert not any(name.endswith((".parquet", "0.json")) for name in limit.refused), limit.refused
