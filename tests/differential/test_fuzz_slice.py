"""A short slice of the differential fuzzing: the long version is ``make fuzz``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amounts import amount
from tests.differential.fuzz import Totals, run_seed, server
from tests.differential.workload import Workload
from tests.server_in_use import SERVER_VERSION

pytestmark = pytest.mark.mongod

_OPERATIONS = amount(80, 250)
_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "seed", "matches", "archived"),
    [
        pytest.param(SERVER_VERSION, 101, 0, False, marks=pytest.mark.slow),
        (SERVER_VERSION, 102, 0, True),
        pytest.param(SERVER_VERSION, 103, 2, False, marks=pytest.mark.slow),
        pytest.param("5.0.4", 104, 1, False, marks=pytest.mark.slow),
        ("4.4.2", 105, 1, True),
    ],
)
def test_every_stream_of_a_random_workload_is_the_servers(
    tmp_path: Path, version: str, seed: int, matches: int, archived: bool
) -> None:
    totals = Totals()
    archive = tmp_path / "archive" if archived else None
    with server(version) as sides:
        run_seed(*sides, totals, seed=seed, ops=_OPERATIONS, matches=matches, version=version, archive=archive)
    assert not totals.differences, "\n\n".join(totals.differences[:3])
    assert totals.streams >= 40
    assert totals.events >= amount(400, 2000)


def test_the_same_seed_gives_the_same_operations() -> None:
    assert _operations(5) == _operations(5)
    assert _operations(5) != _operations(6)


def _operations(seed: int) -> list[str]:
    """The operations in words, without the session: it is new in every run, so that a replay on the same server is not
    taken for a retry."""
    return [re.sub(r"'lsid': \{'id': Binary\(.*?, 4\)\}", "", repr(one)) for one in Workload(seed).operations(300)]


_WITHOUT = """
from tailrace.core import kernel
from tests.differential.kernel_choice import kernel_use
with kernel_use("off") as worked:
    print(kernel.available(), worked)
print(kernel.available())
"""


def test_a_run_without_the_kernel_finds_no_numba() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, cwd=_ROOT)
    assert done.stdout.splitlines() == ["False kernel off, 0 batches through it", "True"]
