"""The ids of the gateway's cursors."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_BITS: Final = 63
#: How many bits of an id show whether a gateway of several processes made it.
_MARK_BITS: Final = 16


def new_ids() -> Iterator[int]:
    """Like the server's: positive, of 63 random bits, so that none can be guessed and no two are equal."""
    while True:
        number = secrets.randbits(_BITS)
        if number:
            yield number


@dataclass(frozen=True, slots=True)
class ProcessIds:
    """The ids of a gateway of ``count`` processes, made by the one of this ``number``. Each process knows of every id
    which of them made it; without ``key`` an id looks like any other. One in 65,536 of the server's ids looks like one
    of these: that process is then asked, and does not have it."""

    number: int
    count: int
    key: bytes

    def new(self) -> Iterator[int]:
        """As ``new_ids``."""
        for drawn in new_ids():
            stem = drawn >> _MARK_BITS
            stem -= stem % self.count - self.number
            if 0 < stem < 1 << (_BITS - _MARK_BITS):
                yield stem << _MARK_BITS | self._mark(stem)

    def maker(self, number: int) -> int | None:
        """The process that made an id; ``None``: none of them."""
        stem, mark = number >> _MARK_BITS, number & ((1 << _MARK_BITS) - 1)
        is_ours = 0 < number < 1 << _BITS and mark == self._mark(stem)
        return stem % self.count if is_ours else None

    def _mark(self, stem: int) -> int:
        digest = hashlib.blake2s(stem.to_bytes(8, "little"), key=self.key, digest_size=_MARK_BITS // 8).digest()
        return int.from_bytes(digest, "little")
