"""A process of the demo, ``python -m tailrace.demo.child shop ...`` or ``... run FILE``. It ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Do what the arguments say, and get SIGTERM when the demo's own process dies, however it dies."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if sys.argv[1] != "shop":
        os.execv(sys.executable, [sys.executable, "-m", "tailrace", *sys.argv[1:]])  # the request above outlives this
    from tailrace.demo.shop import main as shop  # noqa: PLC0415  the command needs no shop

    return shop(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
