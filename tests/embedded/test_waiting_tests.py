"""A machine without wine64 runs nothing on 7.0, and `make test` says how many tests wait for it. Nothing had tried what
is said: the line is written by ``tests/conftest.py`` itself, and all machines of the project have wine64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tailrace.embedded import wine

HERE = Path(__file__).parent
#: A pytest of its own, on a machine where no wine64 is found.
WITHOUT_WINE = (
    "import sys, pytest; from tailrace.embedded import wine; wine._LOADERS = ('no wine64 here',);"
    "sys.exit(pytest.main(sys.argv[1:]))"
)


def test_without_wine64_the_number_of_waiting_tests_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WINE, str(HERE / "test_wine.py"), "-q", "-o", f"cache_dir={tmp_path}"],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    progress = done.stdout.splitlines()[0].split()[0]
    waiting = progress.count("s")  # as pytest shows a test that is skipped
    assert waiting >= (HERE / "test_wine.py").read_text().count("\n@pytest.mark.wine\n") > 3
    assert set(progress) == {"s", "."}
    assert f"{waiting} tests wait for wine64, to run on mongod 7.0: {wine.INSTALL}" in done.stdout
