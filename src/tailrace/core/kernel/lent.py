"""Large buffers whose memory is used again for the next batch.

A page that a process touches for the first time is expensive in a virtual machine, and the system's allocator gives
large blocks back between two batches (``docs/design/catching-up.md``). What is lent here comes back automatically when
nobody refers to it any more, however it was cut or passed on, and is lent again. A process keeps at most ``KEPT_MAX``
such buffers; of their memory, only the pages that were ever written to exist.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]

#: Smaller buffers are left to the allocator, which keeps them by itself; larger ones are rare.
LENT_MIN: Final = 4 << 20
LENT_MAX: Final = 96 << 20
#: The ratio between one size of buffers and the next: each size is a class for ctypes, which only the garbage collector
#: removes.
_STEP: Final = 1 << 20
#: The events of a batch, their records, what a stage makes of them, and one more.
KEPT_MAX: Final = 4

#: By their addresses. Each operation on it is atomic: buffers also come back while the garbage collector runs, where
#: nothing may wait for a lock.
_kept: dict[int, _Bytes] = {}


def lend(size: int) -> _Bytes:
    """uint8[size] of any content."""
    if not LENT_MIN <= size <= LENT_MAX:
        return np.empty(size, np.uint8)
    room = -(-size // _STEP) * _STEP
    memory = _taken(room)
    owner: Any = (ctypes.c_uint8 * room).from_address(memory.__array_interface__["data"][0])
    weakref.finalize(owner, _give_back, memory).atexit = False
    return np.frombuffer(owner, np.uint8, size)


def _taken(size: int) -> _Bytes:
    """One of the buffers kept, or a new one."""
    for place, memory in _kept.copy().items():
        if memory.size >= size and _kept.pop(place, None) is not None:
            return memory
    return np.empty(size, np.uint8)


def _give_back(memory: _Bytes) -> None:
    _kept[memory.__array_interface__["data"][0]] = memory
    for place in tuple(_kept)[:-KEPT_MAX]:  # the oldest
        _kept.pop(place, None)
