"""A process of the demo, ``python -m tailrace.demo.child shop ...`` or ``... run FILE``. It ends with its parent."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Do what the arguments say, and get SIGTERM when the demo's own process dies, however it dies."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if sys.argv[1] == "shop":
        from tailrace.demo.shop import main as shop  # noqa: PLC0415  the shop needs no Spark

        return shop(sys.argv[2:])
    from tailrace.cli.main import main as tailrace  # noqa: PLC0415

    return tailrace()


if __name__ == "__main__":
    raise SystemExit(main())
