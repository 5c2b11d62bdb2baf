"""Other programs read a lake beside appends and compactions, by the calls that the page recommends.

An earlier test did so with DuckDB and a glob, accepted missing files, and read only a small day, so that it hardly ever
hit an incomplete listing, or one during a swap of directories.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.amounts import amount
from tests.unit.lake_readers import READERS, growing, read_often


@pytest.fixture(scope="module", params=[amount(6, 15), pytest.param(1000, marks=pytest.mark.slow)])
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A lake that grows and is compacted until the module's tests are done, and how often to read it."""
    root = tmp_path_factory.mktemp("growing") / "lake"
    with growing(root, pause=0.02 if request.param < 100 else 0.1):
        yield root, request.param


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_beside_appends_and_compactions_misses_nothing(beside: tuple[Path, int], reader: str) -> None:
    root, times = beside
    wrong, commits = read_often(root, partial(READERS[reader], root), times)
    print(f"{reader}: {times} reads, {commits} commits meanwhile, {wrong} wrong")
    assert (wrong, commits >= 3) == (0, True)
