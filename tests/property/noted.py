"""Where the kernel noted the parts of an event, compared with where ``locate`` finds them: the places are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.core.event.event_block import EventBlock, Offsets
from tailrace.core.kernel import Part, locate
from tailrace.core.kernel.arrays import PARTS
from tailrace.core.kernel.event_parts import TOKEN
from tailrace.errors import OplogFormatError


def check_noted(block: EventBlock, wanted: Sequence[str] = tuple(PARTS)) -> dict[str, Part]:
    """The parts of the block's events. They must be the same with the notes and without."""
    found, noted = (_located(block, wanted, places) for places in (None, block.places))
    if isinstance(found, str) or isinstance(noted, str):
        assert found == noted
        return {}
    for name, part in noted.items():
        assert np.array_equal(np.array(part), np.array(found[name])), (name, part, found[name])
    return noted


def _located(block: EventBlock, wanted: Sequence[str], places: Offsets | None) -> dict[str, Part] | str:
    """The parts, or what is wrong with an event."""
    try:
        return locate(block.buffer, block.offsets, wanted, places)
    except OplogFormatError as error:
        return str(error)


def is_noted(block: EventBlock) -> list[bool]:
    """For which events the parts are noted."""
    return [False] * len(block) if block.places is None else (block.places[:, TOKEN] != 0).tolist()
