"""Whether an LMDB file is one that LMDB can read and write without harm to the process.

LMDB maps the file into memory and follows it without checks: a page beyond the file's end, or a wrong number of a page
or of a place in one, and the process is killed (SIGBUS, SIGSEGV), or a page that is in use is overwritten. So a file
that is not known to be as LMDB left it is read before LMDB opens it, with ordinary reads: each page that its metas lead
to, each place in these pages, the order of keys, the lists of free pages, and whether the counts are those that the
metas state. What values hold is not checked here: the checksums of the code that wrote them do that, and these are in
this module too (``sealed``, ``unsealed``).

A file is known to be as LMDB left it where its times, size and inode are those that were noted when it was closed. So
after a clean end nothing is read; after a crash, a copy or a restore all of it is. What the disk itself changes later,
without a write, is not found in this way.

A page that a transaction takes and gives back before it is committed is counted, and never written; if it was the last
one, the file is shorter than its count of pages, and whole.

The layout is that of LMDB 0.9 on a 64-bit machine in little-endian order, as PyPI's ``lmdb`` brings it.
"""

from __future__ import annotations

import fcntl
import operator
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

#: A page: its number, padding, flags, and the ends of its lists, or how many pages an overflow page stands for.
_PAGE: Final = struct.Struct("<QHHHH")
_OVERFLOW_PAGES: Final = struct.Struct("<I")
_BRANCH: Final = 1
_LEAF: Final = 2
_OVERFLOW: Final = 4
_META: Final = 8
#: A node: the low and the high half of its size, flags, the size of its key. Of a branch all three are a page's number.
_NODE: Final = struct.Struct("<HHHH")
_IN_OVERFLOW: Final = 1
_IS_DATABASE: Final = 2
_NUMBER: Final = struct.Struct("<Q")
#: A database: padding, flags, depth, pages of branches, of leaves, and overflowing, entries, and the root.
_DATABASE: Final = struct.Struct("<IHHQQQQQ")
#: In a meta page, after the page's header: magic, version, address, size of the map; the databases of free pages and
#: of names; the last page and the transaction.
_META_AT: Final = _PAGE.size
_HEAD: Final = struct.Struct("<IIQQ")
_TAIL: Final = struct.Struct("<QQ")
_MAGIC: Final = 0xBEEFC0DE
_EMPTY: Final = (1 << 64) - 1
_INTEGER_KEYS: Final = 8
_KEY_MAX: Final = 511
_MAP_MAX: Final = 1 << 46
_PAGE_SIZES: Final = tuple(1 << power for power in range(9, 17))
_NOTED: Final = "closed"
_CHECKSUM_BYTES: Final = 4
#: A leaf page holds fewer records than that: this many on either side of a key are examined where it is missing, but no
#: more than this many bytes of them.
NEAR: Final = 64
_NEAR_BYTES: Final = 1 << 18
#: How many records are copied in one transaction.
_AT_ONCE: Final = 4096


class _Damage(Exception):  # noqa: N818  never leaves this module
    pass


class _Root(NamedTuple):
    """A database, as its record has it."""

    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    page: int


def check_before_opening(directory: Path) -> None:
    """Raise ``lmdb.CorruptedError`` if the file in ``directory`` is not to be opened. For the only process that writes
    it, before it does. Reads all of a file that is not as ``note_closed`` has noted it."""
    path = directory / "data.mdb"
    if path.exists() and path.stat().st_size and not _is_noted(directory):
        damage = damage_of(path)
        if damage is not None:
            raise lmdb.CorruptedError(damage)


def check_before_reading(directory: Path, *, lock: Path) -> None:
    """The same for a process that only reads. ``lock``: the file that a writer holds, who has checked then."""
    path = directory / "data.mdb"
    if _is_noted(directory) or _is_held(lock):
        return
    before = _stamp(path)
    damage = damage_of(path)
    if damage is not None and _stamp(path) == before:  # otherwise somebody has begun to write
        raise lmdb.CorruptedError(damage)


def _is_noted(directory: Path) -> bool:
    try:
        return (directory / _NOTED).read_text(encoding="utf-8") == _stamp(directory / "data.mdb")
    except (OSError, UnicodeDecodeError):
        return False


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def note_closed(directory: Path) -> None:
    """Note that the file in ``directory`` is as LMDB has left it. After the environment was closed."""
    with suppress(OSError):  # it is checked then
        (directory / _NOTED).write_text(_stamp(directory / "data.mdb"), encoding="utf-8")


