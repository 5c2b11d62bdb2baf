"""The work of ``ImageFolder`` in the batch kernel, for batches that hold only inserts, updates and deletes.

The kernel finds the operations of a batch and applies many deltas at a time; Python reads and writes the documents. All
else (transactions of several entries, commands, deltas of 4.4, an entry that does not fit) is left to the plain code,
which is the reference.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tailrace.core.event.event_block import OPERATION_TYPES, Offsets
from tailrace.core.kernel import event_record
from tailrace.core.kernel.batch import (
    CHAIN_ENTRY,
    MEMBER_ENTRY,
    PLAIN,
    KernelBatch,
    KernelSettings,
    transform_batch,
)
from tailrace.core.kernel.image_keys import image_keys
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import ServerProfile
from tailrace.read.images.delta import ImageMismatchError, apply_operation
from tailrace.read.images.found import Images, wrong_state
from tailrace.read.images.key import state_key
from tailrace.read.images.state import ImageBatch
from tailrace.read.images.updated import updated

_INSERT, _UPDATE, _REPLACE, _DELETE = (
    OPERATION_TYPES.index(name) for name in ("insert", "update", "replace", "delete")
)
_LETTERS: Final = {_INSERT: b"i", _REPLACE: b"u", _DELETE: b"d", _UPDATE: b"u"}


class Operations:
    """The operations of a batch on some documents, as columns.

    ``keys``       of the documents, in the state, and the CRC-32 of each
    ``kinds``      uint8: places in ``OPERATION_TYPES``
    ``objects``    int64: offsets of the entries' ``o`` in ``raw``
    ``image_keys`` under which the pre-images are filed
    """

    def __init__(self, made: KernelBatch, buffer: bytes, keys: list[bytes], checksums: list[int]) -> None:
        self.raw, self.buffer = made.raw, buffer
        self.keys, self.checksums = keys, checksums
        self.objects: Offsets = np.ascontiguousarray(made.column(event_record.OBJECT))
        self.kinds = made.column(event_record.OPERATION)
        first, last = event_record.UUID_FIRST // 8, event_record.UUID_LAST // 8
        uuids: list[bytes] = np.ascontiguousarray(made.records[:, first : last + 1]).view("V16").ravel().tolist()
        times: list[int] = np.ascontiguousarray(made.column(event_record.IMAGE_TIME)).view(np.uint64).tolist()
        # Equal to the PreImageKeys that have the same parts, and quicker to make.
        self.image_keys = list(zip(uuids, times, made.column(event_record.IMAGE_INDEX).tolist(), strict=True))

    def applied(self, place: int, before: bytes | None) -> bytes | None:
        """The document after an operation, by the reference."""
        start = int(self.objects[place])
        change = self.buffer[start : start + int.from_bytes(self.buffer[start : start + 4], "little")]
        try:
            return apply_operation(before, _LETTERS[int(self.kinds[place])], change)
        except ImageMismatchError as error:
            raise wrong_state(error, f"oplog entry {ClusterTime(self.image_keys[place][1])}") from error


def operations_of(raw: bytes, scope: Scope, profile: ServerProfile, share: tuple[int, int]) -> Operations | None:
    """The operations of a batch on the documents of worker ``share[0]`` of ``share[1]``; ``None`` if the batch holds
    something that the plain code has to handle."""
    settings = KernelSettings(
        scope=scope,
        wall_time=False,
        unwinds_apply_ops_without_session=profile.unwinds_apply_ops_without_session,
        multi_op_is_no_transaction=profile.multi_op_is_no_transaction,
    )
    made = transform_batch(raw, settings)
    if np.isin(made.kind, (PLAIN, CHAIN_ENTRY, MEMBER_ENTRY)).any():
        return None
    if not np.isin(made.column(event_record.OPERATION), (_INSERT, _UPDATE, _REPLACE, _DELETE)).all():
        return None
    joined, ends, checksums = image_keys(made)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    left = {}
    for place in np.flatnonzero(starts == ends).tolist():
        left[place] = _state_key(made, place)
        checksums[place] = zlib.crc32(left[place])
    mine = (checksums >> 16) % np.uint32(share[1]) == share[0]  # is_in_share
    keys = [joined[start:end] for start, end in zip(starts[mine].tolist(), ends[mine].tolist(), strict=True)]
    if left:
        keys = [key or left[place] for key, place in zip(keys, np.flatnonzero(mine).tolist(), strict=True)]
    return Operations(made.kept(mine), raw, keys, checksums[mine].tolist())


def _state_key(made: KernelBatch, place: int) -> bytes:
    row = made.records[place]
    first, last = event_record.UUID_FIRST // 8, event_record.UUID_LAST // 8
    start, end = row[event_record.KEY_START // 8], row[event_record.KEY_END // 8]
    return state_key(row[first : last + 1].tobytes(), made.events[start:end].tobytes())


def fold_into(operations: Operations, changes: ImageBatch, *, replaces: bool = False) -> Images:
    """Apply the operations, in order, to the documents of a batch. Returns the documents before them. ``replaces``: an
    insert may find a document that is no longer on the server: of a collection that a shard lost and got back, or that
    is capped on 4.4."""
    checksums = dict(zip(operations.keys, operations.checksums, strict=True))
    keys = list(checksums)
    numbers = dict(zip(keys, range(len(keys)), strict=True))
    numbered = list(map(numbers.__getitem__, operations.keys))
    before = changes.get(keys, list(checksums.values()))
    documents = list(before)
    inserted = {numbered[place] for place in np.flatnonzero(operations.kinds == _INSERT).tolist()}
    missing = [place for place, known in enumerate(before) if known is None and place not in inserted]
    changes.confirm_missing([keys[place] for place in missing])
    images: Images = {}
    for places in _rounds(np.array(numbered, np.int64), len(keys)):
        _apply(operations, documents, numbered, places, images, replaces=replaces)
    changes.replace(keys, before, documents)
    return images


def _rounds(numbered: Offsets, count: int) -> Iterator[list[int]]:
    """The operations in rounds: no document is in a round twice, and the operations of a document keep their order.
    ``numbered``: the number of each operation's document, of ``count``."""
    if numbered.size == count:
        yield list(range(count))
        return
    order = np.argsort(numbered, kind="stable")
    firsts = np.flatnonzero(np.diff(numbered[order], prepend=-1))
    sizes = np.diff(np.append(firsts, numbered.size))
    turns = np.empty_like(numbered)
    turns[order] = np.arange(numbered.size) - np.repeat(firsts, sizes)
    by_turn = np.argsort(turns, kind="stable")
    for turn in np.split(by_turn, np.cumsum(np.bincount(turns))[:-1]):
        yield turn.tolist()


def _apply(
    operations: Operations,
    documents: list[bytes | None],
    numbered: Sequence[int],
    places: Sequence[int],
    images: Images,
    *,
    replaces: bool,
) -> None:
    """Apply the operations at ``places``, each to a different document."""
    updates: list[int] = []
    before: list[bytes] = []
    kinds = operations.kinds[places].tolist()
    for place, kind in zip(places, kinds, strict=True):
        old = documents[numbered[place]]
        if kind == _UPDATE:
            if old is not None:
                updates.append(place)
                before.append(old)
            continue
        if old is not None and kind != _INSERT:
            images[operations.image_keys[place]] = old
        if old is not None or kind != _DELETE:
            documents[numbered[place]] = operations.applied(place, None if replaces and kind == _INSERT else old)
    images.update(zip(map(operations.image_keys.__getitem__, updates), before, strict=True))
    made = updated(before, operations.raw, operations.objects[updates]) if updates else []
    for place, old, new in zip(updates, before, made, strict=True):
        documents[numbered[place]] = operations.applied(place, old) if new is None else new
