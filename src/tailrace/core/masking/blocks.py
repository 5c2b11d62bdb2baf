"""Blocks of events, masked."""

from __future__ import annotations

from typing import Final

import numpy as np

from tailrace.core.event.event_block import OPERATION_TYPES, EventBlock
from tailrace.core.masking.events import MaskSet, masked_event

#: Operations on a document, by their number in a block: nothing else in them than the namespace tells what is masked.
_KEYED: Final = frozenset(map(OPERATION_TYPES.index, ("insert", "update", "replace", "delete")))


def masked_block(masks: MaskSet, block: EventBlock) -> EventBlock:
    """The block with its events masked; itself if nothing in it is. Raises MaskRefusedError as ``MaskSet.event``."""
    events = block.events()
    operations, start = block.operation.tolist(), int(block.offsets[0])
    data = block.buffer[start : block.offsets[-1]].tobytes()
    first, last = (block.ns_start - start).tolist(), (block.ns_end - start).tolist()
    changed = False
    for number, event in enumerate(events):
        place = data[first[number] : last[number]] if last[number] > first[number] >= 0 else b""
        mask = masks.of_place(place) if place else None
        if mask is not None:
            made = masked_event(event, mask)
        elif operations[number] in _KEYED and masks.is_free(place):
            continue
        else:
            made = masks.event(event)
        if made is not event:
            events[number], changed = made, True
    if not changed:
        return block
    offsets = np.zeros(len(events) + 1, np.int64)
    np.cumsum([len(event) for event in events], out=offsets[1:])
    nowhere = np.zeros(len(events), np.int64)
    buffer = np.frombuffer(b"".join(events), np.uint8)
    return EventBlock(buffer, offsets, block.cluster_time, block.operation, nowhere, nowhere, nowhere, nowhere)
