"""Python's collector is off during a micro-batch, and on again after it."""

from __future__ import annotations

import gc

import pytest

from tailrace.lake.tables.collector import without_collecting


def test_the_collector_is_as_it_was_also_after_an_error() -> None:
    assert gc.isenabled()
    with without_collecting():
        assert not gc.isenabled()
        with without_collecting():
            pass
        assert not gc.isenabled(), "it was off before"
    assert gc.isenabled()
    with pytest.raises(ValueError, match="an error"), without_collecting():
        raise ValueError("an error")
    assert gc.isenabled()
