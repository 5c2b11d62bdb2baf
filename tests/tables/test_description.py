"""What ``tailrace tables status`` says about columns: other names, other types, fields without a column, dates that are
NULL.

Names that differ only in case, and fields after the 500th, were not listed anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS
from pymongo import MongoClient

from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.description import described
from tailrace.lake.tables.schema import COLUMNS_MAX, CUT_MAX, TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.tables.features import Made, rows


def lines(root: Path, *, whole: bool = False) -> list[str]:
    """The table as the command reads it, without rules."""
    return list(described(CollectionTable(root, "shop.orders"), whole=whole))


def test_columns_with_other_names_and_types_are_listed(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", TableSchema())
    made.whole([{"_id": 1, "abC": 1, "abc": 2, "_key": 3, "a b": 4, "\x1b]0;x": 1, "text": "x", "n": 5, "fine": 6}])
    wider = rows(made.schema, [{"_id": 2, "text": 7, "n": 0.5}])
    assert wider.retyped
    made.schema = wider.schema
    documents = [{"_id": 1, "text": "x"}, {"_id": 2, "text": 7, "n": 0.5}, {"_id": 3, "when": DatetimeMS(2**60)}]
    made.whole(documents)
    expected = [
        "abc is in column abc_2: long; another column has this name, or one that differs only in case",
        "_key is in column _key_2: long; another column has this name, or one that differs only in case",
        "a b is in column a_b: long",
        "\\u001b]0;x is in column _]0_x: long",
        "text is in column text: json; it was string, and strings are now in quotes",
        "n is in column n: double; it was long",
    ]
    assert lines(tmp_path / "t") == expected
    every = lines(tmp_path / "t", whole=True)
    assert set(expected) < set(every)
    assert "when is in column when: timestamp; 1 dates too far away for readers are NULL" in every
    assert "fine is in column fine: long" in every


def test_fields_for_which_there_is_no_room_are_named(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", TableSchema())
    made.whole([{"_id": 1, **{f"f{number}": number for number in range(COLUMNS_MAX - 2)}}])
    assert lines(tmp_path / "t") == []
    made.change([{"_id": 2, "last": 1, "cut0": 1}, {"_id": 3, "cut1": 2, "cut0": None}])
    made.table = CollectionTable(tmp_path / "t", "shop.orders", declared="")
    made.schema = made.table.schema(TableSchema())
    assert made.schema.cut == ("cut0", "cut1")
    assert [column.name for column in made.schema.columns][-1] == "last"
    (line,) = lines(tmp_path / "t")
    assert line == "only in _bson and _json, since a table has at most 500 columns: cut0, cut1"
    made.change([{"_id": 4, **{f"more{number}": 1 for number in range(CUT_MAX + 5)}}])
    assert len(made.schema.cut) == CUT_MAX
    assert lines(tmp_path / "t", whole=True)[-1].endswith(" and others")
    assert len(made.schema.columns) == COLUMNS_MAX


@pytest.mark.mongod
def test_the_command_prints_them(replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines had tests, but the output of ``tailrace tables status`` had none."""
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database("described")
        far = DatetimeMS(253402300800000)
        client.described.c.insert_many([{"_id": 1, "abC": 1, "abc": 2, "at": far}, {"_id": 2, "n": 1}])
        with TablesWriter(replica_set.uri, TableSettings(tmp_path, (TableRule("described.*"),))) as writer:
            writer.run_to_present()
            client.described.c.update_one({"_id": 2}, {"$set": {"n": "text"}})
            writer.run_to_present()
        client.drop_database("described")
    twin = "  abc is in column abc_2: long; another column has this name, or one that differs only in case"
    wider = "  n is in column n: json; it was long"
    assert main(["tables", "status", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {twin, wider} < set(said)
    assert main(["tables", "status", str(tmp_path), "described.c"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert {*said, "  at is in column at: timestamp; 1 dates too far away for readers are NULL"} < {*whole}
