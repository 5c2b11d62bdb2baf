"""The documents that existed before the first change: copied in chunks, while others write, and across crashes."""

from tailrace.read.snapshot.event import OPERATION_TYPE, snapshot_event
from tailrace.read.snapshot.reader import SnapshotChunk, SnapshotProgress, SnapshotReader, begin
from tailrace.read.snapshot.state import CollectionCopy, KeyRange, SnapshotState

__all__ = [
    "OPERATION_TYPE",
    "CollectionCopy",
    "KeyRange",
    "SnapshotChunk",
    "SnapshotProgress",
    "SnapshotReader",
    "SnapshotState",
    "begin",
    "snapshot_event",
]
