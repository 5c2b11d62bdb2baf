"""The shop as a process of the demo's."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from typing import Any

from tailrace.demo.pipeline_process import start_child
from tailrace.errors import TailraceError


def open_shop(uri: str, stack: ExitStack, *, seconds: float | None, rate: float, seed: int) -> subprocess.Popen[bytes]:
    """Start a shop on a deployment and let it fill its shelves; it ends with ``stack``. ``rate``: operations a second,
    for ``seconds`` once its doors are opened (``None``: until it is terminated). Raises TailraceError."""
    arguments = ["shop", "--rate", str(rate), "--seed", str(seed)]
    if seconds is not None:
        arguments += ["--seconds", str(seconds)]
    shop = start_child(arguments, uri, stdout=subprocess.PIPE)
    stack.callback(_end, shop)
    assert shop.stdout is not None
    if not shop.stdout.readline():
        raise TailraceError("the shop could not open: its process ended at once")
    return shop


def open_doors(shop: subprocess.Popen[bytes]) -> None:
    """Let it work from now on."""
    assert shop.stdin is not None
    shop.stdin.write(b"go\n")
    shop.stdin.flush()


def words(shop: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the shop's process says at its end, which this waits for: ``seconds`` and ``operations``, by what was done.
    Raises TailraceError where it ends otherwise."""
    assert shop.stdout is not None
    line = shop.stdout.readline()
    if shop.wait() != 0 or not line:
        raise TailraceError(f"the shop ended with exit status {shop.returncode}")
    said: dict[str, Any] = json.loads(line)
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
