"""One bucket of the image state: an LMDB environment with documents, and the data to undo the last batches.

A batch is one transaction. It also writes the previous values of what it changes, under the batch's number, so that a
batch that is given again can be undone first. Only the keys of one batch are in memory; documents stay in the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb

from tailrace.errors import TailraceError

#: The address space of a new environment, in bytes. The file is only as long as what was written to it.
MAP_BYTES: Final = 4 << 30
_ABSENT: Final = b"\0"
_PRESENT: Final = b"\1"
_SEQUENCE: Final = 4


class ImageStateError(TailraceError):
    """The image state cannot be used: its disk is full, its files are damaged, or another process writes it.

    The state then has nothing of the batch. It can continue from its last batch once the cause is removed.
    """


class ImageBucket:
    """Documents by key, written by one process at a time. Keys have up to 500 bytes.

    ``directory``  created if it does not exist
    ``map_bytes``  address space at first; it doubles as the documents fill half of it
    """

    def __init__(self, directory: Path, *, map_bytes: int = MAP_BYTES) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "writer", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise _os_error(error, directory) from error
        try:
            self._take_lock()
            self._env = self._open(map_bytes)
        except BaseException:
            os.close(self._lock)
            raise
        self._txn: Any = None
        self._touched: set[bytes] = set()
        self._batch = 0
        self._undo_bytes = 0

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ImageStateError(
                f"another process writes the images in {self.directory}",
                hint="Stop it, or give this process a directory of its own",
            ) from error

    def _open(self, map_bytes: int) -> Any:
        try:
            env = lmdb.open(str(self.directory), map_size=map_bytes, max_dbs=4, max_readers=64, readahead=False)
            info, page = env.info(), env.stat()["psize"]
            size = (self.directory / "data.mdb").stat().st_size
            if size < (info["last_pgno"] + 1) * page:  # a read past the file's end would kill the process
                env.close()
                raise lmdb.CorruptedError("the file is shorter than what it says it holds")
            self._documents = env.open_db(b"documents")
            self._undo = env.open_db(b"undo")
            self._meta = env.open_db(b"meta")
        except lmdb.Error as error:
            raise self._failed(error) from error
        return env

    def _failed(self, error: Exception) -> ImageStateError:
        text = str(error)
        if os.strerror(errno.ENOSPC) in text or isinstance(error, lmdb.DiskError):
            return ImageStateError(f"the disk of {self.directory} is full", hint="Make room, and start again")
        if isinstance(error, lmdb.MapFullError):
            return ImageStateError(
                f"a batch is larger than half of what {self.directory} holds", hint="Use smaller batches"
            )
        return ImageStateError(
            f"the images in {self.directory} cannot be used: {text}",
            hint="If the files are damaged, seed the images again in a new directory",
        )

    def begin(self, batch: int) -> None:
        """Start batch ``batch``. A batch that was started before and not committed is discarded."""
        self.abort()
        try:
            self._grow()
            self._txn = self._env.begin(write=True)
        except lmdb.Error as error:
            raise self._failed(error) from error
        self._batch = batch
        self._touched.clear()
        self._undo_bytes = 0

    def _grow(self) -> None:
        info, page = self._env.info(), self._env.stat()["psize"]
        if (info["last_pgno"] + 1) * page > info["map_size"] // 2:
            self._env.set_mapsize(2 * info["map_size"])

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The documents; inside a batch, with its changes. ``None`` for a key without a document."""
        try:
            if self._txn is not None:
                return [self._txn.get(key, db=self._documents) for key in keys]
            with self._env.begin() as txn:
                return [txn.get(key, db=self._documents) for key in keys]
        except lmdb.Error as error:
            raise self._failed(error) from error

    def put(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Write the new documents of keys; ``None`` deletes. Only inside a batch."""
        txn, documents, undo, touched = self._txn, self._documents, self._undo, self._touched
        prefix = self._batch.to_bytes(8, "big")
        try:
            for key, document in changes:
                if key not in touched:
                    old = txn.pop(key, db=documents) if document is None else txn.replace(key, document, db=documents)
                    record = len(key).to_bytes(2, "big") + key + (_ABSENT if old is None else _PRESENT + old)
                    txn.put(prefix + len(touched).to_bytes(_SEQUENCE, "big"), record, db=undo, append=True)
                    touched.add(key)
                    self._undo_bytes += len(record)
                elif document is None:
                    txn.delete(key, db=documents)
                else:
                    txn.put(key, document, db=documents)
        except lmdb.Error as error:
            self.abort()
            raise self._failed(error) from error

    def commit(self, meta: Iterable[tuple[bytes, bytes | None]] = ()) -> int:
        """Commit the batch to disk. Returns how many bytes are kept to undo it."""
        txn, self._txn = self._txn, None
        try:
            self._put_meta(txn, meta)
            txn.commit()
        except lmdb.Error as error:
            txn.abort()
            raise self._failed(error) from error
        return self._undo_bytes

    def _put_meta(self, txn: Any, meta: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in meta:
            if value is None:
                txn.delete(key, db=self._meta)
            else:
                txn.put(key, value, db=self._meta)

    @property
    def pending_undo_bytes(self) -> int:
        """How many bytes the current batch has kept so far to undo it."""
        return self._undo_bytes

    def abort(self) -> None:
        """Discard a batch that is not committed."""
        if self._txn is not None:
            self._txn.abort()
            self._txn = None

    def undo_after(self, batch: int, meta: Iterable[tuple[bytes, bytes | None]] = ()) -> None:
        """Undo every batch after ``batch``; ``meta`` as in ``commit``."""
        self.abort()
        try:
            with self._env.begin(write=True) as txn, txn.cursor(db=self._undo) as cursor:
                while cursor.last() and int.from_bytes(cursor.key()[:8], "big") > batch:
                    record = cursor.value()
                    size = int.from_bytes(record[:2], "big")
                    key, kind, old = record[2 : 2 + size], record[2 + size : 3 + size], record[3 + size :]
                    if kind == _ABSENT:
                        txn.delete(key, db=self._documents)
                    else:
                        txn.put(key, old, db=self._documents)
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
        except lmdb.Error as error:
            raise self._failed(error) from error

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
                yield key, document

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

    def __len__(self) -> int:
        with self._env.begin() as txn:
            count: int = txn.stat(self._documents)["entries"]
            return count

    def close(self) -> None:
        """Close the environment. What was not committed is lost. May be called again."""
        self.abort()
        if self._lock >= 0:
            self._env.close()
            os.close(self._lock)
            self._lock = -1


def _os_error(error: OSError, directory: Path) -> ImageStateError:
    if error.errno == errno.ENOSPC:
        return ImageStateError(f"the disk of {directory} is full", hint="Make room, and start again")
    return ImageStateError(f"the images in {directory} cannot be opened: {error.strerror}")
