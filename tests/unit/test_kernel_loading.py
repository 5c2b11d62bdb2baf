"""How the kernel is loaded: only on first use, from the cache if possible, and not at all if numba is missing."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tailrace
from tailrace.core.kernel import native, transform
from tailrace.watch.client import kernel_loader

EVENT = (
    "from tailrace.core.kernel import transform_batch, KernelSettings;"
    "from tailrace.core.oplog.namespace import Scope;"
    "print(transform_batch(b'x', KernelSettings(Scope.cluster())).kind.tolist())"
)
#: From there on numba compiles.
NONE = "from tailrace.core.kernel import native; native.use(None);"


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


def test_with_the_library_numba_is_not_needed() -> None:
    hidden = "import sys; sys.modules['numba'] = None; import tailrace.core.kernel as k;"
    assert python(f"{hidden} k.warm_up(); print(k.available(), k.comes_compiled());{EVENT}") == "True True\n[2]"
    assert python(f"{hidden}{NONE} print(k.available(), k.comes_compiled())") == "False False"
    assert python(f"import tailrace.core.kernel as k;{NONE} print(k.available(), k.comes_compiled())") == "True False"


def test_what_is_changed_is_compiled_anew(tmp_path: Path) -> None:
    """The library names the source that it was made from, so that nobody who changes the kernel runs the old code."""
    package = Path(shutil.copytree(Path(tailrace.__file__).parent, tmp_path / "tailrace"))
    look = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tailrace.core.kernel as k;"
    assert python(f"{look} print(k.__file__, k.comes_compiled())") == f"{package}/core/kernel/__init__.py True"
    with (package / "core/kernel/scan.py").open("a") as source:
        source.write("\n# changed\n")
    assert python(f"{look} print(k.comes_compiled())") == "False"


def test_a_module_that_no_machine_code_depends_on_may_change(tmp_path: Path) -> None:
    """The checksum of the whole source is then different, so that of each entry point is compared."""
    package = Path(shutil.copytree(Path(tailrace.__file__).parent, tmp_path / "tailrace"))
    with (package / "core/kernel/steps.py").open("a") as source:
        source.write("\n# changed\n")
    look = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tailrace.core.kernel as k;"
    assert python(f"{look} print(k.comes_compiled())") == "True"
    whole = "from tailrace.core.kernel import native as n; print(n.library()._source == n.checksum_of_all())"
    assert python(f"{look} {whole}") == "False"
    assert python(whole) == "True", "which is what every other process asks"


def test_a_new_module_with_an_entry_point_is_compiled_too(tmp_path: Path) -> None:
    """The library has nothing for it, while everything that it has is of this source: the new module could not be
    imported."""
    package = Path(shutil.copytree(Path(tailrace.__file__).parent, tmp_path / "tailrace"))
    new = (package / "core/kernel/runs.py").read_text()
    (package / "core/kernel/added.py").write_text(new)
    look = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tailrace.core.kernel as k;"
    assert python(f"{look} print(k.comes_compiled())") == "False"


@pytest.mark.parametrize("harm", ["cut", "altered", "empty", "text", "other", "gone"])
def test_a_library_that_cannot_be_loaded_counts_as_none(tmp_path: Path, harm: str) -> None:
    """Loading a truncated library kills the process."""
    package = Path(shutil.copytree(Path(tailrace.__file__).parent, tmp_path / "tailrace"))
    library = package / "core/kernel" / native.FILE
    if harm == "gone":
        library.unlink()
    elif harm == "other":
        shutil.copy(_ctypes.__file__, library)
    else:
        content = library.read_bytes()
        altered = content[:9000] + bytes([content[9000] ^ 1]) + content[9001:]
        library.write_bytes({"cut": content[:3000], "altered": altered, "empty": b"", "text": b"no library\n"}[harm])
    look = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tailrace.core.kernel as k;"
    assert python(f"{look} print(k.comes_compiled())") == "False"


def test_what_python_would_have_raised_is_an_error() -> None:
    """An entry point returns a number; the one for a failure is neither an address nor a length."""
    with pytest.raises(ArithmeticError, match="tailrace_transform_transform failed in compiled code"):
        native._checked(native.FAILED, native.library().entry_point(transform.__name__, "transform"), ())


def test_the_library_needs_nothing_but_memcpy_and_memmove() -> None:
    """One wheel serves every Linux of an architecture: with SSE2 only, it would have needed ``floor`` from another
    library."""
    listed = subprocess.run(["nm", "--dynamic", native.library().path], check=True, capture_output=True, text=True)
    wanted = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if " U " in line}
    assert wanted == {"memcpy", "memmove"}


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
    """Every ``watch()`` waited for the writers of JSON and VARIANT: no test had checked what is compiled for whom."""
    assert python("import sys" + code + WRITERS) == writers


RUNS = f"{NONE}from tailrace.core.kernel.runs import copy_runs; print(sum(copy_runs.stats.cache_hits.values()))"


@pytest.mark.long
def test_the_second_process_finds_what_numba_compiled_in_the_cache(tmp_path: Path) -> None:
    assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
    assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "1"


@pytest.mark.slow
def test_where_no_cache_can_be_written_each_process_compiles_for_itself() -> None:
    nowhere = "import numba.core.caching as c; c.CacheImpl._locator_classes = [];"
    assert python(NONE + nowhere + EVENT) == "[2]"


@pytest.mark.long
def test_a_damaged_cache_counts_as_empty(tmp_path: Path) -> None:
    """Every process failed until somebody deleted the cache: no test had damaged one."""
    assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
    for pattern in ("*.nbi", "*.nbc"):
        for file in tmp_path.rglob(pattern):
            os.truncate(file, 500)
        assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "0", pattern
    assert python(RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "1", "what was compiled again is kept"


@pytest.mark.long
def test_a_damaged_cache_that_cannot_be_mended_does_not_stop_a_process(tmp_path: Path) -> None:
    fails = "import numba.core.caching as c; c.IndexDataCacheFile._save_index = lambda *_: 1 / 0;"
    assert python(fails + RUNS, NUMBA_CACHE_DIR=str(tmp_path)) == "0"


def test_a_package_in_a_zip_file_takes_the_library_from_there(tmp_path: Path) -> None:
    """Spark puts --py-files into a new directory for each application, and everything was compiled again."""
    source = Path(tailrace.__file__).parent
    target = tmp_path / "tailrace.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for path in (*source.rglob("*.py"), *source.rglob(native.FILE)):
            archive.write(path, path.relative_to(source.parent))
    look = f"import sys; sys.path.insert(0, {str(target)!r}); import tailrace.core.kernel as k;"
    assert python(f"{look} print(k.comes_compiled())") == "False", "no system loads a library from a zip file"
    worker = "import tailrace.lake.spark.reading;"
    assert python(f"{look}{worker} print(k.comes_compiled(), k.__file__.startswith({str(target)!r}));{EVENT}") == (
        "True True\n[2]"
    )
