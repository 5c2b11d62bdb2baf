"""Places in an object store, as far as no store is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
from deltalake.exceptions import DeltaError
from obstore.exceptions import PreconditionError
from obstore.store import LocalStore, MemoryStore

from tailrace.base.object_place import (
    ObjectBucket,
    ObjectPlace,
    StoreAwayError,
    check_tried,
    is_object_uri,
    object_place,
    reason,
)
from tailrace.base.store_probe import check_store
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.lake_root import SealedObject, read_sealed, read_sealed_there, write_sealed
from tailrace.lake.store.places import asking
from tailrace.lake.tables.names import folder_of, place_of


@pytest.fixture
def place(tmp_path: Path) -> ObjectPlace:
    return object_place(
        "s3://bucket/a/b", beside=tmp_path, options={"aws_access_key_id": "k", "aws_secret_access_key": "hidden"}
    )


def test_it_behaves_like_a_path(place: ObjectPlace) -> None:
    one = place / "c" / "d.json"
    assert str(one) == "s3://bucket/a/b/c/d.json"
    assert (one.name, one.parent) == ("d.json", place / "c")
    assert (
        str(object_place("s3a://bucket//a///b/", beside=Path(), options={"aws_skip_signature": "true"}).parent.parent)
        == "s3://bucket"
    )
    assert place_of(place, "shop.Orders").name == "shop.!4frders"
    assert place_of(Path("t"), "shop.Orders").name == folder_of("shop.Orders") == "shop.~4frders"


AZURE = {"azure_storage_account_name": "shop", "azure_storage_account_key": "aGlkZGVu"}


@pytest.mark.parametrize("root", ["az://box", "abfss://box@shop.dfs.core.windows.net"])
def test_places_in_azure(root: str, tmp_path: Path) -> None:
    one = object_place(f"{root}//a/b/", beside=tmp_path, options=AZURE)
    assert str(one / "c") == f"{root}/a/b/c"
    assert str(one.parent.parent) == root
    assert "aGlkZGVu" not in repr(one) + repr(one.bucket) + repr(one.bucket.store)
    assert one.bucket.options["azure_storage_account_name"] == "shop"
    assert str(object_place(root.replace("abfss", "abfs"), beside=tmp_path, options=AZURE)) == root
    assert place_of(one, "shop.Orders").name == "shop.!4frders"


def test_the_account_of_a_uri_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody's tables get into another account. Azure's own command line has other names for the variables."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "other")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "aGlkZGVu")
    one = object_place("abfss://box@shop.dfs.core.windows.net/a", beside=Path())
    assert one.bucket.options["azure_storage_account_name"] == "shop"
    other = object_place("az://box/a", beside=Path())
    assert other.bucket.options["azure_storage_account_name"] == "other"
    assert other.bucket.options["azure_storage_account_key"] == "aGlkZGVu"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "third")
    assert 'account_name="third"' in repr(object_place("az://box/a", beside=Path()).bucket.store)


@pytest.mark.parametrize(
    "wrong",
    [
        {"azure_storage_account_key": "hidden!!"},
        {"azure_storage_sas_token": "hidden"},
    ],
)
def test_keys_that_are_none_are_not_repeated(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="cannot be opened") as caught:
        object_place("az://box/a", beside=Path(), options={"azure_storage_account_name": "shop"} | wrong)
    assert "hidden" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("scheme", ["gcs", "hdfs", "wasbs", "adl"])
def test_stores_that_nobody_has_tried_are_refused_with_what_to_do(scheme: str) -> None:
    uri = f"{scheme}://box/a?sig=hidden"
    assert not is_object_uri(uri)
    with pytest.raises(UsageError, match=f"begins with '{scheme}:' is refused") as caught:
        check_tried(uri)
    assert "az://CONTAINER" in str(caught.value.hint)
    assert "hidden" not in f"{caught.value} {caught.value.hint}"
    for other in ("/data/gs", "gs", "s3://bucket/a", "az://box/a", "gs://bucket/a"):
        check_tried(other)


def test_what_each_store_compares(tmp_path: Path) -> None:
    """As each wants it: Google's takes no ETag."""
    answer = {"e_tag": '"e"', "version": "7"}
    for uri, options, wanted in (
        ("s3://bucket/a", {"aws_skip_signature": "true"}, {"e_tag": '"e"'}),
        ("az://box/a", AZURE, {"e_tag": '"e"'}),
        ("gs://bucket/a", {"google_skip_signature": "true"}, {"version": "7"}),
    ):
        bucket = object_place(uri, beside=tmp_path, options=options).bucket
        assert bucket.condition(bucket.tag_of(answer)) == wanted


