"""The table of documents that do not fit their tables: which document, why, and where in the stream.

It is a log, with a row for each time that a document did not fit. The row also holds the document, byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace.base.object_place import reason
from tailrace.errors import SinkError
from tailrace.lake.store import places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.delta_commit import Batch, token_of
from tailrace.lake.tables.rows import CLUSTER_TIME, Misfitting, changed_at
from tailrace.lake.tables.state import TabledCollection

#: Where it lies, in the directory of the tables.
FOLDER: Final = "_quarantine"
_SCHEMA: Final = pa.schema(
    [
        pa.field("namespace", pa.string()),
        pa.field("_key", pa.binary()),
        pa.field("reason", pa.string()),
        pa.field("cluster_time", CLUSTER_TIME),
        pa.field("token", pa.string()),
        pa.field("_bson", pa.binary()),
        pa.field("noticed", pa.timestamp("us", tz="UTC")),
    ]
)


class Quarantine:
    """The quarantine table at ``root``, created when it is first needed.

    ``token``  a stream that is resumed after it begins with the change that gave the document this state
    """

    def __init__(self, root: TablePlace) -> None:
        self._root = root

    def add(self, collection: TabledCollection, batch: Batch, misfits: Sequence[Misfitting]) -> None:
        """Add documents, once for each micro-batch."""
        if not misfits:
            return
        app = f"tailrace/quarantine/{collection.number}"
        if self._has(app, batch):
            return
        now = time.time_ns() // 1000
        rows = [
            {
                "namespace": collection.namespace,
                "_key": one.document.key,
                "reason": one.reason,
                "cluster_time": changed_at(one.document.time) if one.document.time else None,
                "token": token_of(one.document.time) if one.document.time else None,
                "_bson": one.document.document,
                "noticed": now,
            }
            for one in misfits
        ]
        properties = CommitProperties(app_transactions=[Transaction(app, batch.number)])
        try:
            write_deltalake(
                self._root.absolute().as_uri(),
                pa.Table.from_pylist(rows, _SCHEMA),
                mode="append",
                commit_properties=properties,
                configuration={"delta.dataSkippingNumIndexedCols": "0"},
                storage_options=places.options_of(self._root),
            )
        except (DeltaError, OSError) as error:
            if self._has(app, batch):
                return  # the store's answer was lost
            raise SinkError(f"the quarantine {self._root} cannot be written: {reason(error)}") from error

    def _has(self, app: str, batch: Batch) -> bool:
        """Whether the documents of ``batch`` are there."""
        try:
            with places.asking(self._root):
                known = places.delta_table(self._root).transaction_version(app)
        except TableNotFoundError:
            return False
        return known is not None and known >= batch.number
