"""Buffers that end where readable memory ends: reading one byte after them kills the process, so no test overlooks
it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

_PROT_NONE = 0


class GuardedBuffer:
    """Room for ``size`` bytes with an inaccessible page after. Data are placed against its end."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self._room = -(-size // page) * page
        self._map = mmap.mmap(-1, self._room + page)
        self._array = np.frombuffer(self._map, np.uint8)
        guard = self._array.ctypes.data + self._room
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), _PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, data: bytes) -> npt.NDArray[np.uint8]:
        """``data``, with nothing readable after its last byte. Valid until the next call."""
        view = self._array[self._room - len(data) : self._room]
        view[:] = np.frombuffer(data, np.uint8)
        return view
