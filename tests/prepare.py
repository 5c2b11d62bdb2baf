"""Makes, before the tests, what a new checkout lacks and each of their processes would make for itself.

    python -m tests.prepare            for all tests
    python -m tests.prepare --offline  for those that need no server and no Spark

The kernel's machine code, where its source has changed since it was built: compiling takes 30 s of processor, and every
process that reads enough would begin to. The archive of Java's classes. The tests' own bytecode, with pytest's
assertions in it: 10 s for each process that collects them. None of it is needed, so what fails here is passed over: the
test of the same thing says why.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_KERNEL = [str(_ROOT / "build_kernel.py"), str(_ROOT / "src/tailrace/core/kernel/libkernel.so.1")]


def main() -> None:
    commands = [_KERNEL]
    if "--offline" not in sys.argv[1:]:
        commands.append(["-m", "tests.spark.class_data"])
    if not list((Path(__file__).parent / "__pycache__").glob("conftest.*-pytest-*.pyc")):
        commands.append(["-m", "pytest", "--collect-only", "-qq"])
    quiet = subprocess.DEVNULL
    running = [subprocess.Popen([sys.executable, *command], stdout=quiet, stderr=quiet) for command in commands]
    for process in running:
        process.wait()


if __name__ == "__main__":
    main()
