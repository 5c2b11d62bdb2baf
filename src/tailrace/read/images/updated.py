"""Many deltas applied to many documents at once, in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tailrace.core.kernel import post_image
from tailrace.core.kernel.batch import address

_ID = tuple(enumerate(b"_id\0"))


def updated(before: Sequence[bytes], raw: npt.NDArray[np.uint8], objects: npt.NDArray[np.int64]) -> list[bytes | None]:
    """The documents after one update each. ``objects`` are offsets of the entries' ``o`` in ``raw``. ``None`` where the
    reference has to do it: an odd delta, one that does not fit, no delta at all."""
    sizes = np.fromiter(map(len, before), np.int64, len(before))
    ends = np.cumsum(sizes)
    images = np.frombuffer(b"".join(before), np.uint8)
    changes = sum(
        (raw[objects + byte].astype(np.int64) << 8 * byte for byte in range(4)), np.zeros(len(before), np.int64)
    )
    out = np.empty(int(ends[-1] + changes.sum()) + post_image.ROOM, np.uint8)
    starts, out_starts, out_ends = ends - sizes, np.empty(len(before), np.int64), np.empty(len(before), np.int64)
    scratch = np.empty(post_image.SCRATCH_SIZE, np.uint8)
    job = np.zeros(post_image.JOB_SIZE // 8, np.int64)
    slots: dict[int, Any] = {
        post_image.IMAGES: images,
        post_image.START: starts,
        post_image.END: ends,
        post_image.RAW: raw,
        post_image.OBJECTS: objects,
        post_image.OUT: out,
        post_image.OUT_START: out_starts,
        post_image.OUT_ENDS: out_ends,
        post_image.SCRATCH: scratch,
    }
    for slot, array in slots.items():
        job[slot // 8] = address(array)
    job[post_image.COUNT // 8] = len(before)
    job[post_image.OUT_END // 8] = address(out) + out.size
    job[post_image.STRICT // 8] = 1
    written = post_image.apply_deltas(address(job))
    made = out[:written].tobytes()
    # A document that was made has at least nine bytes; where none was made, the run is empty.
    has_id = np.logical_and.reduce([out[np.maximum(out_starts, 0) + 5 + place] == byte for place, byte in _ID])
    out_ends = np.where((out_starts >= 0) & has_id, out_ends, out_starts)
    return [made[start:end] or None for start, end in zip(out_starts.tolist(), out_ends.tolist(), strict=True)]
