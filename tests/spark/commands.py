"""``tailrace`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

PATIENCE_S = 300


def tailrace(*arguments: str, own_group: bool = False, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from tailrace.cli.main import main; raise SystemExit(main())", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,  # so that a test can kill Spark's JVM and its workers with it
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err
