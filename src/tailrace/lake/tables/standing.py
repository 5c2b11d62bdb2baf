"""Whether a table is the one that its state knows: compared by each writer, before anything is written.

State and tables are two records of one truth, and each can be set back alone: a folder restored from a backup, a state
restored from one, the newest file of a log lost, a data file lost. So the state notes of each table which version its
last commit made, and the digest of that version's file; the log is compared from there back to its last checkpoint
(``log_chain.py``). What differs is rewritten from the state, which has every document. A different table is refused,
since only its owner knows what is to become of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from tailrace.errors import SinkError
from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit, log_chain
from tailrace.lake.tables.delta_commit import Batch, DamagedCommitError, Stated
from tailrace.lake.tables.delta_table import ANEW, CollectionTable
from tailrace.lake.tables.state import UNKNOWN, StateTransaction, TableMark, TablesPosition


class TableFault(NamedTuple):
    """Why a table is to be rewritten. ``reason`` completes a sentence that begins with "the table of NAMESPACE"."""

    mark: TableMark
    reason: str


class Seen(NamedTuple):
    """The file of a version when it was compared last, as the file system or the store describes it."""

    version: int
    file: tuple[object, ...]


def fault_of(table: CollectionTable, mark: TableMark, at: TablesPosition, state: str) -> TableFault | None:
    """What makes ``table`` another one than that of ``mark``; ``None`` if it is the one.

    ``at``     the state's position. A table may have taken over its micro-batch without the mark knowing: a crash came
               between
    ``state``  the state's name

    Raises SinkError where it is another collection's table or another one by its id, or if another program has changed
    rows.
    """
    if mark.collection is None and not table.exists:
        return None  # of a collection that is gone
    if not table.exists:
        return None if mark.batch < 0 else TableFault(mark, "is gone")
    check_owner(table, mark)
    if mark.collection == UNKNOWN or mark.whole:
        return None
    table.checkpoints.update(_checkpoints(mark))
    reason = table.harm or _set_back(table, mark) or _went_on(table, mark, at, state)
    if reason is None and (lacking := table.lacks()) is not None:
        reason = f"lacks its data file {lacking}, or a part of it"
    return None if reason is None else TableFault(mark, reason)


def check_owner(table: CollectionTable, mark: TableMark) -> None:
    """Raises SinkError where the folder holds another table than the one that ``mark`` is of."""
    if table.made_for not in {None, mark.namespace}:
        raise SinkError(
            f"{table.root} holds the table of {table.made_for}, not that of {mark.namespace}",
            hint=ANEW.format(root=table.root),
        )
    if mark.table and table.id != mark.table:
        raise SinkError(
            f"{table.root} holds a table of {mark.namespace} that is not the one that its state knows: its id was "
            f"{mark.table} and is {table.id}",
            hint=f"Restore the table, or remove {table.root}: then the next run writes it from its state",
        )


def has_taken_over(table: CollectionTable, batch: Batch) -> bool:
    """Whether the table's newest version of ours is that of ``batch``, from the same state."""
    if table.batch < batch.number:
        return False
    last = delta_commit.newest(table.root)
    return last is not None and last.state == batch.state and last.batch >= batch.number


def harm_of(root: TablePlace, mark: TableMark) -> str | None:
    """What the log lacks of what ``mark`` describes, or has instead; ``None`` if it has all. It completes a sentence
    that begins with "the table". For readers, while a writer may go on."""
    if mark.version < 0:
        return None
    if not delta.commit_path(root, mark.version).exists():
        return f"does not have version {mark.version}, which its state knows"
    return log_chain.harm(root, mark.version, _checkpoints(mark), mark.digest)


def check_log(root: TablePlace, version: Stated, mark: TableMark | None) -> None:
    """Raises SinkError where the log up to ``version``, of a table with ``mark``, is not what was written."""
    harm = log_chain.harm(root, version.version, {} if mark is None else _checkpoints(mark))
    if harm is not None:
        raise SinkError(
            f"what the table {root} held at {delta_commit.time_text(version.time)} cannot be determined: it {harm}",
            hint="Ask for a later time: since a table was rewritten, its versions do not need the log before",
        )


def _checkpoints(mark: TableMark) -> dict[int, str]:
    return {int(number): digest for number, digest in mark.checkpoints.items()}


def seen(root: TablePlace, mark: TableMark) -> Seen | None:
    """The file of the mark's version as it is now; ``None`` if it is not there."""
    identity = places.identity(delta.commit_path(root, mark.version))
    return None if identity is None else Seen(mark.version, identity)


def note(mark: TableMark, table: CollectionTable) -> TableMark:
    """The mark with what the table's last commit was."""
    if table.committed is None:
        last = delta_commit.newest(table.root)
        if last is None:
            return mark
        table.committed = last.version, delta_commit.digest(delta.commit_path(table.root, last.version).read_bytes())
    version, digest = table.committed
    there = delta.checkpoints_in(table.root)
    checkpoints = {str(number): one for number, one in sorted(table.checkpoints.items()) if number in there}
    return replace(mark, version=version, digest=digest, table=table.id, checkpoints=checkpoints)


def _set_back(table: CollectionTable, mark: TableMark) -> str | None:
    """Why the table does not have the last commit that the mark describes."""
    if mark.version < 0:
        return None
    if table.version < mark.version:
        return f"is older than its state: at version {table.version}, not {mark.version}"
    left = delta.commits_in(table.root)
    if left and left[0] > mark.version and table.batch == mark.batch:
        return None  # another program has made its log shorter
    return harm_of(table.root, mark)


def _went_on(table: CollectionTable, mark: TableMark, at: TablesPosition, state: str) -> str | None:
    """What came to the table after the last commit that the mark describes, if it cannot be ours."""
    begin = mark.version if mark.version >= 0 else delta_commit.newest_version(table.root)
    for number in range(begin + 1, table.version + 1):
        try:
            actions = delta_commit.actions_of(table.root, number)
        except FileNotFoundError:
            if number < table.version or delta.commits_in(table.root)[:1] > [number]:
                continue  # its log was thinned, or made shorter
            raise delta_commit.changed_by_others(table.root, number) from None
        except DamagedCommitError:
            return log_chain.damaged(number)
        statement = delta_commit.statement(actions, number)
        if statement is None:
            if delta_commit.changes_data(actions):
                raise delta_commit.changed_by_others(table.root, number)
        elif statement.state != state or statement.batch > at.batch:
            return f"is newer than its state: version {number} was written with another state, or with a later one"
        elif statement.batch == at.batch and statement.time != at.time:
            return f"went on with another copy of its state: version {number} ends micro-batch {at.batch} elsewhere"
    return f"is newer than its state: it has taken over micro-batch {table.batch}" if table.batch > at.batch else None


def note_disturbed(marks: Mapping[str, TableMark], namespaces: Iterable[str], state: StateTransaction) -> None:
    """Let the tables of names that have changed hands take part in the micro-batch, even if they hold what they held
    before: a version is exact at every time up to the micro-batch of the next one."""
    for namespace in namespaces:
        mark = marks.get(namespace)
        if mark is not None and mark.collection != UNKNOWN:
            state.set_mark(replace(mark, whole=True))
