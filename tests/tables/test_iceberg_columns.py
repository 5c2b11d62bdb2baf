"""Columns of older tables in Iceberg."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tailrace.lake.tables import delta_commit
from tailrace.lake.tables.iceberg_mirror import IcebergMirror
from tests.tables.iceberg import compared, iceberg_table
from tests.tables.test_iceberg import mirrored as mirrored  # noqa: PLC0414  a fixture
from tests.tables.test_iceberg import orders


def test_fields_that_may_be_null_from_now_on_keep_their_numbers(
    tmp_path: Path, mirrored: IcebergMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``_changed`` could not be NULL, so Delta's own connector would not write rows without it. Older tables
    get the new type with their next commit."""
    with monkeypatch.context() as before:
        strict = [{"name": name, "type": "long", "nullable": False, "metadata": {}} for name in ("t", "i")]
        before.setattr(delta_commit, "_TIME_TYPE", {"type": "struct", "fields": strict})
        made = orders(tmp_path)
        made.change([{"_id": 1, "n": 7}])
    first = iceberg_table(tmp_path).schema().find_field("_changed")
    assert [one.required for one in first.field_type.fields] == [True, True]
    made.change([{"_id": 2, "n": 8}])
    then = iceberg_table(tmp_path).schema().find_field("_changed")
    assert [one.required for one in then.field_type.fields] == [False, False]
    assert [one.field_id for one in (first, *first.field_type.fields)] == [
        one.field_id for one in (then, *then.field_type.fields)
    ]
    assert compared(tmp_path / "t", iceberg_table(tmp_path)) == [0, 1, 2]
    read = DeltaTable(tmp_path / "t").schema().to_json()
    assert {one["nullable"] for one in json.loads(read)["fields"][3]["type"]["fields"]} == {True}
