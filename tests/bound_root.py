"""Root without its right to pass over the modes of files, so that a test that removes a right shows what others see."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: ``linux/capability.h``: version 3 has two words of each set. Reading and writing whatever the modes are 1 and 2.
_VERSION_3: Final = 0x20080522
_PASSING_OVER_MODES: Final = 1 << 1 | 1 << 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def modes_can_hold() -> bool:
    """Whether ``modes_hold`` can bind this user."""
    return os.geteuid() != 0 or sys.platform == "linux"


@contextmanager
def modes_hold() -> Iterator[None]:
    """Modes of files hold for this thread too, whoever runs the tests."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    _done(libc.capget(ctypes.byref(header), sets))
    before = sets[0].effective
    sets[0].effective &= ~_PASSING_OVER_MODES
    _done(libc.capset(ctypes.byref(header), sets))
    try:
        yield
    finally:
        sets[0].effective = before
        _done(libc.capset(ctypes.byref(header), sets))


def _done(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "the capabilities of this thread cannot be altered")
