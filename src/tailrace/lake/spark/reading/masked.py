"""The events of a slice, masked before columns are made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tailrace.core.event.event_block import EventBlock
from tailrace.core.masking.blocks import masked_block
from tailrace.core.masking.events import without_values
from tailrace.core.pipeline.quarantine import Aside
from tailrace.errors import TailraceError
from tailrace.read.source.mask_file import Masks


def masked_events(masks: Masks, read: Callable[[Aside], Iterator[EventBlock]], aside: Aside) -> Iterator[EventBlock]:
    """What ``read`` gives, masked, and what it puts aside too. Raises what it raises, without words that may quote a
    value, and MaskRefusedError."""
    whole: Aside = None if aside is None else []
    compiled = masks.compiled
    blocks = read(whole)
    while True:
        try:
            block = next(blocks, None)
        except TailraceError as error:
            raise without_values(error) from None
        if whole and aside is not None:
            aside += map(compiled.quarantined, whole)
            whole.clear()
        if block is None:
            return
        yield masked_block(compiled, block)
