"""Documents of events as a VARIANT column. A module of its own, since its compiled code is for that alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.kernel import fragments, variant
from tailrace.core.kernel.arrays import Part, check_offsets, checked_runs
from tailrace.core.kernel.batch import address

_TEXT = np.frombuffer(fragments.TEXT, np.uint8)


@dataclass(frozen=True, slots=True)
class VariantColumn:
    """``n`` values as VARIANT: two binary columns in Arrow's layout (data, int32 offsets of length n + 1).

    Where ``ok`` is false, a VARIANT null holds the place of a value that the Python encoder has to make.
    """

    value: Bytes
    value_offsets: npt.NDArray[np.int32]
    metadata: Bytes
    metadata_offsets: npt.NDArray[np.int32]
    ok: npt.NDArray[np.bool_]


def encode_variants(buffer: bytes | memoryview | Bytes, part: Part) -> VariantColumn:
    """One VARIANT for each value of a document part (``locate``); see ``VariantColumn`` for what is left over.

    Absent values are a VARIANT null with ``ok`` true: the caller masks them by ``part.type == 0``.
    """
    data, starts, ends = checked_runs(buffer, part.start, part.end)
    types = np.ascontiguousarray(part.type, np.int64)
    count = starts.size
    sizes = ends - starts
    largest = int(sizes.max(initial=0))
    room = 4 * int(sizes.sum()) + variant.ROW_ROOM * (count + 1) + 8 * largest
    check_offsets(room)
    # Only what is written to is ever backed by memory.
    values, metadata = np.empty(room, np.uint8), np.empty(room, np.uint8)
    value_offsets, metadata_offsets = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32)
    ok = np.empty(count, np.uint8)
    state, kept = _variant_state(largest)
    job = np.array(
        [address(a) for a in (state, data, starts, ends, types)]
        + [count]
        + [address(a) for a in (values, value_offsets, metadata, metadata_offsets, ok)],
        np.int64,
    )
    variant.encode(address(job))
    del kept
    return VariantColumn(
        values[: value_offsets[-1]],
        value_offsets,
        metadata[: metadata_offsets[-1]],
        metadata_offsets,
        ok.view(np.bool_),
    )


def _variant_state(largest: int) -> tuple[Offsets, list[npt.NDArray[np.generic]]]:
    """The encoder's state, and the memory that it points to, which the caller keeps."""
    state = np.zeros(variant.STATE_SIZE // 8, np.int64)
    memory: dict[int, npt.NDArray[np.generic]] = {
        variant.RECORDS: np.empty(variant.RECORDS_SIZE, np.uint8),
        variant.NAMES: np.empty(variant.NAMES_SIZE, np.uint8),
        variant.TABLE: np.zeros(variant.TABLE_SIZE, np.uint8),
        variant.FRAMES: np.empty(variant.FRAMES_SIZE, np.uint8),
        variant.SORTED: np.empty(4 * largest + variant.ROW_ROOM, np.uint8),
        variant.FRAGMENTS: _TEXT,
    }
    for slot, array in memory.items():
        state[slot // 8] = address(array)
    return state, list(memory.values())