def test_a_place_in_google_cloud_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '{"client_email": "a@b", "private_key": "hidden"')
    with pytest.raises(UsageError, match="cannot be opened") as caught:
        object_place("gs://bucket/a", beside=Path())
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(caught.value.hint)
    assert "hidden" not in f"{caught.value} {caught.value.hint}"
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    one = object_place("gs://my_shop.example.com//a/b/", beside=Path(), options={"google_skip_signature": "true"})
    assert str(one / "c") == "gs://my_shop.example.com/a/b/c"
    assert str(one.parent.parent) == "gs://my_shop.example.com"
    assert place_of(one, "shop.Orders").name == "shop.!4frders"


@pytest.mark.parametrize("suffixes", [True, False])
def test_the_end_of_an_object(suffixes: bool) -> None:
    """Azure needs the size for this."""
    place = ObjectPlace(ObjectBucket("memory://", MemoryStore(), {}, Path(), suffixes=suffixes), "a/b")
    obstore.put(place.bucket.store, place.key, b"0123456789")
    for size, end in ((3, b"789"), (10, b"0123456789"), (1000, b"0123456789")):
        assert place.end(size) == (end, 10)
    with pytest.raises(FileNotFoundError):
        (place / "none").end(1)


def test_a_store_that_goes_away_while_a_checkpoint_is_read_is_no_damage(place: ObjectPlace, tmp_path: Path) -> None:
    """``deltalake`` has no separate class for that error: users were told to remove the table, and versions counted as
    lost. No test had cut the connection at a table with a checkpoint (``test_merged_in_store.py``)."""
    cut = "Kernel error: Arrow error: External: Generic {} error: Error performing GET http://h/b/k in 2ms - HTTP error"
    for kind in ("S3", "MicrosoftAzure", "GCS"):
        with pytest.raises(StoreAwayError, match="cannot read"), asking(place):
            raise DeltaError(cut.format(kind))
    for root, text in ((place, "Kernel error: Parquet error: EOF"), (tmp_path, cut.format("S3"))):
        with pytest.raises(DeltaError), asking(root):
            raise DeltaError(text)
    with pytest.raises(FileNotFoundError), asking(place):
        raise FileNotFoundError("k")


@pytest.mark.parametrize("read_before", [False, True])
def test_what_was_read_before_is_exchanged_and_what_another_has_written_is_compared(read_before: bool) -> None:
    """What was read at the lock was read again twice before a commit's head was written: nobody had counted it."""
    place = ObjectPlace(ObjectBucket("memory://", MemoryStore(), {}, Path()), "head.json")
    asked: list[int] = []

    def stays(there: dict[str, object]) -> bool:
        asked.append(int(str(there["n"])))
        return asked[-1] > 4

    known = write_sealed(place, {"n": 1}, stays, SealedObject() if read_before else None)
    assert known == read_sealed_there(place)[1]
    for number in (2, 3):
        known = write_sealed(place, {"n": number}, stays, known if read_before else None)
        assert (read_sealed(place), known) == ({"n": number}, read_sealed_there(place)[1])
    assert asked == [1, 2]
    write_sealed(place, {"n": 4})  # by another machine, which ``known`` does not know
    write_sealed(place, {"n": 5}, stays, known)
    assert (read_sealed(place), asked) == ({"n": 5}, [1, 2, 3, 4])
    write_sealed(place, {"n": 4}, stays, known)
    assert read_sealed(place) == {"n": 5}, "it is newer, and stays"
    obstore.put(place.bucket.store, place.key, b"")
    with pytest.raises(SinkError, match="damaged"):
        read_sealed(place)


@pytest.mark.parametrize(
    ("said", "is_full"),
    [
        ("Server returned non-2xx status code: 507 Insufficient Storage: ", True),
        ("403: <Error><Code>QuotaExceeded</Code><Message>no more</Message></Error>", True),
        ("507: <Error><Code>XMinioStorageFull</Code></Error>", True),
        ("403: <Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>", False),
        ("error sending request for url (http://127.0.0.1:507/tests/507/a)", False),
    ],
)
def test_a_store_without_room_is_told_from_one_that_does_not_answer(
    place: ObjectPlace, said: str, is_full: bool
) -> None:
    hint = place.trouble("write", OSError(said)).hint or ""
    assert ("no room left" in hint, "when the store answers" in hint) == (is_full, not is_full)


