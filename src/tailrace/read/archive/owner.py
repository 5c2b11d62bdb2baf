"""Whether an archive belongs to the deployment that is read now: checked before it is written, and before a stream
takes its older part from it."""

from __future__ import annotations

from typing import Any, Final

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.errors import SourceError
from tailrace.read.archive.layout import ArchiveSegment, head, oplog_of
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.segment import SegmentReader
from tailrace.read.source.connection import Connection
from tailrace.read.source.live import LiveSource
from tailrace.read.source.witness import check_witness, replica_set_id

_UNAUTHORIZED: Final = 13


def set_identity(oplog: str, client: MongoClient[Any], cluster: str = "") -> DeploymentIdentity:
    """The identity of the replica set that has this oplog, and of its ``cluster``. A user who may read the oplog alone
    is not told the replica set's id: then entries are all there is to compare."""
    try:
        return DeploymentIdentity({oplog: replica_set_id(Connection(client))}, cluster)
    except SourceError as error:
        if error.code != _UNAUTHORIZED:
            raise
        return DeploymentIdentity({oplog: ""}, cluster)


def confirm_owner(
    folder: ArchivePlace,
    newest: ArchiveSegment | None,
    source: LiveSource,
    found: DeploymentIdentity,
    *,
    hint: str,
) -> None:
    """Raise OtherHistoryError where the archive of one oplog is not that of ``source``: the ids differ, or the last
    archived entry is not there. (Where the oplog has gone over that entry, it cannot be compared.)

    ``folder``  of the oplog in the archive; ``newest`` is its last segment
    ``found``   what ``set_identity`` says about the deployment of ``source``
    """
    oplog, reach = oplog_of(folder), head(folder)
    if reach is None:
        return
    parts = [
        (DeploymentIdentity({}, reach.cluster), DeploymentIdentity({}, found.cluster)),
        (DeploymentIdentity({oplog: reach.replica_set}), DeploymentIdentity(found.replica_sets)),
    ]
    last = None if newest is None else last_entry(newest)
    entries = {} if last is None else {oplog: last}
    for number, (known, now) in enumerate(parts):
        witness = Witness(known, entries if number else {})
        check_witness(witness, now, {oplog: source}, what=f"the entries in {folder}", hint=hint)


def last_entry(segment: ArchiveSegment) -> EntryMark | None:
    """The mark of a segment's last entry."""
    reader = SegmentReader(segment)
    if not reader.row_groups:
        return None
    group = reader.row_groups - 1
    entry: bytes = reader.column(group, "entry")[-1].as_py()
    return EntryMark.of(ClusterTime(reader.bounds(group)[1]), entry)
