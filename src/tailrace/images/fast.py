"""The work of ``ImageFolder`` in the batch kernel, for batches that hold only inserts, updates and deletes.

The kernel finds the operations of a batch and applies many deltas at a time; Python reads and writes the documents. All
else (transactions of several entries, commands, deltas of 4.4, an entry that does not fit) is left to the plain code,
which is the reference.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tailrace.event.event_block import OPERATION_TYPES
from tailrace.images.delta import ImageMismatchError, apply_operation
from tailrace.images.found import Images, wrong_state
from tailrace.images.key import state_key
from tailrace.images.updated import updated
from tailrace.kernel import event_record
from tailrace.kernel.batch import (
    CHAIN_ENTRY,
    MEMBER_ENTRY,
    PLAIN,
    KernelBatch,
    KernelSettings,
    transform_batch,
)
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.request import PreImageKey

Offsets = npt.NDArray[np.int64]
_INSERT, _UPDATE, _REPLACE, _DELETE = (
    OPERATION_TYPES.index(name) for name in ("insert", "update", "replace", "delete")
)
_LETTERS: Final = {_INSERT: b"i", _REPLACE: b"u", _DELETE: b"d", _UPDATE: b"u"}
_OBJECT_ID: Final = b"\x07_id\0"


class Operations:
    """The operations of a batch, as columns.

    ``keys``     of the documents, in the state
    ``kinds``    places in ``OPERATION_TYPES``
    ``objects``  offsets of the entries' ``o`` in ``raw``
    ``times``    the cluster time under which each pre-image is filed, and its ``indexes`` there
    """

    def __init__(self, made: KernelBatch, raw: bytes) -> None:
        records = made.records
        self.raw = made.raw
        self.buffer = raw
        self.objects: Offsets = np.ascontiguousarray(made.column(event_record.OBJECT))
        self.kinds: list[int] = made.column(event_record.OPERATION).tolist()
        self.times: list[int] = made.column(event_record.IMAGE_TIME).tolist()
        self.indexes: list[int] = made.column(event_record.IMAGE_INDEX).tolist()
        first, last = event_record.UUID_FIRST // 8, event_record.UUID_LAST // 8
        self.uuids = np.ascontiguousarray(records[:, first : last + 1]).tobytes()
        events = made.events.tobytes()
        starts = made.column(event_record.KEY_START).tolist()
        ends = made.column(event_record.KEY_END).tolist()
        self.keys = [
            _key(self.uuids[16 * place : 16 * place + 16], events[start:end])
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]

    def image_key(self, place: int) -> PreImageKey:
        uuid = self.uuids[16 * place : 16 * place + 16]
        return PreImageKey(uuid, ClusterTime(self.times[place] & 0xFFFFFFFFFFFFFFFF), self.indexes[place])

    def applied(self, place: int, before: bytes | None) -> bytes | None:
        """The document after an operation, by the reference."""
        start = int(self.objects[place])
        change = self.buffer[start : start + int.from_bytes(self.buffer[start : start + 4], "little")]
        try:
            return apply_operation(before, _LETTERS[self.kinds[place]], change)
        except ImageMismatchError as error:
            raise wrong_state(error, f"oplog entry {self.image_key(place).cluster_time}") from error


def _key(uuid: bytes, document_key: bytes) -> bytes:
    if document_key[4:9] == _OBJECT_ID:
        return uuid + b"\x64" + document_key[9:21]
    return state_key(uuid, document_key)


def operations_of(raw: bytes, scope: Scope) -> Operations | None:
    """The operations of a batch; ``None`` if it holds something that the plain code has to do."""
    made = transform_batch(raw, KernelSettings(scope=scope, wall_time=False))
    if np.isin(made.kind, (PLAIN, CHAIN_ENTRY, MEMBER_ENTRY)).any():
        return None
    if not np.isin(made.column(event_record.OPERATION), (_INSERT, _UPDATE, _REPLACE, _DELETE)).all():
        return None
    return Operations(made, raw)


def fold_into(
    operations: Operations, documents: dict[bytes, bytes | None], places: Sequence[int], images: Images
) -> None:
    """Apply the operations at ``places`` to ``documents``, in order. ``images`` gets the documents before them."""
    for round_ in _rounds(operations.keys, places):
        updates: list[int] = []
        for place in round_:
            key, kind = operations.keys[place], operations.kinds[place]
            before = documents[key]
            if before is not None and kind != _INSERT:
                images[operations.image_key(place)] = before
            if kind == _UPDATE:
                if before is not None:
                    updates.append(place)
                continue
            if before is None and kind == _DELETE:
                continue
            documents[key] = operations.applied(place, before)
        if updates:
            _update(operations, documents, updates)


def _rounds(keys: list[bytes], places: Sequence[int]) -> list[list[int]]:
    """The operations in rounds: no document is in a round twice, and the operations of a document keep their order."""
    seen: Counter[bytes] = Counter()
    rounds: list[list[int]] = []
    for place in places:
        key = keys[place]
        number = seen[key]
        seen[key] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(place)
    return rounds


def _update(operations: Operations, documents: dict[bytes, bytes | None], places: list[int]) -> None:
    """Apply deltas to documents that exist, each delta to a different document."""
    keys = [operations.keys[place] for place in places]
    before = [documents[key] or b"" for key in keys]
    for number, made in enumerate(updated(before, operations.raw, operations.objects[places])):
        documents[keys[number]] = operations.applied(places[number], before[number]) if made is None else made


def share_of(keys: Sequence[bytes], number: int, count: int) -> list[int]:
    """Which of these documents belong to worker ``number`` of ``count``."""
    if count == 1:
        return list(range(len(keys)))
    return [place for place, key in enumerate(keys) if zlib.crc32(key) % count == number]
