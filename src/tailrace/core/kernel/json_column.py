"""Documents of events as a column of JSON. A module of its own, since its compiled code is for that alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.kernel import extended_json, fragments, number_text
from tailrace.core.kernel.arrays import Part, check_offsets, checked_runs
from tailrace.core.kernel.batch import address

_TEXT = np.frombuffer(fragments.TEXT, np.uint8)


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """``n`` values as text: one string column in Arrow's layout (data, int32 offsets of length n + 1).

    Where ``ok`` is false, an empty text holds the place of one that ``json_util`` has to make.
    """

    text: Bytes
    offsets: npt.NDArray[np.int32]
    ok: npt.NDArray[np.bool_]


def encode_json(buffer: bytes | memoryview | Bytes, part: Part) -> JsonColumn:
    """The relaxed Extended JSON of each value of a document part (``locate``); ``JsonColumn`` says what is left over.

    Absent values are an empty text with ``ok`` true: the caller masks them by ``part.type == 0``.
    """
    data, starts, ends = checked_runs(buffer, part.start, part.end)
    types = np.ascontiguousarray(part.type, np.int64)
    count = starts.size
    room = extended_json.GROWTH * int((ends - starts).sum()) + extended_json.ROW_ROOM * (count + 1)
    check_offsets(room)
    # Only what is written to is ever backed by memory.
    text, offsets, ok = np.empty(room, np.uint8), np.empty(count + 1, np.int32), np.empty(count, np.uint8)
    state, kept = _json_state()
    job = np.array(
        [address(a) for a in (state, data, starts, ends, types)] + [count] + [address(a) for a in (text, offsets, ok)],
        np.int64,
    )
    extended_json.encode(address(job))
    del kept
    return JsonColumn(text[: offsets[-1]], offsets, ok.view(np.bool_))


def _json_state() -> tuple[Offsets, list[npt.NDArray[np.generic]]]:
    """The writer's state, and the memory that it points to, which the caller keeps."""
    state = np.zeros(extended_json.STATE_SIZE // 8, np.int64)
    memory: dict[int, npt.NDArray[np.generic]] = {
        extended_json.FRAGMENTS: _TEXT,
        extended_json.POWERS: number_text.POWERS,
        extended_json.PAIRS: number_text.DIGIT_PAIRS,
        extended_json.TABLE: np.zeros(extended_json.TABLE_SIZE, np.uint8),
        extended_json.FRAMES: np.empty(extended_json.FRAMES_SIZE, np.uint8),
    }
    for slot, array in memory.items():
        state[slot // 8] = address(array)
    return state, list(memory.values())
