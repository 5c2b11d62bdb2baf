"""Whether a table's log is what was written, from our last checkpoint to a version.

Delta's log has no checksums, and each version is the sum of the commits before it: with one changed character in a
commit long ago, a file that was replaced would be read again. So each commit of ours has a seal of its own, and the
digests of the files before it, back to our last one, whichever program wrote those between. The state knows the digests
of the newest commit and of the checkpoints. Commits from before there were seals, and those of other programs on top of
ours, are taken as they are until the next commit names their digests.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake.exceptions import DeltaError

from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit, live_files
from tailrace.lake.tables.delta_commit import PREVIOUS, DamagedCommitError, TableFile

#: How many commits of other programs on top of our last one are named in the next.
_BETWEEN: Final = 1000


def previous(root: TablePlace, number: int) -> dict[int, str]:
    """The digests of the versions' files before ``number``, back to our last one. One that is not what was written is
    left out: its own seal tells."""
    found: dict[int, str] = {}
    for version in range(number - 1, max(-1, number - 1 - _BETWEEN), -1):
        path = delta.commit_path(root, version)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            break
        try:
            info = delta.info_of(delta_commit.actions_in(path, version, content))
        except DamagedCommitError:
            break
        found[version] = delta_commit.digest(content)
        if PREVIOUS in info:
            break
    return found


def damaged(number: int) -> str:
    """What is wrong with a table whose commit of a version was changed. It completes a sentence that begins with "the
    table"."""
    return f"has a log that is not what was written: the file of version {number} was changed"


def digest_of(paths: Sequence[TablePlace]) -> str:
    """The digest of a checkpoint's files."""
    return delta_commit.digest(b"".join(path.read_bytes() for path in paths))


def harm(root: TablePlace, version: int, checkpoints: Mapping[int, str], digest: str | None = None) -> str | None:
    """What in the log up to ``version`` is not what was written; ``None`` if nothing is. It completes a sentence that
    begins with "the table".

    ``checkpoints``  the digests of those of ours
    ``digest``       that of the file of ``version``, where it is known
    """
    there = delta.checkpoints_in(root)
    for number in checkpoints.keys() & there.keys():
        with contextlib.suppress(FileNotFoundError):
            if digest_of(there[number]) != checkpoints[number]:
                return f"has a checkpoint of version {number} that is not the one that was written"
    base = max((number for number in checkpoints if number in there and number <= version), default=-1)
    newest = max((number for number in there if number <= version), default=-1)
    try:
        found = _commits(root, base + 1 if digest is None else min(base + 1, version), version, newest)
    except _Harm as found_harm:
        return str(found_harm)
    if digest is not None and version in found and found[version][0] != digest:
        return f"has a version {version} that is not the one that was written"
    for number, (_, actions) in found.items():
        for before, known in json.loads(delta.info_of(actions).get(PREVIOUS, "{}")).items():
            if int(before) in found and found[int(before)][0] != known:
                return f"has a version {before} that is not the one that version {number} was written after"
    if newest > base and len(found) == version - base and not _agrees(root, base, there, version, found):
        return f"has a checkpoint of version {newest} that does not agree with its log"
    return None


class _Harm(Exception):  # noqa: N818  never leaves this module
    pass


_Commits = dict[int, tuple[str, list[dict[str, Any]]]]


def _commits(root: TablePlace, first: int, last: int, checkpoint: int) -> _Commits:
    """The digests and actions of versions. Those up to ``checkpoint`` may have gone, as other programs remove them."""
    found: _Commits = {}
    for number in range(first, last + 1):
        path = delta.commit_path(root, number)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if number <= checkpoint:
                continue
            raise _Harm(f"lacks version {number} of its log") from None
        try:
            found[number] = delta_commit.digest(content), delta_commit.actions_in(path, number, content)
        except DamagedCommitError:
            raise _Harm(damaged(number)) from None
    return found


def _agrees(
    root: TablePlace, base: int, there: Mapping[int, Sequence[TablePlace]], version: int, commits: _Commits
) -> bool:
    """Whether the files of ``version``, as readers find them by a checkpoint that is not ours, are those that its
    commits add up to."""
    try:
        live = {name for path in there.get(base, ()) for name in _live(path)}
        with places.asking(root):
            read = pa.table(places.delta_table(root, version).get_add_actions())
    except (DeltaError, OSError, ValueError, pa.ArrowException):
        return False
    for number in sorted(commits):
        for action in commits[number][1]:
            if "remove" in action:
                live.discard(unquote(action["remove"]["path"]))
            if "add" in action:
                live.add(unquote(action["add"]["path"]))
    if live != {unquote(name) for name in read.column("path").to_pylist()}:
        return False
    return not _marks(commits) or _agrees_on_rows(root, there.get(base, ()), version, commits)


def _marks(commits: _Commits) -> bool:
    """Whether a commit says that rows of a file are gone."""
    return any("deletionVector" in one.get("add", {}) for _, actions in commits.values() for one in actions)


def _agrees_on_rows(root: TablePlace, base: Sequence[TablePlace], version: int, commits: _Commits) -> bool:
    """Whether the same rows of the files are gone, too."""
    found: dict[str, TableFile] = {}
    for path in base:
        live_files.apply(found, live_files.in_checkpoint(path))
    for number in sorted(commits):
        live_files.apply(found, commits[number][1])
    read = {file.path: live_files.gone_of(root, file).tolist() for file in live_files.files_at(root, version)}
    return read == {file.path: live_files.gone_of(root, file).tolist() for file in found.values()}


def _live(checkpoint: TablePlace) -> list[str]:
    return [unquote(path) for path in delta.paths_in(checkpoint, "add") if path is not None]
