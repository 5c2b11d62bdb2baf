"""The kernel comes to a program that watches once enough was read to be worth it.

Loading it takes well under a second, in the thread that reads: next to a thread that is busy making events the same
imports take ten seconds (measured), since each gives up the interpreter's lock many times. The first reply always goes
through the plain stages, so that a stream's first event does not wait for it. A stream on which little happens never
loads the kernel.

Where the compiled code did not come with the installation, numba makes it, in a thread, unless its cache has it: half a
minute of work, in which the plain stages give the same events.
"""

from __future__ import annotations

import logging
import os
import threading
from importlib import import_module
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
_HEAD_BYTES: Final = 1 << 13

_MODULES: Final = tuple(
    f"tailrace.core.kernel.{name}" for name in ("reply", "look_up", "entry_index", "fast_path", "merge")
)

_log = logging.getLogger("tailrace.client")


class _KernelLoader:
    """Loads once. ``ready`` and ``missing`` (there is no compiled code, and no numba) are read without a lock."""

    def __init__(self) -> None:
        self.ready = False
        self.missing = False
        self._bytes = 0
        self._begun = False
        self._compiling: threading.Thread | None = None
        self._lock = threading.Lock()

    def read(self, size: int) -> None:
        """Note that ``size`` bytes were read. All that was read so far decides whether the kernel is worth loading."""
        with self._lock:
            is_due = self._bytes > 0 and self._bytes + size >= BYTES_MIN and not self._begun
            self._begun |= is_due
            self._bytes += size
        if is_due:
            self._begin()

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
        if self._compiling is not None:
            self._compiling.join()

    def _begin(self) -> None:
        if not kernel.available():
            self.missing = True
            _log.warning(
                "there is no compiled code for this machine, so change events are made in plain Python: the same "
                "events, at about a twentieth of the speed. Install a wheel of tailrace that fits the machine, or "
                "numba, which makes the code (pip install 'tailrace[jit]')"
            )
        elif kernel.comes_compiled():
            self._load()
        else:
            self._compiling = threading.Thread(target=self._load, name="tailrace-kernel", daemon=True)
            self._compiling.start()

    def _load(self) -> None:
        try:
            for module in _MODULES:
                import_module(module)
            self.ready = True
        except Exception:  # noqa: BLE001  the plain stages go on; nobody else would hear of it
            _log.warning("the compiled code cannot be loaded, so change events are made in plain Python", exc_info=True)


_loader = _KernelLoader()


def works_on(size: int) -> bool:
    """Whether the kernel is to make the events of a batch of ``size`` bytes; also notes that this many were read. With
    0, before a merge: whether it is loaded."""
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
    """Load the kernel now, or begin to compile it. For a service that starts: later, beside
    a thread that serves, loading takes many seconds, during which that thread makes hardly any progress."""
    _loader.prepare()


def is_missing() -> bool:
    """Whether it was found that there is no compiled code and no numba, so that the plain stages do everything."""
    return _loader.missing


def _after_fork() -> None:
    """A forked child has none of its parent's threads."""
    global _loader  # noqa: PLW0603  one for each process
    ready = _loader.ready
    _loader = _KernelLoader()
    _loader.ready = ready


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
