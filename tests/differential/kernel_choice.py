"""How a fuzz run uses the kernel: where it pays (``auto``), for each batch however small (``on``), or not at all, as if
numba could not be imported (``off``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import pytest

from tailrace.core import kernel
from tailrace.core.kernel import native
from tailrace.core.stream import kernel_choice as pipeline_kernel
from tailrace.watch.client import kernel_loader

CHOICES: Final = ("auto", "on", "off")


@dataclass
class Worked:
    """How many batches the kernel was given."""

    choice: str
    batches: int = 0

    def __str__(self) -> str:
        return f"kernel {self.choice}, {self.batches} batches through it"


@contextmanager
def kernel_use(choice: str) -> Iterator[Worked]:
    """Let everything in the block use the kernel in this way."""
    worked = Worked(choice)

    def counted(*arguments: Any) -> Any:
        worked.batches += 1
        return import_module("tailrace.core.kernel.fast_path").process_batch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if choice == "off":
            if "tailrace.core.kernel.compiled" in sys.modules:
                raise RuntimeError("The kernel is loaded already. Start a new process.")
            patch.setitem(sys.modules, "numba", None)
            native.use(None)
        else:
            patch.setattr(kernel, "process_batch", counted, raising=False)
        if choice == "on":
            kernel.warm_up()
            patch.setattr(pipeline_kernel, "KERNEL_BYTES_MIN", 0)
            patch.setattr(kernel_loader._loader, "ready", True)
        pipeline_kernel._available.cache_clear()
        yield worked
    pipeline_kernel._available.cache_clear()
