"""Where mutants are planted, and which tests decide about them.

Only tests that need no server decide, so that a mutant costs about a second. The kernel is off in them
(``TAILRACE_TESTS=quick``): it would do the work of the plain stages, which are what is altered.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "tailrace"
PLACES: Final = ("core/stage", "core/plan", "core/event", "act/consumer/rules")

#: All files of ``unit`` and ``property`` decide, except those about other places: kernel, lake, Spark, commands.
_ELSEWHERE: Final = (
    "test_archive", "test_cli", "test_commands", "test_compiled", "test_copy_progress", "test_dump", "test_file_system",
    "test_full_disks", "test_gateway", "test_group_commit", "test_health_of_commands", "test_image", "test_kernel",
    "test_lake", "test_lmdb", "test_local_path", "test_metrics", "test_pipeline_file", "test_power", "test_private",
    "test_process_group", "test_server_in_use", "test_service", "test_sinks", "test_source_uri", "test_spark",
    "test_sync", "test_tables", "test_threads", "test_typed_columns", "test_waits_for_wine", "test_worker_memory",
)  # fmt: skip
_OTHERS: Final = (
    "golden/test_captures.py",
    "golden/test_cluster_cursor.py",
    "golden/test_cursor_replies.py",
    "golden/test_recordings.py",
    "golden/test_sharded_recordings.py",
    "golden/test_tokens.py",
    "simulation/test_lanes_simulation.py",
    "simulation/test_operator_simulation.py",
    "simulation/test_simulation.py",
)
#: The simulation's tests that must find other planted faults: each plays a thousand seeds if it does not find its
#: fault.
DESELECTED: Final = ("planted", "a_seed_plays_the_same_run_again", "(simulation and found)")


#: With ``--tests``: these and no others.
_chosen: list[Path] = []


def choose(files: list[Path]) -> None:
    """Let these files decide alone."""
    _chosen[:] = [file.resolve() for file in files]


def deciding_files() -> list[Path]:
    """Of the tests that decide."""
    if _chosen:
        return _chosen
    tests = ROOT / "tests"
    near = [path for folder in ("unit", "property") for path in sorted((tests / folder).glob("test_*.py"))]
    return [path for path in near if not path.name.startswith(_ELSEWHERE)] + [tests / name for name in _OTHERS]


def modules(places: tuple[str, ...] = PLACES) -> dict[str, Path]:
    """The modules of some places by their names without the package's: ``core.stage.transform``."""
    paths = (path for place in places for path in sorted((SOURCE / place).glob("*.py")))
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in paths if path.stem != "__init__"}


def place_of(module: str) -> str:
    return next(place for place in PLACES if module.startswith(place.replace("/", ".") + "."))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
