"""One bucket of the image state: an LMDB environment with documents, and the data to undo the last batches.

Batches are written in transactions, one or several at a time. The previous values of what a batch changes are written
with it, under its number, so that a batch that is given again can be undone first. Documents stay in the file.

Each record begins with a checksum of its key and its bytes, which is compared whenever the record is read, and a bucket
says its number and its state.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb

from tailrace.base import durable
from tailrace.base.lmdb_file import check_before_opening, confirm_missing, copied, note_closed, sealed, unsealed
from tailrace.errors import TailraceError

#: The address space of a new environment, in bytes. The file is only as long as what was written to it.
MAP_BYTES: Final = 4 << 30
#: LMDB's lock file, which it maps into memory.
_LOCK_BYTES: Final = 8192
_UNDO: Final = b"undo"
_SEQUENCE: Final = 4
#: Previous values that are kept in one record: few enough that the record fits into freed pages.
_CHUNK: Final = 32
_IDENTITY: Final = b"identity"
#: What is kept to undo batches up to this one was deleted.
_FORGOTTEN: Final = b"forgotten"
AGAIN: Final = "Put the whole directory back from one copy, or seed the images again in a new directory"


class ImageStateError(TailraceError):
    """The image state cannot be used: its disk is full, its files are damaged, or another process writes it.

    The state then has nothing of the batch. It can continue from its last batch once the cause is removed.
    """


class ImagesInUseError(ImageStateError):
    """Another process writes the image state."""


class ImageBucket:
    """Documents by key, written by one process at a time. Keys have up to 500 bytes.

    ``directory``  created if it does not exist
    ``identity``   which bucket of which state it is
    ``map_bytes``  address space at first; it doubles as the documents fill half of it
    ``begun``      whether it was opened before: then its file is there, and says that identity
    """

    def __init__(self, directory: Path, identity: bytes, *, map_bytes: int = MAP_BYTES, begun: bool = False) -> None:
        self.directory = directory
        if begun:
            self._check_there()
        try:
            durable.make_directory(directory)
            self._lock = os.open(directory / "writer", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise _os_error(error, directory) from error
        try:
            self._take_lock()
            durable.reserve(directory / "lock.mdb", _LOCK_BYTES)
            self._env = self._open(map_bytes)
        except OSError as error:
            os.close(self._lock)
            raise _os_error(error, directory) from error
        except BaseException:
            os.close(self._lock)
            raise
        self._txn: Any = None
        try:
            self._identify(identity, begun=begun)
        except BaseException:
            self.close()
            raise

    def _check_there(self) -> None:
        path = self.directory / "data.mdb"
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        if size <= 0:
            what = "is missing" if size < 0 else "is empty"
            raise ImageStateError(f"the file {path}, which holds images of this state, {what}", hint=AGAIN)

    def _identify(self, identity: bytes, *, begun: bool) -> None:
        found = dict(self.meta(_IDENTITY)).get(_IDENTITY)
        if found is None and not begun and not len(self):
            self.begin()
            self.commit([(_IDENTITY, identity)])
        elif found != identity:
            raise ImageStateError(f"{self.directory} no longer holds the same bucket of this state", hint=AGAIN)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ImagesInUseError(
                f"another process writes the images in {self.directory}",
                hint="Stop it, or give this process a directory of its own",
            ) from error

    def _open(self, map_bytes: int) -> Any:
        try:
            check_before_opening(self.directory)
            with durable.begun_whole(self.directory / "data.mdb"):
                env = lmdb.open(str(self.directory), map_size=map_bytes, max_dbs=4, max_readers=64, readahead=False)
            self._documents = env.open_db(b"documents")
            self._undo = env.open_db(_UNDO)
            self._meta = env.open_db(b"meta")
        except lmdb.Error as error:
            raise self._failed(error) from error
        return env

    def _failed(self, error: Exception) -> ImageStateError:
        text = str(error)
        full = os.strerror(errno.ENOSPC) in text or isinstance(error, lmdb.DiskError)
        # LMDB says no more than that about a write that was cut short.
        if full or (os.strerror(errno.EIO) in text and durable.has_no_room(self.directory)):
            return ImageStateError(f"the disk of {self.directory} is full", hint="Make room, and start again")
        if isinstance(error, lmdb.MapFullError):
            return ImageStateError(
                f"a batch is larger than half of what {self.directory} holds", hint="Use smaller batches"
            )
        if isinstance(error, lmdb.CorruptedError):
            return ImageStateError(f"the file {self.directory / 'data.mdb'} is damaged: {text}", hint=AGAIN)
        return ImageStateError(
            f"the images in {self.directory} cannot be used: {text}",
            hint="If the files are damaged, seed the images again in a new directory",
        )

    def begin(self) -> None:
        """Start a transaction. One that was started before and not committed is discarded."""
        self.abort()
        try:
            self._grow()
            self._txn = self._env.begin(write=True)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _grow(self) -> None:
        info, page = self._env.info(), self._env.stat()["psize"]
        if (info["last_pgno"] + 1) * page > info["map_size"] // 2:
            self._env.set_mapsize(2 * info["map_size"])

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The documents as they were committed; ``None`` for a key without a document."""
        try:
            with self._env.begin() as txn, txn.cursor(db=self._documents) as cursor:
                # In the order of the keys: neighbours in the file are read together.
                found: dict[bytes, bytes] = dict(cursor.getmulti(sorted(keys)))
        except lmdb.Error as error:
            raise self._failed(error) from error
        documents = {key: self._checked(key, record) for key, record in found.items()}
        return list(map(documents.get, keys))

    def confirm_missing(self, keys: Iterable[bytes]) -> None:
        """Raise ImageStateError where a key is not found although it may be there: the records around its place are
        out of order or damaged. In a damaged page a search goes astray, and says nothing."""
        try:
            with self._env.begin() as txn, txn.cursor(db=self._documents) as cursor:
                for key in keys:
                    confirm_missing(cursor, key)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _checked(self, key: bytes, record: bytes) -> bytes:
        """What a record holds. Raises ImageStateError where it is not what was written under this key."""
        try:
            return unsealed(key, record)
        except lmdb.CorruptedError as error:
            raise self._failed(error) from None

    def put(self, documents: Mapping[bytes, bytes | None]) -> None:
        """Write the new documents of keys; ``None`` deletes. Only inside a transaction."""
        txn = self._txn
        try:
            with txn.cursor(db=self._documents) as cursor:
                new = [(key, document) for key in sorted(documents) if (document := documents[key]) is not None]
                cursor.putmulti([(key, sealed(key, document)) for key, document in new])
            for key, document in documents.items():
                if document is None:
                    txn.delete(key, db=self._documents)
        except lmdb.Error as error:
            self.abort()
            raise self._failed(error) from error

    def keep(self, batch: int, before: Mapping[bytes, bytes | None]) -> int:
        """Keep the documents before a batch, so that it can be undone; batches in their order. Only inside a
        transaction. Returns how many bytes that takes."""
        keys, documents = list(before), list(before.values())
        records = []
        for number, first in enumerate(range(0, len(keys), _CHUNK)):
            name = batch.to_bytes(8, "big") + number.to_bytes(_SEQUENCE, "big")
            chunk = _chunk(keys[first : first + _CHUNK], documents[first : first + _CHUNK])
            records.append((name, sealed(name, chunk)))
        try:
            with self._txn.cursor(db=self._undo) as cursor:
                cursor.putmulti(records, append=True)
        except lmdb.Error as error:
            self.abort()
            raise self._failed(error) from error
        return sum(len(record) for _, record in records)

    def commit(self, meta: Iterable[tuple[bytes, bytes | None]] = ()) -> None:
        """Commit the transaction to disk."""
        txn, self._txn = self._txn, None
        try:
            self._put_meta(txn, meta)
            txn.commit()
        except lmdb.Error as error:
            txn.abort()
            raise self._failed(error) from error

    def _put_meta(self, txn: Any, meta: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in meta:
            if value is None:
                txn.delete(key, db=self._meta)
            else:
                txn.put(key, value, db=self._meta)

    def abort(self) -> None:
        """Discard a transaction that is not committed."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None

    def undo_after(self, batch: int, meta: Iterable[tuple[bytes, bytes | None]] = ()) -> None:
        """Undo every batch after ``batch``; ``meta`` as in ``commit``."""
        self.abort()
        try:
            with self._env.begin(write=True) as txn, txn.cursor(db=self._undo) as cursor:
                while cursor.last() and int.from_bytes(cursor.key()[:8], "big") > batch:
                    for key, old in _undone(self, cursor.key(), cursor.value()):
                        if old is None:
                            txn.delete(key, db=self._documents)
                        else:
                            txn.put(key, sealed(key, old), db=self._documents)
                    cursor.delete()
                self._put_meta(txn, meta)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def forget_until(self, batch: int) -> None:
        """Delete what is kept to undo the batches up to ``batch``."""
        try:
            with self._env.begin(write=True) as txn, txn.cursor(db=self._undo) as cursor:
                while cursor.first() and int.from_bytes(cursor.key()[:8], "big") <= batch:
                    cursor.delete()
                self._put_meta(txn, [(_FORGOTTEN, batch.to_bytes(8, "big"))])
        except lmdb.Error as error:
            raise self._failed(error) from error

    @property
    def forgotten(self) -> int | None:
        """Batches up to this one cannot be undone any more; ``None``: nothing was deleted yet."""
        found = dict(self.meta(_FORGOTTEN)).get(_FORGOTTEN)
        return None if found is None else int.from_bytes(found, "big")

    def remember_all(self, meta: Iterable[tuple[bytes, bytes | None]] = ()) -> None:
        """After ``forget_until`` of a bucket that is empty now: it starts again. ``meta`` as in ``commit``."""
        self.begin()
        self.commit([(_FORGOTTEN, None), *meta])

    def meta(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """The metadata under keys that begin with ``prefix``."""
        try:
            with self._env.begin() as txn, txn.cursor(db=self._meta) as cursor:
                found = cursor.iternext() if cursor.set_range(prefix) else ()
                return [(key, value) for key, value in found if key.startswith(prefix)]
        except lmdb.Error as error:
            raise self._failed(error) from error

    def documents(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Every key that begins with ``prefix``, and its current document."""
        with self._env.begin() as txn, txn.cursor(db=self._documents) as cursor:
            if not cursor.set_range(prefix):
                return
            for key, document in cursor:
                if not key.startswith(prefix):
                    return
                yield key, self._checked(key, document)

    def erase(self, prefix: bytes, limit: int) -> int:
        """Delete up to ``limit`` documents; this cannot be undone. Returns how many."""
        count = 0
        try:
            with self._env.begin(write=True) as txn, txn.cursor(db=self._documents) as cursor:
                while count < limit and cursor.set_range(prefix) and cursor.key().startswith(prefix):
                    cursor.delete()
                    count += 1
        except lmdb.Error as error:
            raise self._failed(error) from error
        return count

    def past(self) -> Iterator[bytes]:
        """The keys of the documents that are kept to undo batches, each as often as it is."""
        try:
            with self._env.begin() as txn, txn.cursor(db=self._undo) as cursor:
                for name, record in cursor:
                    yield from (key for key, old in _undone(self, name, record) if old is not None)
        except lmdb.Error as error:
            raise self._failed(error) from error

    def write_anew(self, target: Path, goes: Callable[[bytes], bool]) -> None:
        """Write the bucket to a new file in ``target``, where what is kept to undo batches has no document under keys
        that ``goes`` selects. Outside of a transaction."""
        try:
            durable.make_directory(target)
            size = self._env.info()["map_size"]
            copied(self._env, target, map_bytes=size, kept=lambda *record: _kept(self, goes, *record))
        except (lmdb.Error, OSError) as error:
            raise self._failed(error) from error

    def __len__(self) -> int:
        with self._env.begin() as txn:
            count: int = txn.stat(self._documents)["entries"]
            return count

    def close(self) -> None:
        """Close the environment. What was not committed is lost. May be called again."""
        self.abort()
        if self._lock >= 0:
            self._env.close()
            note_closed(self.directory)
            os.close(self._lock)
            self._lock = -1


def _undone(bucket: ImageBucket, name: bytes, record: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Keys and previous documents of a record that undoes a batch."""
    chunk = bucket._checked(name, record)
    (count,) = struct.unpack_from("<i", chunk)
    sizes = struct.unpack_from(f"<{2 * count}i", chunk, 4)
    key, old = 4 + 8 * count, 4 + 8 * count + sum(sizes[:count])
    for key_size, size in zip(sizes[:count], sizes[count:], strict=True):
        yield chunk[key : key + key_size], None if size < 0 else chunk[old : old + size]
        key += key_size
        old += max(size, 0)


def _kept(bucket: ImageBucket, goes: Callable[[bytes], bool], database: bytes, name: bytes, record: bytes) -> bytes:
    """The record that ``write_anew`` writes for one."""
    found = list(_undone(bucket, name, record)) if database == _UNDO else []
    if not any(old is not None and goes(key) for key, old in found):
        return record
    return sealed(name, _chunk([key for key, _ in found], [None if goes(key) else old for key, old in found]))


def _chunk(keys: Sequence[bytes], before: Sequence[bytes | None]) -> bytes:
    """Keys and their previous documents as one record: how many, the sizes of both (int32), the bytes of both. A
    document that did not exist has the size -1."""
    sizes = [*map(len, keys), *(-1 if old is None else len(old) for old in before)]
    return b"".join((struct.pack(f"<{len(sizes) + 1}i", len(keys), *sizes), *keys, *filter(None, before)))


def _os_error(error: OSError, directory: Path) -> ImageStateError:
    if error.errno == errno.ENOSPC:
        return ImageStateError(f"the disk of {directory} is full", hint="Make room, and start again")
    return ImageStateError(f"the images in {directory} cannot be opened: {error.strerror}")
