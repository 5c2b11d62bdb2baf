"""Makes, before the tests, what a new checkout lacks and each of their processes would make for itself.

    python -m tests.prepare            for all tests
    python -m tests.prepare --offline  for those that need no server and no Spark

The kernel's machine code: compiling it takes 30 s of processor, and every process that reads enough, each gateway and
each command begins to compile while there is none. The archive of Java's classes. The tests' own bytecode, with
pytest's assertions in it: 10 s for each process that collects them. None of it is needed, so what fails here is passed
over: the test of the same thing says why.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_KERNEL = (
    "from tailrace.core import kernel; from tailrace.watch.client.kernel_loader import _loader;"
    "_loader.prepare(); _loader.join(); kernel.warm_up()"
)


def main() -> None:
    commands = [["-c", _KERNEL]]
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
