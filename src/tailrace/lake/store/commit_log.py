"""The lake's log: one numbered file for each commit, without gaps. What the log names is what the lake holds.

The log is Delta Lake's (``delta_log.py``), so that others read it. A commit is one step: its file appears, whole and on
the device, under a number that nobody has used. Everything else is there before (the data files) or can be rebuilt
(``head.json``, checkpoints). ``head.json`` is a witness next to the log: it says which commit is the newest and what
its bytes are, so that a log that has lost its end is not mistaken for a shorter one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tailrace.lake.store.delta_log import (
    FORMAT,
    check_format,
    decode,
    encode,
    guarded,
    mark_from_json,
    mark_to_json,
    table_metadata,
    table_schema,
    time_from_json,
    time_to_json,
)
from tailrace.lake.store.lake_root import (
    LakeRoot,
    SealedObject,
    publish,
    read_sealed_there,
    rooted,
    size_of,
    write_sealed,
)
from tailrace.lake.store.layout import LakeLayout
from tailrace.lake.store.log_state import LogState
from tailrace.lake.store.manifest import BatchMark, Commit, FileEntry, PlannedRange, StagedFile, check_ascending
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.quarantine import names_in
from tailrace.lake.store.quarantine_ledger import keep_up
from tailrace.lake.store.session import require_session

#: After how many commits a checkpoint follows, and how many older commits are kept. A directory of so few names is
#: listed by one call to the system, so no reader can list it with a hole in it; and a start stays quick, however old
#: the lake is.
CHECKPOINT_EVERY = 100
COMMITS_KEPT = 200

_TRIES = 5
_HOLE = "Restore it from a copy; without it nobody can say what the lake holds"


@dataclass(frozen=True, slots=True)
class Head:
    """Where the log stands: the newest commit's number and SHA-256, and the newest micro-batch that added events.

    ``reached`` is how far the stream was read into the lake, micro-batches without events included: whatever comes next
    begins there or before. ``None`` where that is not known: nothing has come yet, or ``head.json`` was lost. ``begun``
    is the cluster time after which the stream's first micro-batch began, and ``begun_by`` the server version that the
    micro-batches since then were planned with; the first commit of events takes that over. An upgrade before it moves
    the beginning on: what there was before would have been another version's events. ``changed`` is the digest of the
    stream and the columns that the newest change has given the lake ("": it was never changed); ``None`` where an
    earlier release has written ``head.json``, or it was lost.
    """

    number: int
    digest: str
    newest: BatchMark | None
    reached: ClusterTime | None = None
    begun: ClusterTime | None = None
    begun_by: str = ""
    changed: str | None = None

    @property
    def last_token(self) -> str | None:
        return None if self.newest is None else self.newest.last_token


class CommitLog:
    """The log of the lake at ``root``. Every change is made while ``locked()``."""

    def __init__(self, root: LakeRoot | str) -> None:
        self.layout = LakeLayout(rooted(root))
        #: Whether a commit may have been made although the store has not said so.
        self.in_doubt = False
        #: The ``lake.json`` of a lake in a store, as it was after the lock's holder had read the head.
        self.identity: dict[str, Any] | None = None
        self._checked: dict[int, bytes] = {}
        #: While the lock is held: the head as it is then.
        self._held: Head | None = None
        #: Of a lake in a store: ``head.json`` as it was read or written last.
        self._there: SealedObject | None = None

    @contextmanager
    def locked(self, *, opening: bool = False) -> Iterator[Head]:
        """Hold the lake's lock, and give the head. Raises SinkError where the log has lost its newest commit, or,
        unless a stream is just ``opening`` the lake, where another machine writes it."""
        with durable.locked(self.layout.lock):
            head = self._held = self._recover()
            try:
                self.identity = None if opening else require_session(self.layout)  # after the head: see session.py
                yield head
            finally:
                self._held = None

    @contextmanager
    def reading(self) -> Iterator[Head]:
        """Keep writers out, and give the head, without writing anything: also for a lake that is only read. Raises as
        ``locked``."""
        with durable.locked_for_reading(self.layout.lock):
            yield self._recovered(self._witness())

    def head(self) -> Head:
        """The head as it was last written; a commit that is being made just now may be missing. Takes no lock."""
        return self._witness() or self._rebuilt_head()

    def commits(self, after: int = 0) -> Iterator[Commit]:
        """The commits whose files are still kept, in order, beginning after number ``after``."""
        number = after + 1
        if not self.layout.commit(number).exists() and not self._ends_with(after):
            number = min((kept for kept in self._listed()[0] if kept > after), default=number)
        while (content := self._content(number)) is not None:
            yield decode(content, number, self.layout.commit(number))
            number += 1

    def state(self, version: int | None = None) -> LogState:
        """What the lake held after commit ``version``, by default the newest. Takes no lock: commits only ever add
        files to the log, so what is read here is one version as a whole.

        Raises SinkError where a commit is missing, the log is damaged, or it no longer reaches back to ``version``.
        """
        problem = ""
        for _ in range(_TRIES):  # a checkpoint that is made meanwhile may take old commits away
            witness = self._witness()
            numbers, checkpoints = self._listed()
            top = max(numbers, default=-1)
            if witness is not None and witness.number > top:
                problem = f"{self.layout.commit(witness.number)} is missing: the lake's log has lost its end"
                continue
            if version is not None and version > top:
                raise SinkError(f"the lake {self.layout.root} has no version {version}: its newest is {top}")
            target = top if version is None else version
            base = max((number for number in checkpoints if number <= target), default=-1)
            missing = next((number for number in range(base + 1, target + 1) if number not in numbers), None)
            if missing is not None:
                problem = f"{self.layout.commit(missing)} is missing: the lake's log has a hole"
                continue
            try:
                return self._added_up(base, target)
            except FileNotFoundError as error:
                problem = f"{error.filename or str(error).split()[0]} is missing: the lake's log has a hole"
        raise SinkError(problem, hint=_HOLE)

    def newest_batch(self, head: Head) -> Commit | None:
        """The commit of the newest micro-batch, even if its writer died before it wrote the head; ``None`` if there is
        none, or only a checkpoint holds it."""
        found = None if head.newest is None else self.commit(head.newest.number)
        return max((one for one in self.commits(head.number) if one.batch is not None), key=_number, default=found)

    def live_files(self) -> list[FileEntry]:
        """The files that the lake holds, in the order of the stream."""
        return self.state().in_order

    def write(self, commit: Commit, metadata: dict[str, object] | None = None) -> Head:
        """Make ``commit`` the next one: the caller holds the lock and has checked it. Returns the new head."""
        path = self.layout.commit(commit.number)
        before = self._held or self._witness() or Head(-1, "", None, changed="")
        checkpoint_is_due = commit.number > 0 and commit.number % CHECKPOINT_EVERY == 0
        if checkpoint_is_due and isinstance(self.layout.root, Path):  # before the checkpoint removes commits
            keep_up(self.layout, lambda: names_in(self.layout, self.newest_batch(before)), self.commits)
        content = encode(commit, metadata)
        try:
            self.in_doubt = True
            publish(path, content, self.layout.state)
        except FileExistsError:
            self.in_doubt = False
            raise SinkError(f"another program has written {path}", hint="A lake has one writer") from None
        self.in_doubt = False
        durable.step("commit.log")
        head = _moved_on(before, commit, content, _later(before.reached, commit.reaches))
        self._write_head(head)
        durable.step("commit.head")
        if checkpoint_is_due:
            from tailrace.lake.store import checkpoint  # noqa: PLC0415  deltalake and Arrow, now and then only

            checkpoint.make(self.layout, commit.number, keep=COMMITS_KEPT)
        return head

    def reach(self, head: Head, planned: PlannedRange) -> None:
        """Note that the stream was read to the end of ``planned``, without an event since ``head``. The caller holds
        the lock."""
        time = planned.until
        if _later(head.reached, time) != head.reached:
            by = planned.server_version or head.begun_by
            first = head.reached is None and head.newest is None
            begun = planned.begins if first else _begun(head, planned)
            self._write_head(replace(head, reached=time, begun=begun, begun_by=by if head.newest is None else ""))

    def commit(self, number: int) -> Commit | None:
        """The commit with this number; ``None`` if there is none, or the log does not keep it any more."""
        content = self._content(number)
        return None if content is None else decode(content, number, self.layout.commit(number))

    def digest_of(self, number: int) -> str | None:
        """The SHA-256 of a commit's file; ``None`` if the log does not keep it any more."""
        content = self._content(number)
        return None if content is None else _digest(content)

    def create(
        self, table_id: str, columns: Sequence[Mapping[str, Any]], partitioning: Partitioning, claim: str
    ) -> Head | None:
        """Write commit 0, which makes the table, if it does not exist yet: the head then. The caller holds the lock."""
        if self._listed()[0]:
            return None
        if any(self.layout.files_present()):
            raise SinkError(
                f"{self.layout.log} is empty and {self.layout.root} holds files: its log is gone", hint=_HOLE
            )
        commit = Commit(0, "create", claim, "")
        schema = table_schema(columns, partitioning)
        return self.write(commit, table_metadata(table_id, schema, partitioning, (), commit.committed_at))

    def problems(self) -> list[str]:
        """What is wrong with the chain of commits that are kept, in sentences: holes, and files that were changed."""
        numbers, checkpoints = self._listed()
        first, last = min(numbers, default=0), max(numbers, default=-1)
        found = [
            f"{self.layout.commit(number)} is missing: the lake's log has a hole"
            for number in range(first, last + 1)
            if number not in numbers
        ]
        if first > 0 and not any(number >= first - 1 for number in checkpoints):
            found.append(f"{self.layout.commit(first - 1)} is missing, and no checkpoint holds what it said")
        before = reached = None
        for number in sorted(numbers):
            content = self._content(number)
            if content is None:
                continue
            if isinstance(self.layout.root, ObjectPlace):
                self._checked[number] = content
            commit = decode(content, number, self.layout.commit(number))
            if before is not None and before[0] == number - 1 and commit.previous != before[1]:
                found.append(f"{self.layout.commit(number - 1)} was changed after it was written")
            before = number, _digest(content)
            if (hole := _hole(commit, reached)) is not None:
                found.append(f"{self.layout.commit(number)} {hole}")
            reached = _later(reached, commit.reaches)
        return found

    def checked(self) -> Iterator[Commit]:
        """Of a lake in a store, the commits that ``problems`` has read: each is a request."""
        for number, content in sorted(self._checked.items()):
            yield decode(content, number, self.layout.commit(number))

    def _added_up(self, base: int, target: int) -> LogState:
        state = LogState()
        if base >= 0:
            from tailrace.lake.store import checkpoint  # noqa: PLC0415  Arrow, where there is one

            state = checkpoint.read(self.layout, base)
        for number in range(base + 1, target + 1):
            path = self.layout.commit(number)
            content = self._checked.get(number)
            state.apply(decode(path.read_bytes() if content is None else content, number, path))
        return state

    def _listed(self) -> tuple[set[int], set[int]]:
        """The numbers of the commits and of the checkpoints that are there."""
        commits, checkpoints = delta.listed(self.layout.root)
        return set(commits), set(self.layout.readable(checkpoints))

    def _ends_with(self, number: int) -> bool:
        """Of a lake in a store, where each listing is a request: whether the log ends with this commit, since that is
        kept and the next one is not there. The oldest go first."""
        return isinstance(self.layout.root, ObjectPlace) and number >= 0 and self.layout.commit(number).exists()

    def _content(self, number: int) -> bytes | None:
        try:
            return self.layout.commit(number).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SinkError(f"cannot read {self.layout.commit(number)}: {error.strerror}") from error

    def _witness(self) -> Head | None:
        path = self.layout.head
        value, self._there = read_sealed_there(path)
        if value is None:
            return None
        check_format(value, path)

        def read() -> Head:
            number, digest, newest = value["number"], value["digest"], value["newest"]
            if isinstance(number, bool) or not isinstance(number, int) or not isinstance(digest, str):
                raise TypeError("number or digest")
            mark = None if newest is None else mark_from_json(newest)  # type: ignore[arg-type]
            reached, begun = (
                None if value.get(key) is None else time_from_json(value[key])  # type: ignore[arg-type]
                for key in ("reached", "begun")
            )
            changed = value.get("changed")
            if not isinstance(changed, str | None):
                raise TypeError("changed is not a string")
            return Head(number, digest, mark, reached, begun, str(value.get("begunBy") or ""), changed)

        return guarded(read, path)

    def _rebuilt_head(self) -> Head:
        number = max(self._listed()[0], default=-1)
        content = self._content(number) if number >= 0 else None
        if content is None:
            return Head(-1, "", None, changed="")
        return Head(number, _digest(content), decode(content, number, self.layout.commit(number)).newest)

    def _recover(self) -> Head:
        witness = self._witness()
        head = self._recovered(witness)
        if head.changed is None:
            changes = self.state(head.number).changes
            head = replace(head, changed=changes[-1].digest if changes else "")
        if head.number >= 0 and head != witness:
            self._write_head(head)
        return head

    def _recovered(self, witness: Head | None) -> Head:
        """The head, moved on to commits whose writer died before it could. A head without its commit is an error."""
        head = witness or self._rebuilt_head()
        if head.number >= 0:
            path, content = self.layout.commit(head.number), self._content(head.number)
            if content is None:
                raise SinkError(f"{path} is missing: the lake's log has lost its end", hint=_HOLE)
            if _digest(content) != head.digest:
                raise SinkError(f"{path} was changed after it was written", hint=_HOLE)
        while (content := self._content(head.number + 1)) is not None:
            path = self.layout.commit(head.number + 1)
            commit = decode(content, head.number + 1, path)
            if commit.previous != head.digest:
                raise SinkError(f"{path} does not follow {self.layout.commit(head.number)}: one of them was changed")
            reached = None if witness is None else _later(head.reached, commit.reaches)
            head = _moved_on(head, commit, content, reached)
        return head

    def _write_head(self, head: Head) -> None:
        newest = None if head.newest is None else mark_to_json(head.newest)
        value = {"format": FORMAT, "number": head.number, "digest": head.digest, "newest": newest}
        if head.reached is not None:
            value["reached"] = time_to_json(head.reached)
        if head.begun is not None:
            value["begun"] = time_to_json(head.begun)
        if head.begun_by:
            value["begunBy"] = head.begun_by
        if head.changed is not None:
            value["changed"] = head.changed
        there, self._there = self._there, None
        self._there = write_sealed(self.layout.head, value, lambda other: self._is_later(other, head), there)
        if self._held is not None:
            self._held = head

    def _is_later(self, there: Mapping[str, Any], head: Head) -> bool:
        """Whether what another machine has written to ``head.json`` is newer than ``head``."""

        def compared() -> bool:
            reached = None if there.get("reached") is None else time_from_json(there["reached"])
            known = ClusterTime(0)
            return (int(there["number"]), reached or known) > (head.number, head.reached or known)

        return guarded(compared, self.layout.head)


