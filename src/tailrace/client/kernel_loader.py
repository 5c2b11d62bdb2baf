"""The kernel comes to a program that watches: in the background, once enough was read to be worth it.

Loading the compiled code takes about a second, and compiling it some twenty, once for an installation. A stream begins
with the plain stages, which give the same events, and goes over to the kernel when that is ready; one on which little
happens never loads it. The compiling is another process's work, so that it does not hold this one up.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import zlib
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from tailrace import kernel

#: Oplog read by all streams until the kernel is asked for: what the plain stages do in some ten milliseconds.
BYTES_MIN: Final = 1 << 18

_MODULES: Final = ("tailrace.kernel.reply", "tailrace.kernel.fast_path")
_COMPILE: Final = f"import os, sys; os.nice(5); sys.path[:] = sys.argv[1:]; import {', '.join(_MODULES)}"

_log = logging.getLogger("tailrace.client")


class _KernelLoader:
    """Loads once. ``ready`` and ``missing`` (there is no numba) are read without a lock."""

    def __init__(self) -> None:
        self.ready = False
        self.missing = False
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._compiling: subprocess.Popen[bytes] | None = None
        self._ending = False
        self._lock = threading.Lock()

    def read(self, size: int) -> None:
        """So many bytes were read."""
        with self._lock:
            self._bytes += size
            if self._thread is None and self._bytes >= BYTES_MIN:
                self._thread = threading.Thread(target=self._load, name="tailrace-kernel", daemon=True)
                self._thread.start()
                atexit.register(self._end)

    def _load(self) -> None:
        try:
            if not kernel.available():
                self.missing = True
                _log.warning(
                    "numba cannot be imported, so change events are made in plain Python: the same events, at about a "
                    "twentieth of the speed. Install the numba and numpy that tailrace names (pip install --upgrade "
                    "tailrace), for a version of Python that numba supports"
                )
                return
            stamp = _stamp()
            if stamp is not None and not stamp.exists():
                self._compile(stamp)
            if not self._ending:
                for module in _MODULES:
                    import_module(module)
                self.ready = True
        except Exception:  # noqa: BLE001  the plain stages go on; nobody else would hear of it
            _log.warning("the compiled code cannot be loaded, so change events are made in plain Python", exc_info=True)

    def _compile(self, stamp: Path) -> None:
        """Fill the cache of compiled code. Where that fails, this process compiles for itself."""
        command = [sys.executable, "-c", _COMPILE, *sys.path]
        with self._lock:
            if self._ending:
                return
            self._compiling = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        if self._compiling.wait() == 0:
            with suppress(OSError):
                stamp.parent.mkdir(parents=True, exist_ok=True)
                stamp.touch()

    def _end(self) -> None:
        """The program ends: wait for an import that is under way, since nothing may run in the middle of one then."""
        with self._lock:
            self._ending = True
            if self._compiling is not None and self._compiling.poll() is None:
                self._compiling.terminate()
        if self._thread is not None:
            self._thread.join()


_loader = _KernelLoader()


def is_ready(size: int) -> bool:
    """Whether the kernel may work on a batch of ``size`` bytes. Where it is not loaded yet, that is begun when enough
    was read."""
    if not _loader.ready and size:
        _loader.read(size)
    return _loader.ready


def is_missing() -> bool:
    """Whether it was found that there is no numba, so that the plain stages do everything."""
    return _loader.missing


def _stamp() -> Path | None:
    """The file that says that the compiled code of this installation is in its cache; ``None`` where no other process
    can fill the cache for this one."""
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
