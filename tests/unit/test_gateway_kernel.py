"""A service loads the compiled code before it serves. The gateway used to load it once enough had been read, which
blocked its event loop, and so every stream, for seconds. No test had measured how long an event takes meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tailrace.watch.client import kernel_loader

_PROGRAM = """
from tailrace.watch.client import kernel_loader
kernel_loader.prepare()
kernel_loader._loader.join()
kernel_loader.is_ready(1)  # what another process compiled is loaded with the next batch
print(kernel_loader.is_ready(1))
"""


def test_prepare_loads_the_kernel_though_nothing_was_read() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "True\n", done.stderr


def test_the_kernel_is_begun_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    loader = kernel_loader._KernelLoader()
    monkeypatch.setattr(loader, "_begin", lambda: begun.append(1))
    loader.prepare()
    loader.prepare()
    for _ in range(3):
        loader.read(kernel_loader.BYTES_MIN)
    assert begun == [1]
