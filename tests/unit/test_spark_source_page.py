"""The page on the Spark source has exactly the options and columns of the code: a new one is in the code first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tailrace.lake.spark.query.options import COLUMNS, DOCUMENT_FORMS, KNOWN, MAX_BYTES_DEFAULT, MAX_BYTES_EXACT, parse
from tailrace.lake.spark.query.schema import DOCUMENT_COLUMNS, spark_schema

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "spark-source.md"
NAME = re.compile(r"`(\w+)`")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def named(heading: str) -> list[str]:
    """The names in the table's first column."""
    return [name for cells in rows(heading) for name in NAME.findall(cells[0])]


def row_of(name: str) -> list[str]:
    return next(cells for cells in rows("Options") if f"`{name}`" in cells[0])


def test_the_page_has_every_option_once() -> None:
    assert sorted(named("Options")) == sorted(KNOWN)


def test_the_page_has_every_column_in_the_order_of_the_frame() -> None:
    assert tuple(named("Columns")) == COLUMNS


def test_the_page_says_the_type_of_every_column_and_which_is_never_null() -> None:
    said = {name: (cells[1], cells[2]) for cells in rows("Columns") for name in NAME.findall(cells[0])}
    for field in spark_schema(COLUMNS, DOCUMENT_FORMS[0]):
        kind, content = said[field.name]
        expected = "by `documents`" if field.name in DOCUMENT_COLUMNS else field.dataType.simpleString()
        assert kind.replace(": ", ":").replace(", ", ",") == expected, field.name
        assert ("never NULL" in content) == (not field.nullable), field.name


def test_the_page_names_every_form_of_a_document() -> None:
    """In the options' row, and each with a paragraph of its own."""
    options = parse({"uri": "mongodb://localhost/?replicaSet=rs0"})
    assert tuple(NAME.findall(row_of("documents")[1])) == DOCUMENT_FORMS
    assert row_of("documents")[2] == f"`{options.documents}`"
    for form in DOCUMENT_FORMS:
        assert f"\n* `{form}`: " in PAGE.read_text()


@pytest.mark.parametrize("size", [MAX_BYTES_DEFAULT, MAX_BYTES_EXACT])
def test_the_page_says_the_default_bound_of_a_micro_batch(size: int) -> None:
    whole = f"{size >> 30}g" if size >= 1 << 30 else f"{size >> 20}m"
    assert f"`{whole}`" in row_of("maxBytesPerTrigger")[2]
