"""How the kernel comes to be: only on first use, from the cache where it can, and not at all where numba is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tailrace
from tailrace.watch.client import kernel_loader

HITS = (
    "from tailrace.core.kernel import transform, columns, variant;"
    "points = transform.frame, transform.transform, columns.locate, columns.gather, columns.is_utf8, variant.encode;"
    "print(sum(sum(point.stats.cache_hits.values()) for point in points))"
)
EVENT = (
    "from tailrace.core.kernel import transform_batch, KernelSettings;"
    "from tailrace.core.oplog.namespace import Scope;"
    "print(transform_batch(b'x', KernelSettings(Scope.cluster())).kind.tolist())"
)


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_neither_numba_nor_numpy() -> None:
    assert (
        python("import sys, tailrace.core.kernel; print('numba' in sys.modules, 'numpy' in sys.modules)")
        == "False False"
    )


def test_without_numba_the_kernel_says_that_it_is_not_available() -> None:
    hidden = "import sys; sys.modules['numba'] = None; import tailrace.core.kernel as k; print(k.available())"
    assert python(hidden) == "False"
    assert python("import tailrace.core.kernel as k; print(k.available())") == "True"


def test_a_name_that_the_package_does_not_have_is_an_attribute_error() -> None:
    import tailrace.core.kernel

    with pytest.raises(AttributeError, match="no attribute 'transmogrify'"):
        _ = tailrace.core.kernel.transmogrify


WRITERS = "; print(*(name for name in ('variant', 'extended_json') if f'tailrace.core.kernel.{name}' in sys.modules))"


@pytest.mark.parametrize(
    ("code", "writers"),
    [
        ("".join(f"; import {module}" for module in kernel_loader._MODULES), ""),
        ("; from tailrace.core.kernel import gather, locate, process_batch", ""),
        ("; from tailrace.core.kernel import encode_variants", "variant"),
        ("; from tailrace.core.kernel import encode_json", "extended_json"),
    ],
    ids=["watch", "events", "variants", "json"],
)
def test_nobody_waits_for_compiled_code_of_columns_that_he_does_not_ask_for(code: str, writers: str) -> None:
    """No test had looked at what is compiled for whom: every ``watch()`` waited for the writers of JSON and VARIANT."""
    assert python("import sys" + code + WRITERS) == writers


@pytest.mark.slow
def test_the_second_process_finds_all_compiled_code_in_the_cache(tmp_path: Path) -> None:
    assert python(HITS, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
    assert python(HITS, NUMBA_CACHE_DIR=str(tmp_path)) == "6"


@pytest.mark.slow
def test_where_no_cache_can_be_written_each_process_compiles_for_itself() -> None:
    nowhere = "import numba.core.caching as c; c.CacheImpl._locator_classes = [];"
    assert python(nowhere + EVENT) == "[2]"


RUNS = "from tailrace.core.kernel.runs import copy_runs; print(sum(copy_runs.stats.cache_hits.values()))"


def test_a_damaged_cache_counts_as_empty(tmp_path: Path) -> None:
    """Every process failed until somebody deleted the cache: no test had damaged one."""
    assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
    for pattern in ("*.nbi", "*.nbc"):
        for file in tmp_path.rglob(pattern):
            os.truncate(file, 500)
        assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "0", pattern
    assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "1", "what was compiled again is kept"


def test_a_damaged_cache_that_cannot_be_mended_does_not_stop_a_process(tmp_path: Path) -> None:
    fails = "import numba.core.caching as c; c.IndexDataCacheFile._save_index = lambda *_: 1 / 0;"
    assert python(fails + RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "0"


def test_a_package_in_a_zip_file_is_compiled_once_wherever_the_file_lies(tmp_path: Path) -> None:
    """Spark puts --py-files into another directory for each application, and all was compiled anew: the tests of it had
    one run each, and called what took three minutes a slow machine."""
    source = Path(tailrace.__file__).parent
    hits = (
        "from tailrace.core.kernel import zip_cache; zip_cache.keep_by_source();"
        "from tailrace.core.kernel import runs;"
        "points = [each for each in vars(runs).values() if hasattr(each, 'stats')];"
        "print(runs.__file__, len(points), sum(sum(point.stats.cache_hits.values()) for point in points))"
    )
    for run, expected in enumerate((0, 1)):
        target = tmp_path / str(run) / "tailrace.zip"
        target.parent.mkdir()
        with zipfile.ZipFile(target, "w") as archive:
            for path in source.rglob("*.py"):
                archive.write(path, path.relative_to(source.parent))
        found = python(
            f"import sys; sys.path.insert(0, {str(target)!r}); {hits}", NUMBA_CACHE_DIR=str(tmp_path / "cache")
        )
        assert found == f"{target}/tailrace/core/kernel/runs.py 1 {expected}"
