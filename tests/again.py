"""``make test`` and ``make test-landing`` try what failed once more, alone: ``python -m tests.again``.

Six test processes on two cores sometimes starve a server or a time-out that a test depends on. If a few tests fail and
then pass alone, they are listed and do not fail the run; a fault of the code fails again. More failures than a few are
no accident of the machine, and are not tried again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

#: Written by tests/conftest.py at the end of each run: the tests that failed in it.
FAILED = Path(".pytest_cache/v/tailrace/failed")
MOST = 6


def main() -> int:
    """The exit status: 0 if each test that failed in the run before passes alone, in one process."""
    failed = json.loads(FAILED.read_text()) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        return 1
    names = "\n  ".join(failed)
    print(f"\nFailed among the others, and tried once more alone:\n  {names}\n", flush=True)
    FAILED.unlink()
    status = subprocess.run([sys.executable, "-m", "pytest", *failed], check=False).returncode
    if status == 0:
        print(f"Failed among the others and passed alone; look at why:\n  {names}")
    return status


if __name__ == "__main__":
    sys.exit(main())