def _moved_on(head: Head, commit: Commit, content: bytes, reached: ClusterTime | None) -> Head:
    """The head after ``commit``, whose file has ``content``."""
    changed = head.changed if commit.change is None else commit.change.digest
    return Head(commit.number, _digest(content), commit.newest, reached, head.begun, head.begun_by, changed)


def _hole(commit: Commit, reached: ClusterTime | None) -> str | None:
    """What is wrong with where a micro-batch begins: after what the lake had been read to, by its own word or by that
    of the commits before, which had come to ``reached``."""
    if commit.planned is None or commit.follows is None:
        return None
    if reached is not None and commit.follows < reached:
        return f"says that it follows {commit.follows}, but the commits before it had already reached {reached}"
    if commit.planned.after > commit.follows:
        return f"adds what came after {commit.planned.after}, but the lake had been read only up to {commit.follows}"
    return None


def _number(commit: Commit) -> int:
    return commit.number


def _later(one: ClusterTime | None, other: ClusterTime | None) -> ClusterTime | None:
    return max((time for time in (one, other) if time is not None), default=None)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def append_commit(
    head: Head,
    claim: str,
    batch: int,
    mark: BatchMark,
    files: tuple[StagedFile, ...],
    *,
    quarantined: tuple[StagedFile, ...] = (),
) -> Commit:
    """The commit that adds ``files`` (ascending, checked here) after ``head``, and files of events put aside."""
    check_ascending(files)
    return Commit(
        number=head.number + 1,
        kind="append",
        claim=claim,
        previous=head.digest,
        files=files,
        batch=batch,
        planned=mark.planned,
        follows=head.reached,
        begins=_begin(head, mark),
        newest=mark,
        quarantined=tuple(file.name for file in quarantined),
        quarantined_rows=sum(file.rows for file in quarantined),
    )


def _begin(head: Head, mark: BatchMark) -> ClusterTime | None:
    """Where the stream begins, for the commit that adds the first events."""
    if head.newest is not None:
        return None
    begun = _begun(head, mark.planned)
    return mark.planned.begins if begun is None else begun


def _begun(head: Head, planned: PlannedRange) -> ClusterTime | None:
    """Where the events of the version begin that ``planned`` was planned with, if the lake has none yet."""
    if head.newest is not None or head.begun is None or planned.server_version in ("", head.begun_by):
        return head.begun
    return planned.after if head.begun_by else head.begun


def check_present(layout: LakeLayout, files: tuple[StagedFile, ...]) -> None:
    """Each file that a commit is to name is there with the size that its task reported."""
    for file in files:
        path = layout.root / file.name
        try:
            size = size_of(path)
        except FileNotFoundError:
            raise SinkError(
                f"{path} is gone before it could be committed: is another process writing this lake?"
            ) from None
        if size != file.size:
            raise SinkError(f"{path} has {size} bytes, and {file.size} were written")