def copied(
    source: Any,
    target: Path,
    *,
    map_bytes: int,
    kept: Callable[[bytes, bytes, bytes], bytes] = lambda database, key, record: record,
) -> None:
    """Write the records of all databases of the environment ``source`` to a new file in ``target``, and sync it: what
    was deleted is not in it, which a copy of LMDB's own may have at the ends of pages. ``kept`` gives the record that
    is written for one of a database. Nobody writes the source meanwhile. Raises ``lmdb.Error``,
    OSError."""
    with source.begin() as transaction, transaction.cursor() as cursor:
        names = list(cursor.iternext(values=False))
    with lmdb.open(str(target), map_size=map_bytes, max_dbs=len(names), sync=False) as new:
        for name in names:
            database, made = source.open_db(name, create=False), new.open_db(name)
            with source.begin(database) as transaction, transaction.cursor() as cursor:
                rows = ((key, kept(name, key, record)) for key, record in cursor)
                while part := list(islice(rows, _AT_ONCE)):
                    with new.begin(made, write=True) as writing, writing.cursor() as place:
                        place.putmulti(part, append=True)
    for path, flags in ((target / "data.mdb", os.O_RDONLY), (target, os.O_RDONLY | os.O_DIRECTORY)):
        descriptor = os.open(path, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    note_closed(target)


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def damage_of(path: Path) -> str | None:
    """What is wrong with the file at ``path``, which nobody writes meanwhile; ``None`` if LMDB may open it."""
    with path.open("rb") as file:
        try:
            _PagesOfFile(file.fileno()).check()
        except _Damage as damage:
            return str(damage)
        except (struct.error, IndexError):
            return "a place in a page lies outside it"
    return None


class _PagesOfFile:
    """One pass over the pages of an LMDB file."""

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self._size = os.fstat(descriptor).st_size
        self._page_size = 0
        self._last = 0
        self._used = bytearray()

    def check(self) -> None:
        """Raises _Damage, struct.error or IndexError where LMDB must not open the file."""
        metas = [self._meta(number) for number in range(2)]
        (_, first), (_, second) = metas
        if abs(first - second) > 1:
            raise _Damage("its two meta pages are not from successive transactions")
        roots, _ = metas[second > first]
        self._used = bytearray(self._last + 1)
        self._used[0:2] = b"\1\1"
        free, names = roots
        listed = list(self._walk(free, is_free=True))
        for record in list(self._walk(names, is_names=True)):
            database = _Root(*_DATABASE.unpack(record))
            if database.flags or database.padding:
                raise _Damage("a database has unknown flags")
            for _ in self._walk(database):
                pass
        for record in listed:
            self._check_free(record)

    def _meta(self, number: int) -> tuple[list[_Root], int]:
        """The two databases of a meta page, and its transaction."""
        if not self._page_size:
            start = os.pread(self._file, _META_AT + _HEAD.size + _DATABASE.size, 0)
            self._page_size = _DATABASE.unpack_from(start, _META_AT + _HEAD.size)[0]
        if self._page_size not in _PAGE_SIZES:
            raise _Damage("its page size is not a possible one")
        page = os.pread(self._file, self._page_size, number * self._page_size)
        own, padding, flags, _, _ = _PAGE.unpack_from(page)
        magic, version, address, map_size = _HEAD.unpack_from(page, _META_AT)
        at = _META_AT + _HEAD.size
        roots = [_Root(*_DATABASE.unpack_from(page, at + place * _DATABASE.size)) for place in range(2)]
        last, transaction = _TAIL.unpack_from(page, at + 2 * _DATABASE.size)
        free, names = roots
        is_sound = (own, padding, flags, magic, version, address) == (number, 0, _META, _MAGIC, 1, 0)
        is_sound &= (last + 1) * self._page_size <= map_size <= _MAP_MAX and map_size % self._page_size == 0
        is_sound &= free.padding == self._page_size and free.flags == _INTEGER_KEYS
        is_sound &= names.flags == 0 and names.padding == 0 and (transaction == 0 or transaction % 2 == number)
        if not is_sound:
            raise _Damage("a meta page is not what LMDB writes")
        self._last = max(self._last, last)
        return roots, transaction

    # -- trees ------------------------------------------------------------------------------------------------------

    def _walk(self, root: _Root, *, is_free: bool = False, is_names: bool = False) -> Iterator[bytes]:
        """Go through a tree. Gives the values of those that are read here: lists of free pages, and databases."""
        counts = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        entries = 0
        if root.page == _EMPTY:
            if any(root[2:7]):
                raise _Damage("an empty database claims to hold something")
            return
        left: list[tuple[int, int, bytes | None, bytes | None]] = [(root.page, root.depth, None, None)]
        while left:
            number, depth, low, high = left.pop()
            kind = _LEAF if depth == 1 else _BRANCH
            page = self._page(number, kind)
            counts[kind] += 1
            nodes = _nodes(page, kind)
            keys = [page[at + _NODE.size : at + _NODE.size + size] for at, size, _, _ in nodes]
            if kind == _BRANCH:
                keys[0] = low or b""  # LMDB does not look at the first one
            ordered = [key[::-1] for key in keys] if is_free else keys
            _check_order(ordered, low, high)
            if kind == _BRANCH:
                bounds = [low, *ordered[1:], high]
                left += [(node[2], depth - 1, bounds[n], bounds[n + 1]) for n, node in enumerate(nodes)]
                continue
            entries += len(nodes)
            for at, size, data_size, flags in nodes:
                data = at + _NODE.size + size
                wanted = _IS_DATABASE if is_names else flags & _IN_OVERFLOW
                if flags != wanted or (is_free and size != _NUMBER.size):
                    raise _Damage("a record is of another kind than its database")
                if flags & _IN_OVERFLOW:
                    first = _NUMBER.unpack_from(page, data)[0]
                    counts[_OVERFLOW] += self._overflow(first, data_size)
                    if is_free:
                        yield os.pread(self._file, data_size, first * self._page_size + _PAGE.size)
                elif is_free or is_names:
                    yield page[data : data + data_size]
        if (counts[_BRANCH], counts[_LEAF], counts[_OVERFLOW], entries) != root[3:7]:
            raise _Damage("a database does not hold the number of records or pages that it claims")

    def _page(self, number: int, kind: int) -> bytes:
        """A page of a tree, which nothing else refers to."""
        self._take(number, 1)
        page = os.pread(self._file, self._page_size, number * self._page_size)
        own, padding, flags, lower, upper = _PAGE.unpack_from(page)
        if (
            (own, padding, flags) != (number, 0, kind)
            or not _PAGE.size <= lower <= upper <= self._page_size
            or lower % 2
        ):
            raise _Damage(f"page {number} is not the one that it should be")
        return page

    def _overflow(self, number: int, data_size: int) -> int:
        """Check the pages of a large value. Returns how many there are: more than it needs, where a larger one was
        there before."""
        if (number + 1) * self._page_size > self._size:
            raise _Damage("the file is shorter than what it claims to hold")
        head = os.pread(self._file, _PAGE.size, number * self._page_size)
        own, padding, flags, _, _ = _PAGE.unpack_from(head)
        count: int = _OVERFLOW_PAGES.unpack_from(head, _PAGE.size - 4)[0]
        if (own, padding, flags) != (number, 0, _OVERFLOW) or count * self._page_size < _PAGE.size + data_size:
            raise _Damage(f"page {number} is not the large value that it should be")
        self._take(number, count)
        return count

    def _take(self, number: int, count: int) -> None:
        """Pages that are in use: each at one place, and inside the file."""
        if number + count > self._last + 1:
            raise _Damage("a place refers to a page that the file does not have")
        if (number + count) * self._page_size > self._size:
            raise _Damage("the file is shorter than what it claims to hold")
        if self._used.count(0, number, number + count) != count:
            raise _Damage("two places refer to one page")
        self._used[number : number + count] = b"\1" * count

    def _check_free(self, record: bytes) -> None:
        """A list of free pages: how many, and their numbers, descending. LMDB writes to these."""
        count = _NUMBER.unpack_from(record)[0]
        numbers = struct.unpack_from(f"<{min(count, len(record))}Q", record, _NUMBER.size)
        before = self._last + 1
        for number in numbers:
            if not 1 < number < before or self._used[number]:
                raise _Damage("a page that is in use is listed as free")
            self._used[number] = 1
            before = number


def _nodes(page: bytes, kind: int) -> list[tuple[int, int, int, int]]:
    """For each node of a page: its place, the size of its key, the size of its value (in a branch, the page that it
    leads to), and its flags. The nodes fill the page's end without a gap."""
    _, _, _, lower, upper = _PAGE.unpack_from(page)
    found, filled = [], 0
    for at in struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size):
        low, high, flags, key_size = _NODE.unpack_from(page, at)
        size = low | high << 16
        if kind == _BRANCH:
            found.append((at, key_size, size | flags << 32, 0))
            held = 0
        else:
            found.append((at, key_size, size, flags))
            held = _NUMBER.size if flags & _IN_OVERFLOW else size
        length = _NODE.size + key_size + held
        if at < upper or at + length > len(page) or key_size > _KEY_MAX:
            raise _Damage("a place in a page lies outside it")
        filled += length + length % 2
    if not found or (kind == _BRANCH and len(found) < 2) or filled != len(page) - upper:
        raise _Damage("the records of a page do not fill it")
    return found


