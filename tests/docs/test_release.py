"""What is published, as far as it can be checked without building it: ``make dist`` builds it and tries it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.snippets import ROOT


def script(name: str) -> Any:
    """A script of ``release``, as a module."""
    path = ROOT / "release" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"release_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHANGELOG = """# Changes

Words.

## 0.1.0 (not released yet)

### Streams

- New.

## 0.0.9 (2026-01-31)

- Old.
"""


@pytest.fixture
def changelog(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = script("changelog")
    monkeypatch.setattr(module, "project_version", lambda: "0.1.0")
    return module


def test_a_version_is_cut_once(changelog: Any) -> None:
    after = changelog.cut(CHANGELOG, "2026-12-01")
    assert after == CHANGELOG.replace("not released yet", "2026-12-01")
    with pytest.raises(SystemExit, match=r"0.1.0 was cut on 2026-12-01: set the next version"):
        changelog.cut(after, "2026-12-02")


def test_a_tag_that_is_not_the_version_is_refused(changelog: Any) -> None:
    with pytest.raises(SystemExit, match=r"has no date in CHANGELOG\.md"):
        changelog.check(CHANGELOG, "v0.1.0")
    dated = changelog.cut(CHANGELOG, "2026-12-01")
    changelog.check(dated, "v0.1.0")
    for tag in ("0.1.0", "v0.1.1"):
        with pytest.raises(SystemExit, match=f"The tag is {tag}"):
            changelog.check(dated, tag)
    with pytest.raises(SystemExit, match=r"CHANGELOG.md begins with 0.0.9"):
        changelog.check(CHANGELOG[CHANGELOG.index("## 0.0.9") :], "v0.1.0")
    with pytest.raises(SystemExit, match="has no heading"):
        changelog.check("# Changes", "v0.1.0")


def test_the_text_of_a_release_is_its_own_part(changelog: Any) -> None:
    assert changelog.notes(CHANGELOG) == "### Streams\n\n- New.\n"


def test_this_project_s_changelog_begins_with_its_version() -> None:
    module = script("changelog")
    assert module.newest((ROOT / "CHANGELOG.md").read_text())["version"] == module.project_version()


def test_an_image_with_a_wheel_that_is_there_differs_in_one_stage(tmp_path: Path) -> None:
    """What ``make images`` tries is what the Dockerfile builds, but for where the wheel comes from."""
    wheel = tmp_path / "tailrace.whl"
    wheel.write_bytes(b"wheel")
    context, file = script("image").context_with(wheel, tmp_path / "context")
    ours, theirs = (
        re.split(r"(?m)^(?=FROM )", path.read_text()) for path in (ROOT / "deploy/container/Dockerfile", file)
    )
    other = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    assert [pair[0].splitlines()[0] for pair in other] == ["FROM ${PYTHON} AS wheel"]
    assert "COPY wheels /wheels" in other[0][1]
    assert (context / "wheels" / "tailrace.whl").read_bytes() == b"wheel"
    assert (context / "deploy/container/gateway.lock").is_file()


def test_dependencies_are_tried_by_tests_that_are_there() -> None:
    """``make test-dependencies`` names folders: nobody would notice that one is gone until it is called."""
    said = dict(re.findall(r"(?m)^(ON_DEPENDENCIES|ALL_EXTRAS) := (.+)$", (ROOT / "Makefile").read_text()))
    folders = said["ON_DEPENDENCIES"].split()
    assert folders
    assert [name for name in folders if not list((ROOT / "tests" / name).glob("test_*.py"))] == []
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    # The site is tried on its own, and compiling at the first use is for machines that no wheel fits.
    assert set(said["ALL_EXTRAS"].split(",")) == extras - {"docs", "jit"}


def test_what_was_installed_gives_what_the_servers_gave() -> None:
    """Runs the check of ``make dist`` in this environment, and shows that it can fail: the events of another version
    differ."""
    done = subprocess.run(
        [sys.executable, "-c", _SMOKE.format(path=str(ROOT / "release"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "71 events" in done.stdout, done.stderr
    assert "not what 4.4.2 gave" in done.stderr


_SMOKE = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, {path!r})
import smoke
smoke.RECORDINGS, smoke.STREAMS = ("updates_6.0.27",), 1
with tempfile.TemporaryDirectory() as directory:
    print(smoke.replayed(Path(directory)), "events")
    (Path(directory) / "updates_4.4.2.bson.xz").symlink_to(smoke.DATA / "updates_6.0.27.bson.xz")
    smoke.DATA, smoke.RECORDINGS = Path(directory), ("updates_4.4.2",)
    smoke.replayed(Path(directory))
"""


def test_nothing_that_git_has_is_left_out_of_the_sources() -> None:
    """Judged by the lines of MANIFEST.in; the tests do not need the repository's hidden files."""
    kept = re.compile(
        "|".join(
            f"{re.escape(word)}(/.*)?" if line.startswith("graft") else word.replace(".", r"\.").replace("*", "[^/]*")
            for line in (ROOT / "MANIFEST.in").read_text().splitlines()
            if line.startswith(("graft", "include"))
            for word in line.split()[1:]
        )
        + r"|src/.*\.(py|typed)|pyproject\.toml|setup\.py|README\.md|LICENSE"
    )
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a clone: a source distribution has what it has")
    names = [name for name in done.stdout.splitlines() if not name.startswith(".")]
    assert len(names) > 500
    assert [name for name in names if not kept.fullmatch(name)] == []


def test_the_workflows_run_what_the_makefile_has() -> None:
    targets = set(re.findall(r"(?m)^([\w.-]+):", (ROOT / "Makefile").read_text()))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path.name
        runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())
        made = [word for run in runs for word in re.findall(r"make ([\w.-]+)", run)]
        assert set(made) <= targets
        assert made
        for run in runs:
            for name in re.findall(r"(?:python|--file) (\S+/\S+)", run):
                assert (ROOT / name).is_file()


@pytest.mark.parametrize("home", ["", "https://code.example/tailrace"])
def test_a_release_names_the_repository_that_its_workflow_ran_in(home: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    (made,) = [step for step in workflow["jobs"]["build"]["steps"] if step.get("run") == "make dist"]
    assert list(made["env"]) == ["TAILRACE_PROJECT_URL"]
    code = "from distutils.core import run_setup; print(run_setup('setup.py', stop_after='init').metadata.project_urls)"
    environment = {**os.environ, "TAILRACE_PROJECT_URL": home}
    done = subprocess.run(
        [sys.executable, "-c", f"import setuptools; {code}"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.count(home or "https://") == (4 if home else 0), done.stderr
    assert done.returncode == 0, done.stderr


def test_every_python_of_the_matrix_is_tried_and_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    versions = tested["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tuple(versions) == script("dist").PYTHONS
    assert project["requires-python"] == f">={versions[0]}"
    assert [f"Programming Language :: Python :: {version}" for version in versions] == [
        one for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)
    ]
