"""The kernel comes to a program that watches once enough was read to be worth it.

Compiling it takes some twenty seconds, once for an installation: another process does that, and the plain stages give
the same events meanwhile. Loading it takes well under a second, in the thread that reads: beside a thread that is busy
making events the same imports take ten seconds (measured), since each gives up the interpreter's lock many times. The
first reply always goes through the plain stages, so that a stream's first event does not wait for either. A stream on
which little happens never loads the kernel.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import subprocess
import sys
import threading
import zlib
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from tailrace.core import kernel
from tailrace.core.plan.request import OplogBatch
from tailrace.read.source.batch import cut

#: Oplog read by all streams until the kernel is asked for: what the plain stages do in some ten milliseconds.
BYTES_MIN: Final = 1 << 18
#: A smaller batch, of one entry or two, is made by the plain stages: in 73 µs of CPU where the compiled code takes 105,
#: because of the fixed work for each batch; with a ``$match`` in 93 and 199. From two entries on without a ``$match``,
#: and from four on with one, the compiled code is faster (measured with 6.0's inserts of 50 and 400 bytes).
_BATCH_BYTES_MIN: Final = 1024
#: How many bytes of a large first reply go through the plain stages: a few milliseconds of work, where two thousand
#: entries take seventy.
_HEAD_BYTES: Final = 1 << 16

_MODULES: Final = tuple(
    f"tailrace.core.kernel.{name}" for name in ("reply", "look_up", "entry_index", "fast_path", "merge")
)
#: Says where numba keeps what it compiled. Its standard input ends with the process that started it, and so does it: a
#: service that is killed and started again and again would otherwise gather them.
_COMPILE: Final = (
    "import os, sys, threading; os.nice(5); sys.path[:] = sys.argv[1:];"
    "threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start();"
    f"import {', '.join(_MODULES)};"
    "from tailrace.core.kernel import transform; print(transform.transform.stats.cache_path)"
)

_log = logging.getLogger("tailrace.client")


class _KernelLoader:
    """Loads once. ``ready`` and ``missing`` (there is no numba) are read without a lock."""

    def __init__(self) -> None:
        self.ready = False
        self.missing = False
        self._bytes = 0
        self._begun = False
        self._compiled = False
        self._thread: threading.Thread | None = None
        self._compiling: subprocess.Popen[bytes] | None = None
        self._ending = False
        self._lock = threading.Lock()

    def read(self, size: int) -> None:
        """Note that ``size`` bytes were read. All that was read so far decides whether the kernel is worth loading."""
        with self._lock:
            is_due = self._bytes > 0 and self._bytes + size >= BYTES_MIN and not self._begun
            loads, self._compiled = self._compiled, False
            self._begun |= is_due
            self._bytes += size
        if is_due:
            self._begin()
        elif loads:
            self._load()

    @property
    def comes_next(self) -> bool:
        """Whether nothing was read so far, so that the kernel can take over after the beginning of a large reply."""
        return not (self._bytes or self._begun)

    def prepare(self) -> None:
        """Do not wait until enough was read: load the compiled code, or begin to compile."""
        with self._lock:
            is_due, self._begun = not self._begun, True
        if is_due:
            self._begin()

    def join(self) -> None:
        """Wait for the compiling that is under way."""
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        if not kernel.available():
            self.missing = True
            _log.warning(
                "numba cannot be imported, so change events are made in plain Python: the same events, at about a "
                "twentieth of the speed. Install the numba and numpy that tailrace names (pip install --upgrade "
                "tailrace), for a version of Python that numba supports"
            )
            return
        stamp = _stamp()
        if stamp is not None and _is_compiled(stamp):
            self._load()
            return
        self._thread = threading.Thread(target=self._prepare, args=(stamp,), name="tailrace-kernel", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _prepare(self, stamp: Path | None) -> None:
        """Compile in another process, and let the next batch load; where that cannot be done, compile here."""
        try:
            compiled = stamp is not None and self._compile(stamp)
        except OSError:
            compiled = False
        if compiled:
            with self._lock:
                self._compiled = True
        elif not self._ending:
            self._load()

    def _load(self) -> None:
        try:
            for module in _MODULES:
                import_module(module)
            self.ready = True
        except Exception:  # noqa: BLE001  the plain stages go on; nobody else would hear of it
            _log.warning("the compiled code cannot be loaded, so change events are made in plain Python", exc_info=True)

    def _compile(self, stamp: Path) -> bool:
        """Fill the cache of compiled code in another process. Whether that was done."""
        command = [sys.executable, "-c", _COMPILE, *sys.path]
        with self._lock:
            if self._ending:
                return False
            self._compiling = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._compiling.stdout is not None
        cache = self._compiling.stdout.read()  # not communicate(), which would close its standard input first
        self._compiling.wait()
        if self._compiling.returncode != 0:
            return False
        with suppress(OSError):
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_bytes(cache)
        return True

    def _end(self) -> None:
        """The program ends: wait for an import that is under way, since nothing may run in the middle of one then."""
        with self._lock:
            self._ending = True
            if self._compiling is not None and self._compiling.poll() is None:
                self._compiling.terminate()
        self.join()


_loader = _KernelLoader()


def works_on(size: int) -> bool:
    """Whether the kernel is to make the events of a batch of ``size`` bytes; also notes that so many were read. With 0,
    before a merge: whether it is loaded."""
    return is_ready(size) and not 0 < size < _BATCH_BYTES_MIN


def is_ready(size: int) -> bool:
    """Whether the kernel is loaded. Where it is not and enough was read, these ``size`` bytes included, it is loaded
    now, or compiled in another process first."""
    if not _loader.ready and size:
        _loader.read(size)
    return _loader.ready


def shortened(batch: OplogBatch) -> tuple[OplogBatch, OplogBatch | None]:
    """The part of a batch to read now, and the rest, if any, to read after it. A large first batch is divided, so that
    its first events are made at once and the others in compiled code."""
    if len(batch.raw) < BYTES_MIN or not _loader.comes_next:
        return batch, None
    head, _ = next(cut(batch.raw, _HEAD_BYTES))
    rest = batch.raw[len(head.raw) :]
    return (head, OplogBatch(rest, batch.high_water)) if rest else (batch, None)


def prepare() -> None:
    """Load the kernel now, which takes about a second, or begin to compile it. For a service that starts: later, beside
    a thread that serves, loading takes many seconds, during which that thread makes hardly any progress."""
    _loader.prepare()


def is_missing() -> bool:
    """Whether it was found that there is no numba, so that the plain stages do everything."""
    return _loader.missing


def _is_compiled(stamp: Path) -> bool:
    """Whether the cache that the stamp names still holds compiled code. Caches may be deleted and files cut short, and
    then the thread that reads would have to compile. Only the last byte of each file is checked."""
    try:
        cache = stamp.read_text().strip()
        if not cache or not any(Path(cache).glob("transform.*.nbi")):
            return False
        return all(_is_whole(file) for file in Path(cache).glob("*.nb[ci]"))
    except (OSError, ValueError):
        return False


def _is_whole(file: Path) -> bool:
    """Whether a file ends as pickles do."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 1))
        return opened.read() == pickle.STOP


def _stamp() -> Path | None:
    """The file that names the cache with the compiled code of this installation; ``None`` where no other process can
    fill the cache for this one."""
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    folder = os.environ.get("NUMBA_CACHE_DIR") or os.path.expanduser("~/.cache/tailrace/kernel")
    sources = Path(kernel.__file__).parent
    checksum = zlib.crc32(repr((sys.version, sys.prefix, str(sources))).encode())
    for source in sorted(sources.glob("*.py")):
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return Path(folder) / f"tailrace-{checksum:08x}.compiled"


def _after_fork() -> None:
    """A forked child has none of its parent's threads."""
    global _loader  # noqa: PLW0603  one for each process
    ready = _loader.ready
    _loader = _KernelLoader()
    _loader.ready = ready


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
