"""The few file-system operations that the promises of the lake and of the archive rest on: write durably, write once,
lock.

All changes to either go through here, so that one place decides what is on disk after a power cut. A POSIX file
system shared by driver and executors is assumed: rename is atomic and ``flock`` is honoured.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tailrace.errors import SinkError

#: What the system says when there is no room: the device, the user's quota, the process's limit on a file's size.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: What it says when a directory may not be written, or has gone.
NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR})

#: Matches what a killed ``write_json`` leaves behind.
UNFINISHED = ".*.json.*"

#: What a file system answers that has no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK})

#: The key of the digest in a file of ``write_sealed``.
_SEAL = "sha256"
_RESTORE = "Restore it from a copy"

#: A directory that holds users' data is for its owner alone: events have every field of a document, and an oplog has
#: what the server writes about its users.
PRIVATE = 0o700

_observer: Callable[[str], None] | None = None


def observe_steps(observer: Callable[[str], None] | None) -> None:
    """Call ``observer(step)`` after each durable step of a commit or compaction; ``None`` ends it.

    For fault tests: the observer kills its process at the step it was asked to, and the test looks at what is left.
    """
    global _observer  # noqa: PLW0603  one process, one observer: a parameter through every function would be noise
    _observer = observer


def step(name: str) -> None:
    """Tell the observer, if there is one, that the step ``name`` is on disk."""
    if _observer is not None:
        _observer(name)


class LakeFullError(SinkError):
    """The lake's file system has no room left. Nothing that was committed is harmed."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write at ``path`` into one clear sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise LakeFullError(
                f"no room left to write {path}: {os.strerror(error.errno or 0)}",
                hint="What was committed before is intact; make room and start again",
            ) from error
        if error.errno in NOT_WRITABLE:
            raise SinkError(f"cannot write {path}: {os.strerror(error.errno or 0)}") from error
        raise


def reserve(path: Path, size: int) -> None:
    """Reserve disk space for the first ``size`` bytes of the file at ``path``, and create the file if it is missing.

    Without this, a process that writes to a mapped page of the file is killed (SIGBUS) if the disk is full. Raises
    OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Make ``directory``, and those above it, where they are missing: each one's name is on the device then. Otherwise
    a power cut could take the directory away with everything that was synced in it. Raises OSError."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(mode=mode, exist_ok=True)
    sync_directory(directory.parent)


def make_private(directory: Path) -> None:
    """Make ``directory``, the top of a store of users' data, if it is missing: mode 0700, less what the umask takes.

    One that is there keeps its mode, so a store that is to be shared gets its directory first. What is made inside
    has the usual mode (the umask's), since nobody gets to it past the top; so have missing directories above it.
    Raises OSError, for ``writing`` to turn into a sentence.
    """
    make_directory(directory, PRIVATE)


@contextmanager
def begun_whole(path: Path) -> Iterator[None]:
    """Remove the file at ``path`` if the block creates it and fails: its library may refuse a file that was begun on a
    full disk from then on. For a caller that holds the directory's lock."""
    new = not path.exists()
    try:
        yield
    except BaseException:
        if new:
            path.unlink(missing_ok=True)
        raise


def has_no_room(directory: Path) -> bool:
    """Whether ``directory`` has no room for a file of 1 MB. For callers that know only that a write has failed."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
    except OSError as error:
        return error.errno in NO_ROOM
    return False


def sync_file(path: Path) -> None:
    """Force a file's bytes to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Force a directory's entries to the device: without it a rename may vanish in a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write ``value`` so that ``path`` holds all of it or what it held before, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_sealed(path: Path, value: Mapping[str, object]) -> None:
    """As ``write_json``, with a digest of the content in the file, so that ``read_sealed`` notices a changed bit."""
    write_json(path, {**value, _SEAL: _digest(value)})


def read_sealed(path: Path) -> dict[str, object] | None:
    """What ``write_sealed`` has written; ``None`` where there is no such file. SinkError where it was changed."""
    value = read_json(path)
    return None if value is None else unsealed(value, path)


def sealed(value: Mapping[str, object]) -> bytes:
    """What ``write_sealed`` writes to a file, for an object in a store."""
    return (json.dumps({**value, _SEAL: _digest(value)}, indent=1) + "\n").encode()


def unsealed(value: dict[str, object], name: object) -> dict[str, object]:
    """As ``read_sealed``, of what was read already from ``name``."""
    if value.pop(_SEAL, None) != _digest(value):
        raise SinkError(f"{name} is damaged: it was changed after it was written", hint=_RESTORE)
    return value


def _digest(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def publish(path: Path, content: bytes, beside: Path) -> None:
    """Write a file that must not be there yet: all of it appears at once, on the device before it is seen.

    ``beside`` is a directory on the same file system for the unfinished file. Raises FileExistsError where somebody
    else has written ``path`` first.
    """
    temporary = beside / f".{path.name}.{os.getpid()}"
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if path.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
                temporary.replace(path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def publish_file(temporary: Path, path: Path) -> None:
    """Give a finished file, whose bytes are on the device, its name: it appears at once."""
    with writing(path):
        temporary.replace(path)
        sync_directory(path.parent)


def read_json(path: Path) -> dict[str, object] | None:
    """The object in ``path``; ``None`` where there is no such file. A damaged one is an error that names it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SinkError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SinkError(f"cannot read {path}: {error}") from error
    return parse_json(text, path)


def parse_json(text: str | bytes, name: object) -> dict[str, object]:
    """The object that was read from ``name``. Raises SinkError if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SinkError(f"{name} is damaged: {error}", hint=_RESTORE) from error
    if not isinstance(value, dict):
        raise SinkError(f"{name} is damaged: not a JSON object", hint=_RESTORE)
    return value


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file ``path``; the system lets go of it when the process dies, however it dies.

    Gives false at once, without the lock, when ``wait`` is false and somebody else holds it.
    """
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def locked_for_reading(path: Path) -> Iterator[None]:
    """Keep the holders of the lock file ``path`` out while the block runs, without writing anything.

    Where there is no such file, or it cannot be locked (a copy that is read only), nobody is kept out: nobody writes
    there either.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)