def _check_order(keys: list[bytes], low: bytes | None, high: bytes | None) -> None:
    """Keys ascend, from ``low`` on and to before ``high``."""
    if any(one >= other for one, other in pairwise(keys)):
        raise _Damage("the keys of a page do not ascend")
    if (low is not None and keys[0] < low) or (high is not None and keys[-1] >= high):
        raise _Damage("a page holds keys that belong elsewhere")


def is_whole(path: Path) -> bool:
    """Whether the file at ``path`` can be opened by LMDB."""
    return damage_of(path) is None


# -- records ----------------------------------------------------------------------------------------------------------


def sealed(key: bytes, value: bytes) -> bytes:
    """The record for a value under ``key``: a checksum of both, then the value."""
    return zlib.crc32(value, zlib.crc32(key)).to_bytes(_CHECKSUM_BYTES, "little") + value


def unsealed(key: bytes, record: bytes) -> bytes:
    """The value of a record. Raises ``lmdb.CorruptedError`` where it is not what was written under ``key``."""
    value = record[_CHECKSUM_BYTES:]
    if zlib.crc32(value, zlib.crc32(key)) != int.from_bytes(record[:_CHECKSUM_BYTES], "little"):
        raise _changed()
    return value


def records(cursor: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the sealed records whose keys begin with ``prefix``, ascending.

    A key that was changed stays at its place, among or beside those of its prefix, where no search finds it. So the
    records beside them are compared too. Raises ``lmdb.CorruptedError``.
    """
    is_there = cursor.set_range(prefix)
    if cursor.prev() if is_there else cursor.last():
        key, record = cursor.item()
        unsealed(key, record)
        if key >= prefix:
            raise _changed()
    last = b""
    for key, record in cursor.iternext() if is_there and cursor.set_range(prefix) else ():
        value = unsealed(key, record)
        if key < prefix or key <= last:
            raise _changed()
        if not key.startswith(prefix):
            return
        yield key, value
        last = key


def confirm_missing(cursor: Any, key: bytes, near: int = NEAR) -> None:
    """Raise ``lmdb.CorruptedError`` where ``key`` is not found although it may be there: the sealed records around its
    place are out of order or damaged. In a damaged page a search goes astray without an error. ``near``: so many
    records are compared on either side."""
    is_before_one = cursor.set_range(key)
    _check_run(key, cursor.iternext() if is_before_one else (), operator.gt, near)
    comes_after = cursor.set_range(key) and cursor.prev() if is_before_one else cursor.last()
    _check_run(key, cursor.iterprev() if comes_after else (), operator.lt, near)


def _check_run(
    last: bytes, run: Iterable[tuple[bytes, bytes]], follows: Callable[[bytes, bytes], bool], near: int
) -> None:
    size = 0
    for key, record in islice(run, near):
        if not follows(key, last):
            raise _changed()
        unsealed(key, record)
        last, size = key, size + len(record)
        if size > _NEAR_BYTES:
            return


def _changed() -> lmdb.CorruptedError:
    return lmdb.CorruptedError("it does not hold what was written to it")
