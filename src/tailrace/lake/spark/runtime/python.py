"""Which Python runs Spark's workers: this one, started so that it loads PySpark from where it is installed, or forked.

Spark puts its sources as a zip file before everything else on its processes' ``PYTHONPATH``, and Python compiles what
it loads from a zip again each time: 0.7 s of CPU for each process that a query starts, where the same files from
``site-packages`` take 0.15 s (measured, PySpark 4.3, two cores). Where PySpark is an installed package the zip holds
nothing but that package, so the workers are started through a script that leaves it out. Where a fork server runs
next to the session (``fork_server.py``), the script asks it for a process.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Final

import pyspark

from tailrace.base.cache import cached_directory
from tailrace.errors import UsageError
from tailrace.lake.spark.runtime import launcher

_SCRIPT: Final = """#!/bin/sh
# Starts {python} without Spark's zipped copies of installed packages on its path.
set -f
IFS=:
kept=
for entry in $PYTHONPATH; do
    case $entry in
        {lib}/*.zip) ;;
        *) kept=$kept${{kept:+:}}$entry ;;
    esac
done
PYTHONPATH=$kept
export PYTHONPATH
if [ "$1" = -m ] && [ -n "${variable}" ] && [ -S "${variable}" ]; then
    exec {python} -I -S {launcher} "$@"
fi
exec {python} "$@"
"""


def worker_python() -> str:
    """The path of the program that Spark is to start its Python processes with."""
    lib = Path(pyspark.__file__).parent / "python" / "lib"
    if not (lib / "pyspark.zip").is_file() or "site-packages" not in lib.parts:
        return sys.executable  # a Spark distribution: its zip may be the only PySpark there is
    script = _SCRIPT.format(
        python=shlex.quote(sys.executable),
        lib=shlex.quote(str(lib)),
        variable=launcher.SOCKET,
        launcher=shlex.quote(str(Path(launcher.__file__).resolve())),
    )

    def fill(directory: Path) -> None:
        program = directory / "python3"
        program.write_text(script)
        program.chmod(0o755)

    def usable(directory: Path) -> bool:
        program = directory / "python3"
        return program.is_file() and program.read_text() == script

    name = re.sub(r"\W+", "-", sys.executable).strip("-")
    try:
        program = cached_directory(f"python/{name}", fill, usable=usable) / "python3"
    except UsageError:
        return sys.executable
    return str(program) if os.access(program, os.X_OK) else sys.executable
