"""Build what is published, and test it as its users will use it: ``make dist``.

1. A source distribution is built from the files that git has, and a wheel from the source distribution.
2. Their contents are checked; ``twine`` checks their metadata; the manifests of ``deploy/kubernetes`` are checked
   against Kubernetes' own schemas.
3. In a clean environment for each Python that is found, the wheel is installed and ``smoke.py`` is run: without extras,
   and with the lowest PyMongo that is allowed. Each extra is resolved.
4. Two bills of materials (CycloneDX) are written: one for the gateway's container, one for a bare installation.

All of it is put into ``dist/``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SMOKE = ROOT / "release" / "smoke.py"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
KUBERNETES = "1.33"
#: What a source distribution needs so that others can test and change it; what a wheel needs, and what it may not have.
IN_SOURCES = ("Makefile", "requirements.lock", "CHANGELOG.md", "docs/index.md", "tests/conftest.py", "build_kernel.py")
IN_WHEEL = ("tailrace/py.typed", "tailrace/core/kernel/libkernel.so.1", "pyspark_tailrace/__init__.py")
NOT_IN_WHEEL = re.compile(r"^(tests|docs|bench|release|deploy)/|\.pyc$|__pycache__|\.lock$")
#: A published file may not hold a path of one machine.
OF_A_MACHINE = re.compile(rb"/home/\w+/|/root/")


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def run(*words: str | Path, cwd: Path | None = None, quiet: bool = True, env: dict[str, str] | None = None) -> str:
    """Run a command; its output is shown if it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(map(str, words))} ended with {done.returncode}")
    if not quiet:
        print(done.stdout.strip(), flush=True)
    return done.stdout


def project() -> dict[str, object]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert isinstance(found, dict)
    return found


def build(*, dirty: bool) -> tuple[Path, Path]:
    """The source distribution and the wheel of what is committed (``dirty``: with uncommitted changes too)."""
    changed = run("git", "status", "--porcelain", cwd=ROOT).strip()
    if changed and not dirty:
        raise SystemExit(f"These changes are not committed; --dirty includes them:\n{changed}")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        for name in run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0"):
            if name and (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
        # The kernel must be compiled: a wheel without it is of no use to anybody.
        run(sys.executable, "-m", "build", "--outdir", DIST, tree, env={
            "TAILRACE_KERNEL": "required", "SOURCE_DATE_EPOCH": epoch,
        })  # fmt: skip
    (sources,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sources, wheel


def check_sources(path: Path) -> None:
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    missing = [name for name in IN_SOURCES if name not in names]
    if missing:
        raise SystemExit(f"{path.name} lacks {', '.join(missing)}")
    tracked = set(run("git", "ls-files", "-z", cwd=ROOT).split("\0")) - {""}
    left_out = sorted(name for name in tracked - names if not name.startswith("."))
    if left_out:
        raise SystemExit(f"{path.name} lacks {len(left_out)} files that git has: {', '.join(left_out[:5])}, ...")


def check_wheel(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        strange = [name for name in names if NOT_IN_WHEEL.search(name)]
        missing = [name for name in IN_WHEEL if name not in names]
        private = [name for name in names if OF_A_MACHINE.search(archive.read(name))]
    if strange or missing or private:
        raise SystemExit(f"{path.name}: unexpected {strange[:5]}, missing {missing}, local paths {private[:5]}")


def check_manifests() -> None:
    """Check the manifests against Kubernetes' own schemas: unknown fields fail."""
    files = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    tool = Path(sys.executable).with_name("kubernetes-validate")
    run(tool, "--strict", "--kubernetes-version", KUBERNETES, *files)
    print(f"{len(files)} manifest files are valid for Kubernetes {KUBERNETES}")


def pythons() -> Iterator[tuple[str, Path]]:
    """Each version of Python that can be found, and its path."""
    known = Path.home() / ".pyenv" / "versions"
    for version in PYTHONS:
        places = [shutil.which(f"python{version}"), *map(str, sorted(known.glob(f"{version}.*/bin/python3")))]
        for place in filter(None, places):
            asked = subprocess.run(
                [place, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if asked.stdout.strip() == version:
                yield version, Path(place)
                break
        else:
            print(f"Python {version} was not found here: not tested")


def environment(python: Path, directory: Path) -> Path:
    """Make a clean environment, and give the path of its Python."""
    run(python, "-m", "venv", directory)
    return directory / "bin" / "python"


def try_wheel(wheel: Path, scratch: Path) -> Path:
    """Install and use the wheel with each Python, and give the Python of the last environment."""
    tried: Path | None = None
    lowest = next(re.sub(r"^pymongo>=([\d.]+).*", r"\1", str(one)) for one in _dependencies() if "pymongo" in one)
    for version, python in pythons():
        inside = environment(python, scratch / version)
        run(inside, "-m", "pip", "install", "--quiet", wheel)
        run(inside, SMOKE, "--compiled", quiet=False)
        for extra in _extras():
            run(inside, "-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[{extra}]")
        run(inside, "-m", "pip", "install", "--quiet", f"pymongo=={lowest}")
        run(inside, SMOKE, quiet=False)
        run(inside, "-m", "pip", "install", "--quiet", "--upgrade", wheel, "pymongo<5")
        tried = inside
    if tried is None:
        raise SystemExit("no Python was found to test the wheel with")
    return tried


def _dependencies() -> list[str]:
    found = project()["dependencies"]
    assert isinstance(found, list)
    return found


def _extras() -> list[str]:
    found = project()["optional-dependencies"]
    assert isinstance(found, dict)
    return sorted(set(found) - {"dev"})


def bills(wheel: Path, python: Path, scratch: Path) -> None:
    """Write the CycloneDX bills of materials."""
    tool, name = Path(sys.executable).with_name("cyclonedx-py"), wheel.name.split("-py3")[0]
    gateway = environment(python, scratch / "container")
    lock = ROOT / "deploy" / "container" / "gateway.lock"
    run(gateway, "-m", "pip", "install", "--quiet", "--require-hashes", "--requirement", lock)
    run(gateway, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    run(gateway, "-m", "pip", "check")
    for what, inside in (("bare", python), ("gateway", gateway)):
        run(inside, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
        options = ("--output-reproducible", "--of", "JSON", "-o", DIST / f"{name}-{what}.cdx.json")
        run(tool, "environment", "--pyproject", ROOT / "pyproject.toml", *options, inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirty", action="store_true", help="include uncommitted changes")
    wanted = parser.parse_args()
    say("build")
    sources, wheel = build(dirty=wanted.dirty)
    say("check")
    check_sources(sources)
    check_wheel(wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", sources, wheel, quiet=False)
    check_manifests()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        say("try")
        python = try_wheel(wheel, scratch)
        say("bills of materials")
        bills(wheel, python, scratch)
    say("made")
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
