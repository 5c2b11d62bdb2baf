"""The reference of server versions, made from the table of profiles.

python -m tailrace.plan.reference > docs/reference/server-versions.md
"""

from __future__ import annotations

from tailrace.plan.profile import PROFILES, differences

_INTRODUCTION = """\
# Server versions

Change streams differ between server versions. A *server profile* says how. Everything that depends on the version is in
one table, `tailrace/plan/profile.py`, and this page is generated from it:
`python -m tailrace.plan.reference > docs/reference/server-versions.md`.

## Which profile is used

The newest profile that is not newer than the deployment's version: 6.0.27 and 6.3 use that of 6.0. To get another
version's events from the same oplog, name the version:

```python
import tailrace

tailrace.connect("mongodb://localhost", server_version="7.0")
```

```sh
tailrace watch mongodb://localhost shop.orders --server-version 7.0 --until now
tailrace replay dump/ --server-version 5.0
```

A dump does not name its server, so `replay` assumes 6.0 unless a version is given. With `engine="server"` the server
decides, and giving a version is an error. Versions before 4.4 are refused, and so is an option that the version lacks.

A profile cannot bring back what a server did not write into its oplog: 4.4 writes updates in the form `$v: 1`, whose
events have no `truncatedArrays`, whatever the profile.

## What differs
"""


def reference() -> str:
    """The page as Markdown."""
    names = [profile.name for profile in PROFILES]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for says, by_version in differences():
        lines.append(f"| {says} | {' | '.join(by_version[name] for name in names)} |")
    return _INTRODUCTION + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
