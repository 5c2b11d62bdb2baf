"""Build what is published, and test it as its users will use it: ``make dist``.

1. A source distribution is built from the files that git has, and a wheel from the source distribution.
   Where its C compiler is installed (``gcc-aarch64-linux-gnu``), so is the wheel of another machine.
2. Their contents are checked; ``twine`` checks their metadata; the manifests of ``deploy/kubernetes`` are checked
   against Kubernetes' own schemas, and the board of ``deploy/grafana`` against Grafana's.
3. In a clean environment for each Python that is found, the wheel is installed and ``smoke.py`` is run: without extras,
   and with the lowest PyMongo that is allowed. Each extra is resolved.
4. With ``--system``, a directory with a system for another machine or with another Python, ``smoke.py`` is run there
   too, by qemu's emulation where it has to be. ``mmdebstrap --mode=root --variant=apt --architectures=arm64
   --include=python3,libstdc++6 bookworm DIRECTORY`` makes one.
5. Two bills of materials (CycloneDX) are written: one for the gateway's container, one for a bare installation.

All of it is put into ``dist/``. What was not tried, because a tool or a system for it is not here, is named at the end.
"""

from __future__ import annotations

import argparse
import json
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
MACHINES = {"x86_64", "aarch64"}
#: The names of platforms whose wheels of numpy and PyMongo fit a Linux of the last years.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
#: What a source distribution needs so that others can test and change it; what a wheel needs, and what it may not have.
IN_SOURCES = ("Makefile", "requirements.lock", "CHANGELOG.md", "docs/index.md", "tests/conftest.py", "build_kernel.py")
IN_WHEEL = ("tailrace/py.typed", "tailrace/core/kernel/libkernel.so.1", "pyspark_tailrace/__init__.py")
NOT_IN_WHEEL = re.compile(r"^(tests|docs|bench|release|deploy)/|\.pyc$|__pycache__|\.lock$")
#: A published file may not hold a path of one machine.
OF_A_MACHINE = re.compile(rb"/home/\w+/|/root/")


#: What could not be done here, to be told at the end.
SKIPPED: list[str] = []


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


def build(*, dirty: bool) -> tuple[Path, Path, list[Path]]:
    """The source distribution, this machine's wheel and those of others, of what is committed (``dirty``: with
    uncommitted changes too)."""
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
        how = {"TAILRACE_KERNEL": "required", "SOURCE_DATE_EPOCH": epoch}
        run(sys.executable, "-m", "build", "--outdir", DIST, tree, env=how)
        (sources,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
        for machine in sorted(MACHINES - {os.uname().machine}):
            if shutil.which(f"{machine}-linux-gnu-gcc"):
                there = how | {"TAILRACE_KERNEL_FOR": machine}
                run(sys.executable, "-m", "build", "--wheel", "--outdir", DIST, tree, env=there)
            else:
                SKIPPED.append(f"{machine}: no wheel was built, because there is no {machine}-linux-gnu-gcc")
    return sources, wheel, sorted(set(DIST.glob("*.whl")) - {wheel})


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


def check_board() -> None:
    """Read the board by Grafana's typed schemas, those of panels too, and write it again: what the schemas
    do not know, or take for something else, is gone or changed then."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415  in the environment of make dist
    from grafana_foundation_sdk.cog.plugins import register_default_plugins  # noqa: PLC0415
    from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: PLC0415

    register_default_plugins()
    board = json.loads((ROOT / "deploy" / "grafana" / "tailrace.json").read_text())
    unknown = list(_lost(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board))), "board"))
    if unknown:
        raise SystemExit("Grafana's schema has nothing like this:\n" + "\n".join(unknown))
    print(f"{len(board['panels'])} panels are valid for Grafana")


def _lost(before: object, after: object, place: str) -> Iterator[str]:
    """Where ``after`` lacks something of ``before``."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from _lost(value, after.get(name), f"{place}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from _lost(*pair, f"{place}[{number}]")
    elif before != after:
        yield f"{place} is {json.dumps(before)}"


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
            SKIPPED.append(f"Python {version}: no such Python was found, so the wheel was not tried with it")


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


def try_in(system: Path, wheels: list[Path], scratch: Path) -> None:
    """Run ``smoke.py`` with the Python of another system: of another machine, or newer than those of this one."""
    python = next(
        path for path in sorted((system / "usr/bin").glob("python3.*")) if re.fullmatch(r"3\.\d+", path.name[6:])
    )
    version, machine = python.name[6:], _machine_of(python)
    fitting = [wheel for wheel in wheels if wheel.name.endswith(f"_{machine}.whl")]
    if not fitting:
        SKIPPED.append(f"{system}: there is no wheel for {machine}, so Python {version} was not tried there")
        return
    target = scratch / f"{machine}-{version}"
    platforms = [f"--platform={platform}_{machine}" for platform in PLATFORMS]
    needed = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *platforms]
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", target, *needed, fitting[0])
    # The loader and the libraries are the system's. What the kernel starts by qemu finds them by QEMU_LD_PREFIX.
    there = {"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1", "QEMU_LD_PREFIX": str(system)}
    if machine == os.uname().machine:
        shutil.copytree(ROOT / "tests" / "golden" / "data", target / "tests" / "golden" / "data")
        (target / "release").mkdir()
        shutil.copy2(SMOKE, target / "release")
        inside = system / "tailrace"
        inside.mkdir()
        try:
            run("mount", "--bind", target, inside)
            there["PYTHONPATH"] = "/tailrace"
            run(
                "chroot",
                system,
                f"/usr/bin/{python.name}",
                "/tailrace/release/smoke.py",
                "--compiled",
                env=there,
                quiet=False,
            )
        finally:
            run("umount", inside)
            inside.rmdir()
    else:
        run(python, SMOKE, "--compiled", env=there, quiet=False)


def _machine_of(program: Path) -> str:
    """The machine that an ELF file is for."""
    kind = int.from_bytes(program.resolve().read_bytes()[18:20], "little")
    return {0x3E: "x86_64", 0xB7: "aarch64"}[kind]


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
    parser.add_argument("--system", type=Path, action="append", default=[], help="try the wheels there too")
    wanted = parser.parse_args()
    say("build")
    sources, wheel, others = build(dirty=wanted.dirty)
    say("check")
    check_sources(sources)
    for one in (wheel, *others):
        check_wheel(one)
    run(sys.executable, "-m", "twine", "check", "--strict", sources, wheel, *others, quiet=False)
    check_manifests()
    check_board()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        say("try")
        python = try_wheel(wheel, scratch)
        for system in wanted.system:
            try_in(system.resolve(), [wheel, *others], scratch)
        tried = {_machine_of(next((system / "usr/bin").glob("python3.*"))) for system in wanted.system}
        for one in others:
            if not one.name.endswith(tuple(f"_{machine}.whl" for machine in tried)):
                SKIPPED.append(f"{one.name}: it was not tried, because no --system of that machine was named")
        say("bills of materials")
        bills(wheel, python, scratch)
    say("made")
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    for what in SKIPPED:
        print(f"skipped  {what}")


if __name__ == "__main__":
    main()
