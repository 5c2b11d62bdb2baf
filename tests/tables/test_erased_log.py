"""Erased documents leave no bounds in the log: neither those of a row that is only marked as deleted, nor those of a
file that was removed before the erasure.

The tests with a deployment (``test_erase.py``) had no table with bounds that is merged on read, and none whose files
had already been removed or merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import bson
import pytest

from tailrace.core.event.named_document import NamedDocument, NamedDocuments
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.erasure import erase_documents
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.standing import fault_of, harm_of, note
from tailrace.lake.tables.state import TabledCollection, TableMark, TablesPosition, TableState
from tailrace.lake.tables.versions import Keeping, around
from tests.tables.features import Made
from tests.tables.test_merge_on_read import held
from tests.traces import traces

MARKER = "anna-4711@example.com"
ORDERS = "shop.orders"
NAMED = NamedDocuments([NamedDocument(ORDERS, bson.encode({"_id": 99}))])


def made(top: Path, *, merges: bool, bounds: Sequence[str] = ("s",)) -> Made:
    table = Made(place_of(top, ORDERS), TableSchema.declared({"n": "int", "s": "string"}), merges=merges, bounds=bounds)
    table.whole([*({"_id": one, "n": 0, "s": "b"} for one in range(50)), {"_id": 99, "n": 0, "s": MARKER}])
    table.change([], gone=[99])
    return table


def known(top: Path, table: CollectionTable) -> None:
    """A state that knows the table as it is after its last batch."""
    state = TableState(top / "_tailrace" / "state")
    batch = table.batch
    with state.writing() as writing:
        writing.set_collection(TabledCollection("00" * 16, 1, ORDERS))
        writing.set_mark(note(TableMark(ORDERS, 1, batch, whole=False), table))
        writing.set_position(TablesPosition(batch, ClusterTime.of(101 + batch, 0), {}).now_stated())
    state.close()


def checked(top: Path) -> CollectionTable:
    """The table, if it is the one that the state knows."""
    state = TableState(top / "_tailrace" / "state", readonly=True)
    [mark], position = state.marks().values(), state.position()
    state.close()
    table = CollectionTable(place_of(top, ORDERS), ORDERS)
    assert position is not None
    assert fault_of(table, mark, position, "") is None
    assert harm_of(table.root, mark) is None
    assert mark.version == table.version
    found, following = around(table.root, position.time)
    assert (found is not None, following) == (True, None), "it says what it held since its last batch"
    return table


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("later", ["nothing", "changes", "merged", "expired", "no bounds any more"])
def test_no_bound_is_left_in_the_log(tmp_path: Path, later: str, merges: bool) -> None:
    table = made(tmp_path, merges=merges)
    if later == "changes":
        for number in range(1, 3):
            table.change([{"_id": number, "n": number, "s": "c"}])
    known(tmp_path, table.table)
    if later in ("merged", "expired"):
        table.table.compact()
    if later == "expired":  # the document is in no file, so nothing would be searched
        table.table.expire(Keeping(0))
    if later == "no bounds any more":
        number, table = table._number, Made(table.table.root, table.schema, merges=merges)
        table._number = number
        table.change([{"_id": 1, "n": 1, "s": "c"}])
        known(tmp_path, table.table)
    before = held(table.table.root)
    assert any("_delta_log" in name for name in traces(tmp_path, MARKER.encode()))
    report = erase_documents(tmp_path, NAMED)
    assert report.erased == (later != "expired")
    assert traces(tmp_path, MARKER.encode()) == []
    assert held(table.table.root) == before
    checked(tmp_path)
    version = table.table.version
    assert erase_documents(tmp_path, NAMED).erased == 0
    table.table.look()
    assert checked(tmp_path).version == table.table.version <= version + 2, "nothing is left to be done"


def test_a_log_whose_files_are_all_there_is_left_alone(tmp_path: Path) -> None:
    table = made(tmp_path, merges=True)
    known(tmp_path, table.table)
    other = NamedDocuments([replace(NAMED.documents[0], id=bson.encode({"_id": "nobody"}))])
    assert erase_documents(tmp_path, other).erased == 0
    assert sorted(path.name[-6:] for path in (table.table.root / "_delta_log").iterdir()) == ["0.json", "1.json"]
