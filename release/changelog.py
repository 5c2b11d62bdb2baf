"""The project's version, as ``pyproject.toml`` and the head of ``CHANGELOG.md`` state it.

python release/changelog.py cut        puts today's date into the heading in place of "not released yet"
python release/changelog.py check TAG  fails unless both state the version of the tag (v1.2.3), with a date
python release/changelog.py notes      prints what users notice in this version: the text of a release
"""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
OPEN = "not released yet"
HEADING = re.compile(r"(?m)^## (?P<version>\S+) \((?P<state>not released yet|\d{4}-\d\d-\d\d)\)$")


def project_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def newest(text: str) -> re.Match[str]:
    """The first heading of a version."""
    found = HEADING.search(text)
    if found is None:
        raise SystemExit('CHANGELOG.md has no heading like "## 1.2.3 (not released yet)" or "## 1.2.3 (2026-01-31)".')
    return found


def cut(text: str, today: str) -> str:
    """The changelog, with a date at its newest version."""
    heading, version = newest(text), project_version()
    if heading["version"] != version:
        raise SystemExit(f"CHANGELOG.md begins with {heading['version']}, but pyproject.toml says {version}.")
    if heading["state"] != OPEN:
        raise SystemExit(f"{version} was cut on {heading['state']}: set the next version in pyproject.toml first.")
    return f"{text[: heading.start()]}## {version} ({today}){text[heading.end() :]}"


def check(text: str, tag: str) -> None:
    heading, version = newest(text), project_version()
    if not tag == f"v{version}" == f"v{heading['version']}":
        raise SystemExit(
            f"The tag is {tag}, pyproject.toml says {version}, and CHANGELOG.md begins with {heading['version']}."
        )
    if heading["state"] == OPEN:
        raise SystemExit(f"{version} has no date in CHANGELOG.md: run python release/changelog.py cut and commit it.")


def notes(text: str) -> str:
    heading = newest(text)
    following = HEADING.search(text, heading.end())
    return text[heading.end() : following.start() if following else len(text)].strip() + "\n"


def main() -> None:
    text = CHANGELOG.read_text()
    match sys.argv[1:]:
        case ["cut"]:
            CHANGELOG.write_text(cut(text, datetime.now(UTC).date().isoformat()))
        case ["check", tag]:
            check(text, tag)
        case ["notes"]:
            print(notes(text), end="")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
