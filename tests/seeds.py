"""What the programs that play seeds have in common: which seeds, and how they end."""

from __future__ import annotations

import argparse
import signal
import sys


def parser_of_seeds(module: str, about: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m MODULE``, described by the first line of its docstring, that wants ``--seed N`` or
    ``--seeds A-B``: both give ``seeds``."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(about or "").split("\n")[0])
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seed", type=lambda text: [int(text)], dest="seeds", help="one seed")
    chosen.add_argument("--seeds", type=_range, help="A-B, both included")
    return parser


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def end_in_order() -> None:
    """Let SIGTERM end this process as an exception does, so that what it has started is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
