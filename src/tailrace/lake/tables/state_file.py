"""The LMDB file of the tables' state: documents, pending rows, and what is known about both, as sealed records.

Each record begins with a checksum of its key and its value, which is compared whenever it is read.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import lmdb

from tailrace.base import durable
from tailrace.base.durable import LakeFullError
from tailrace.base.lmdb_file import (
    check_before_opening,
    check_before_reading,
    copied,
)
from tailrace.errors import SinkError

#: Address space in bytes, not disk space: the file grows as it is written.
_MAP_BYTES: Final = 1 << 40
#: LMDB's lock file, which it maps into memory.
_LOCK_BYTES: Final = 8192
_DATABASES: Final = (b"sealed-documents", b"sealed-waiting", b"sealed-meta")
#: How many neighbours are compared on either side of a key that is missing. Every document that an application deletes
#: is missed once.
NEAR: Final = 2
_SAME_USER: Final = (
    "Run the command as the user who writes the tables: a reader notes in lock.mdb what it reads, so that "
    "the writer keeps it"
)
MADE_ANEW: Final = "Remove {path}: the next run copies the collections again, and rewrites the tables"


class Databases(NamedTuple):
    """The databases of an open file."""

    documents: Any
    waiting: Any
    meta: Any


@dataclass(eq=False, slots=True, weakref_slot=True)
class OpenFile:
    """An open file, and how many hold it. ``close_file`` gives it back."""

    environment: Any
    databases: Databases
    readonly: bool
    holders: int = 1


#: The open files of this process, by device and inode.
_files: WeakValueDictionary[tuple[int, int], OpenFile] = WeakValueDictionary()
_closed: Final = threading.Condition()
#: A reader has its file open for as long as a look at it takes. One that forgot to close it is not waited for longer.
_READER_S: Final = 60.0
_LOOK_S: Final = 0.1


def open_file(directory: Path, *, readonly: bool) -> OpenFile:
    """The file in ``directory``. For writing, its databases are made if there is no file; it waits until readers of
    this process have closed it. Raises ``lmdb.Error``, also where this process writes it already, and SinkError where
    there is nothing to read."""
    until = time.monotonic() + _READER_S
    with _closed:
        while (key := _key(directory)) is not None and (found := _files.get(key)) is not None:
            if readonly:
                found.holders += 1
                return found
            if not found.readonly or time.monotonic() > until:
                # Not every version of the binding refuses it, and closing one of two loses the other's locks.
                raise lmdb.Error(f"The environment {str(directory)!r} is already open in this process.")
            del found  # so that one whom nobody holds is closed
            _closed.wait(_LOOK_S)
        made = _opened(directory, readonly=readonly)
        key = _key(directory)
        assert key is not None
        _files[key] = made
        return made


def close_file(file: OpenFile) -> bool:
    """Give ``file`` back. Returns whether it is closed now: nobody else of this process holds it."""
    with _closed:
        file.holders -= 1
        if file.holders:
            return False
        for key in [key for key, one in _files.items() if one is file]:
            del _files[key]
        file.environment.close()
        _closed.notify_all()
        return True


def _key(directory: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(directory / "data.mdb")
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _opened(directory: Path, *, readonly: bool) -> OpenFile:
    if not readonly:
        with durable.writing(directory):
            durable.make_directory(directory)
            durable.reserve(directory / "lock.mdb", _LOCK_BYTES)
        check_before_opening(directory)
    elif not (directory / "data.mdb").exists():
        raise SinkError(f"{directory} does not exist", hint="Give the directory of the tables")
    else:
        check_before_reading(directory, lock=directory.parent / "lock")
    with durable.begun_whole(directory / "data.mdb"):
        environment = lmdb.open(
            str(directory), map_size=_MAP_BYTES, max_dbs=len(_DATABASES), readahead=False, readonly=readonly
        )
    try:
        return OpenFile(environment, _databases(environment, readonly=readonly), readonly)
    except BaseException:
        environment.close()
        raise


def _databases(environment: Any, *, readonly: bool) -> Databases:
    with environment.begin() as transaction, transaction.cursor() as cursor:
        found = set(cursor.iternext(values=False))
    if found not in (set(), set(_DATABASES)):
        # One that is not found would be made, and be empty.
        raise lmdb.CorruptedError("its databases are not those that were written")
    if readonly:
        return Databases(*(environment.open_db(name, create=False) for name in _DATABASES))
    with environment.begin(write=True) as transaction:
        return Databases(*(environment.open_db(name, transaction) for name in _DATABASES))


def rewrite_file(directory: Path) -> None:
    """Write the file in ``directory`` anew, with what counts of it and nothing else: LMDB leaves deleted records where
    they were until something is written over them. The caller holds the lock; readers keep the file that they have."""
    part, whole, _ = _beside(directory)
    finish_rewriting(directory)
    with clear_errors(directory), durable.writing(part):
        check_before_opening(directory)
        durable.make_directory(part)
        with lmdb.open(str(directory), readonly=True, max_dbs=len(_DATABASES), readahead=False) as file:
            copied(file, part, map_bytes=_MAP_BYTES)
        part.rename(whole)
        durable.sync_directory(directory.parent)
    durable.step("state.rewritten")
    finish_rewriting(directory)


def finish_rewriting(directory: Path) -> None:
    """Finish what a crash has interrupted. The caller holds the lock."""
    part, whole, gone = _beside(directory)
    with durable.writing(directory):
        if whole.exists():
            if directory.exists():
                directory.rename(gone)
                durable.step("state.put_aside")
            whole.rename(directory)
            durable.sync_directory(directory.parent)
            durable.step("state.replaced")
        for left in (gone, part):
            if left.exists():
                shutil.rmtree(left)


def _beside(directory: Path) -> tuple[Path, Path, Path]:
    """A file that is being written, one that is whole and takes the place of that in ``directory``, and the old one."""
    part, whole, gone = (directory.with_name(f"{directory.name}.{one}") for one in ("part", "whole", "gone"))
    return part, whole, gone


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Say what went wrong with the state in ``path``, and what to do."""
    try:
        yield
    except lmdb.DiskError as error:
        raise LakeFullError(f"no room left to write {path}: {error}", hint="Make room and start again") from error
    except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError) as error:
        raise SinkError(f"{path} is damaged: {error}", hint=MADE_ANEW.format(path=path)) from error
    except lmdb.Error as error:
        text = str(error)
        full = "No space left" in text or "File too large" in text or "quota" in text.lower()
        # LMDB says no more than that about a write that was cut short.
        if full or ("Input/output error" in text and durable.has_no_room(path)):
            raise LakeFullError(f"no room left to write {path}: {text}", hint="Make room and start again") from error
        if "Permission denied" in text:
            raise SinkError(f"this user may not write in {path}", hint=_SAME_USER) from error
        raise SinkError(f"cannot use {path}: {text}") from error