def test_a_store_that_compares_tags_without_their_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceph's gateway. All stores that were tested before it accept a tag as they return it, so the probe at the start
    ended with an unexpected FileExistsError."""
    put = obstore.put

    def as_ceph(*given: Any, mode: Any = "overwrite") -> Any:
        if isinstance(mode, dict):
            if mode["e_tag"].startswith('"'):
                raise PreconditionError("no ETag has quotes")
            mode = {"e_tag": f'"{mode["e_tag"]}"'}
        return put(*given, mode=mode)

    monkeypatch.setattr(obstore, "put", as_ceph)
    one = ObjectPlace(ObjectBucket("memory://", MemoryStore(), {}, Path()), "k")
    first = one.create(b"1")
    second = one.swap(b"2", first)
    assert (one.bucket.bare, one.read()) == ([True], (b"2", second))
    for tag in (first, '"7"'):
        with pytest.raises(FileExistsError, match="was changed"):
            one.swap(b"3", tag)
    third = one.swap(b"3", second)
    assert third not in (first, second)
    for bare in ([True], []):
        one.bucket.bare[:] = bare
        one.unlink()
        with pytest.raises(FileExistsError, match="was changed"):  # as of one that was removed
            one.swap(b"4", third)
    check_store(ObjectPlace(ObjectBucket("memory://", MemoryStore(), {}, Path()), "root"))


def test_a_store_that_replaces_nothing_on_a_condition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put

    def no(*given: Any, mode: Any = "overwrite") -> Any:
        if isinstance(mode, dict):
            raise PreconditionError("no")
        return put(*given, mode=mode)

    monkeypatch.setattr(obstore, "put", no)
    place = ObjectPlace(ObjectBucket("memory://", MemoryStore(), {}, Path()), "root")
    with pytest.raises(SinkError, match=r"does not replace an object that is as it was \(If-Match\)"):
        check_store(place)
    assert not place.is_dir()


def test_deleting_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    """Azure says that there was nothing, and S3 does not."""
    store = LocalStore(tmp_path)
    with pytest.raises(FileNotFoundError):
        obstore.delete(store, "a")
    ObjectPlace(ObjectBucket("file://", store, {}, Path()), "a").unlink()


def test_no_text_of_it_has_its_keys(place: ObjectPlace) -> None:
    assert "hidden" not in repr(place) + str(place) + repr(place.bucket) + str(place.bucket)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:hidden@bucket/a",
        "s3://bucket:9000/a",
        "s3://",
        "s3:///a",
        "s3://bucket/a?key=hidden",
        "s3://bucket/../b",
        "az://",
        "az://box/a?sv=2021&sig=hidden",
        "az://hidden@box/a",
        "az://A/b",
        "abfss://box/a?sig=hidden",
        "abfss://box@shop.dfs.core.windows.net/a?sig=hidden",
        "abfss://box@shop.example.com/hidden",
        "abfss://hidden:hidden@shop.dfs.core.windows.net/a",
        "gs://hidden@bucket/a",
        "gs://bucket/a?X-Goog-Signature=hidden",
        "gs://hidden:hidden@bucket/a",
        "gs://Bucket/a",
        "gs://",
    ],
)
def test_other_addresses_are_refused_and_not_repeated(uri: str) -> None:
    assert is_object_uri(uri)
    with pytest.raises(UsageError) as caught:
        object_place(uri, beside=Path())
    assert "hidden" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    ("said", "repeated"),
    [
        (
            "Generic S3 error: Error performing PUT http://h/b/k in 2ms - Server returned 403: <Error><Code>Signature"
            "DoesNotMatch</Code><Message>It does not match.</Message><StringToSign>hidden</StringToSign></Error>",
            "SignatureDoesNotMatch: It does not match.",
        ),
        (
            "Error performing GET https://h/b/k?X-Signature=hidden in 2ms\n\nDebug source:\nhidden",
            "https://h/b/k in 2ms",
        ),
        (
            "Error performing PUT https://h/b/k?sig=hidden in 2ms - Server returned 403: <Error>\n <Code>Authentication"
            "Failed</Code>\n  <Message>Not authenticated.\nRequestId:1\nTime:2</Message>\n  <AuthenticationErrorDetail>"
            "hidden</AuthenticationErrorDetail></Error>",
            "AuthenticationFailed: Not authenticated. RequestId:1 Time:2",
        ),
        ("Kernel error\n  \x1b[31m↳\x1b[0m tcp connect error\n", "Kernel error tcp connect error"),
    ],
)
def test_what_a_store_says_is_repeated_without_what_may_be_secret(said: str, repeated: str) -> None:
    found = reason(OSError(said))
    assert repeated in found
    assert "hidden" not in found
    assert "\n" not in found
