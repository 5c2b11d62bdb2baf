"""Every reader on the page reads the same from every table: readers times features. Spark's column is in
``tests/spark``.

Earlier tests read tables with one reader, deltalake's for pyarrow: Polars had NULL in every partition column, and no
reader found dates after the year 9999.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables.features import FEATURES, ODD, odd_texts
from tests.tables.readers import READERS


@pytest.mark.parametrize("feature", FEATURES)
def test_every_reader_reads_the_same(feature: str, tmp_path: Path) -> None:
    expected = FEATURES[feature](tmp_path / "t")
    for name, read in READERS.items():
        assert read(tmp_path / "t", None, None) == expected, name


def test_every_reader_finds_the_rows_of_a_value(tmp_path: Path) -> None:
    odd_texts(tmp_path / "t")
    for value in ("", "..", "a/b", "\0", "e\u0301", "__HIVE_DEFAULT_PARTITION__", "01", *ODD[-6:]):
        assert value in ODD
        for name, read in READERS.items():
            if name == "deltalake" and value is not None and "\0" in value:
                continue  # its SQL has no literal for it
            assert read(tmp_path / "t", "c", value) == [{"c": value}] * 2, (name, value)
