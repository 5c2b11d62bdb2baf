"""The reference of server versions, made from the table of profiles.

python -m tailrace.core.plan.reference > docs/reference/server-versions.md
"""

from __future__ import annotations

from tailrace.core.plan.profile import PROFILES, RuleEvidence, differences

_INTRODUCTION = """\
# Server versions

Change streams differ between server versions. A *server profile* says how. Everything that depends on the version is in
one table, `tailrace/core/plan/profile.py`, and this page is generated from it:
`python -m tailrace.core.plan.reference > docs/reference/server-versions.md`.

## Which profile is used

The newest profile that is not newer than the deployment's version: 6.0.27 and 6.3 use that of 6.0, 8.0.21 that of
8.0.16. 8.2.0 is refused: it shows some fields of expanded events in every stream, as no other release does; 8.2.1 and
later releases of 8.2 do not. To get another
version's events from the same oplog, name the version:

```python
import tailrace

tailrace.connect("mongodb://localhost", server_version="7.0")
```

```sh
tailrace watch mongodb://localhost shop.orders --server-version 7.0 --until now
tailrace replay dump/ --server-version 5.0
```

`replay` takes the version that the dump's `prelude.json` names (a current `mongodump` writes it), or the header of what
`mongodump --archive` wrote. Without one, an `applyOps` that holds only operations and belongs to no session proves 7.0,
and one with `multiOpType: 1` proves 8.0; otherwise 6.0 is assumed. Standard error says which version was taken and why.
Where the dump names a version that an entry disproves, nothing is replayed until you name one. With `engine="server"`
the server decides, and giving a version is an error. Versions before 4.4 are refused, and so is an option that the
version lacks.

If no version was named, a stream switches automatically when the member that it reads is
[upgraded](../how-to/operations.md#upgrading-the-deployment), even to a patch release, if its events differ. An
archive keeps its servers' versions over time, and `replay` gives [each entry as the events of its
time](../how-to/archive.md#which-versions-events). A micro-batch holds the events of the version that it was planned
with, and `tailrace lake status` shows those of a lake.

The feature compatibility version changes a few details of a server's events, at the moment of reading, and streams
follow it. 6.0 at 5.0 (`6.0-fcv5.0`) has `wallTime` in expanded events alone, and refuses `fullDocument:
"whenAvailable"` and `"required"`; 7.0 at 6.0 (`7.0-fcv6.0`) has no `disambiguatedPaths`. Both were measured; 5.0.4 at
4.4 was measured too, and does not differ. Nothing is known about 8.0 and later, so streams ignore it there. Streams ask
for it when they open and every 5 s ([what remains](differences.md)).

An entry that only a later version writes (the two forms of `applyOps` above) is never passed over. Under an earlier
profile it is an error that names the entry, if it holds something in the stream's scope. An entry of a kind that
Tailrace does not know (an operation letter, a command, a form of a no-op) gives no event, as on the server, and is
[counted and reported](../how-to/operations.md). Tables and exact images refuse it where it may have changed what they
hold: the error names the operation and its place, and says what to do.

`tailrace doctor` says what is known about your server's version:

| | |
|---|---|
| measured | a server of this series was compared: 4.4, 5.0, 6.0, 7.0 |
| derived | 8.x follows what is published, rule by rule (below); 6.3, 7.3 and the like go by the series before |
| unknown | of a later major version than the last of the table; it is read by the rules of the last |

`tailrace compare` says how your server compares with its profile ([Compare with your
server](../how-to/compare.md)). If a version is not measured, run it before you rely on that version.

A profile cannot bring back what a server did not write into its oplog: 4.4 writes updates in the form `$v: 1`, whose
events have no `truncatedArrays`, whatever the profile.

The language of pipelines is the version's too: [Expressions](expressions.md) says what was added when, and what is
different in 7.0. On update entries that end the stream with 6741200: 7.0.28 does not write such an entry itself
(`applyOps` refuses it with 4772600), so its code is known from crafted entries, and the words for one with neither `$v`
nor `_id` are ours.

`endOfTransaction` events are made from the entries that the oplog has. The server makes more of them while it reads,
for transactions that were not prepared, if a feature flag is on; no oplog shows whether it is on, so those are not
made. The options of later servers that no stream here has (`supportedEvents`, `showCommitTimestamp`, `version`,
`showEndOfTransaction`) are refused by name.

## What differs

The columns up to 7.0.28 are measured. The last two columns say what the later ones are taken from, and how sure that
is: *source* is the server's published source, *tracker* its public issue tracker (which names the first release),
*manual* its manual, *drivers' tests* the versions that the drivers' published tests name, and *captures* events that
users have shown, rebuilt in `tests/golden/captures.py`. Medium means that nothing that was found mentions a change, or
that the source, read at single points of its history, does not say which release brought it.
"""


def _sources(evidence: RuleEvidence | None) -> str:
    if evidence is None:
        return " | "
    return f"{', '.join(evidence.sources)} | {evidence.confidence}"


def reference() -> str:
    """The page as Markdown."""
    names = [profile.name for profile in PROFILES]
    lines = [f"| | {' | '.join(names)} | after 7.0.28 from | confidence |", f"|---|{'---|' * (len(names) + 2)}"]
    for says, by_version, evidence in differences():
        lines.append(f"| {says} | {' | '.join(by_version[name] for name in names)} | {_sources(evidence)} |")
    return _INTRODUCTION + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
