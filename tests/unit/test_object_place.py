"""Places in an object store, as far as no store is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.base.object_place import ObjectPlace, is_object_uri, object_place, reason
from tailrace.errors import UsageError
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
        ("Kernel error\n  \x1b[31m↳\x1b[0m tcp connect error\n", "Kernel error tcp connect error"),
    ],
)
def test_what_a_store_says_is_repeated_without_what_may_be_secret(said: str, repeated: str) -> None:
    found = reason(OSError(said))
    assert repeated in found
    assert "hidden" not in found
    assert "\n" not in found
