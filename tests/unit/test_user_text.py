"""Sizes, durations and names as people write them."""

from __future__ import annotations

import pytest

from tailrace.core.user_text import byte_count, nearest, seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("134217728", 134217728),
        ("128m", 128 << 20),
        ("128 MB", 128 << 20),
        ("2G", 2 << 30),
        ("1tb", 1 << 40),
        ("3b", 3),
    ],
)
def test_a_size(text: str, size: int) -> None:
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["", "0", "0m", "-1", "1.5g", "1 mib", "m", "1e6", "١٢", "1" * 19, "12 m b"])
def test_what_is_no_size(text: str) -> None:
    assert byte_count(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30s", 30),
        ("5m", 300),
        ("12h", 43200),
        ("7d", 604800),
        ("1 second", 1),
        ("7 days", 604800),
        ("1.5 hours", 5400),
    ],
)
def test_a_duration(text: str, found: float) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize(
    "text", ["", "5", "5 weeks", "-5s", "5 mins", "soon", "5ss", "1..5s", "٥s", "1" * 10 + "s", "day"]
)
def test_what_is_no_duration(text: str) -> None:
    assert seconds(text) is None


def test_the_nearest_name_whatever_its_case() -> None:
    assert nearest("FULLDOCUMNT", ["fullDocument", "collection"]) == "fullDocument"
    assert nearest("qqq", ["fullDocument", "collection"]) is None
    assert nearest("colection", ["fullDocument", "collection"], cutoff=0.99) is None
