"""Whether an LMDB file has every page that its newest commit refers to.

LMDB maps the file into memory: a page that lies behind the file's end kills the process when it is read (SIGBUS). The
length alone does not tell. A page that a transaction takes and gives back before it is committed is counted, and never
written; if it was the last one, the file is shorter than its count of pages, and whole. So the pages are followed, with
ordinary reads, from the newest of the two meta pages.

The layout is that of LMDB 0.9 on a 64-bit machine in little-endian order, as PyPI's ``lmdb`` brings it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lmdb

#: A page: its number, padding, flags, and the ends of its lists, or how many pages an overflow page stands for.
_PAGE: Final = struct.Struct("<QHHHH")
_OVERFLOW_PAGES: Final = struct.Struct("<I")
_BRANCH: Final = 1
_LEAF: Final = 2
_OVERFLOW: Final = 4
#: A node: the low and the high half of its size, flags, the size of its key. Of a branch all three are a page's number.
_NODE: Final = struct.Struct("<HHHH")
_IN_OVERFLOW: Final = 1
_IS_DATABASE: Final = 2
_NUMBER: Final = struct.Struct("<Q")
#: Where a database's description has its root, and how long it is.
_ROOT_AT: Final = 40
_DATABASE_BYTES: Final = 48
_EMPTY: Final = (1 << 64) - 1
#: In a meta page, behind the page's header: the databases of free pages and of names, then the last page and the
#: transaction.
_DATABASES_AT: Final = 16 + 24
_TRANSACTION_AT: Final = _DATABASES_AT + 2 * _DATABASE_BYTES + 8


def check_whole(environment: Any, path: Path) -> None:
    """Close the environment and raise ``lmdb.CorruptedError`` if the file at ``path`` lacks a page that may be read.
    For the only process that writes it, before it does."""
    page = environment.stat()["psize"]
    counted = (environment.info()["last_pgno"] + 1) * page
    if path.stat().st_size < counted and not is_whole(path, page_size=page):
        environment.close()
        raise lmdb.CorruptedError("the file is shorter than what it says it holds")


def is_whole(path: Path, *, page_size: int) -> bool:
    """Whether each page that the file at ``path`` refers to lies in it, and says that it is that page.

    For a file that LMDB has opened, so that its meta pages are good, and that nobody writes meanwhile.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        metas = [file.read(page_size) for _ in range(2)]
        newest = max(metas, key=lambda meta: int(_NUMBER.unpack_from(meta, _TRANSACTION_AT)[0]))
        left = [_root(newest, _DATABASES_AT + place * _DATABASE_BYTES) for place in range(2)]
        seen: set[int] = set()
        while left:
            number = left.pop()
            if number == _EMPTY:
                continue
            if number in seen:  # each page has one place: a damaged number may lead round in a circle
                return False
            seen.add(number)
            if (number + 1) * page_size > size:
                return False
            page = os.pread(file.fileno(), page_size, number * page_size)
            if not _is_page(page, number, size // page_size):
                return False
            try:
                left += _referred(page)
            except struct.error:  # a place outside the page
                return False
    return True


def _root(page: bytes, database: int) -> int:
    found: tuple[int] = _NUMBER.unpack_from(page, database + _ROOT_AT)
    return found[0]


def _is_page(page: bytes, number: int, pages: int) -> bool:
    own, _, flags, _, _ = _PAGE.unpack_from(page)
    if own != number or not flags & (_BRANCH | _LEAF | _OVERFLOW):
        return False
    return not flags & _OVERFLOW or number + int(_OVERFLOW_PAGES.unpack_from(page, _PAGE.size - 4)[0]) <= pages


def _referred(page: bytes) -> Iterator[int]:
    """The pages that a page's nodes refer to."""
    _, _, flags, lower, _ = _PAGE.unpack_from(page)
    if flags & _OVERFLOW:
        return
    for (at,) in struct.iter_unpack("<H", page[_PAGE.size : lower]):
        yield from _of_node(page, at, is_branch=bool(flags & _BRANCH))


def _of_node(page: bytes, at: int, *, is_branch: bool) -> Iterator[int]:
    low, high, flags, key_size = _NODE.unpack_from(page, at)
    data: Any = at + _NODE.size + key_size
    if is_branch:
        yield low | high << 16 | flags << 32
    elif flags & _IN_OVERFLOW:
        yield _NUMBER.unpack_from(page, data)[0]
    elif flags & _IS_DATABASE:
        yield _root(page, data)
