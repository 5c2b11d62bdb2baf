"""Which files of a quarantine in a directory must be there: ``_tailrace/quarantine-ledger.json``.

In a directory a file counts because it lies in ``_quarantine``, so one that is lost, or that somebody puts there, would
change what the quarantine holds, and nobody could tell. The commits that the log keeps name the files of their
micro-batches. The ledger has what no commit says: which of them were replaced by a merged file, or erased as a whole.
It is written before a file goes, so after a crash it excuses more than has gone, never less. ``since`` is the number of
the commit after which it knows everything; what an older version of Tailrace has merged is not known.

In a store the index says what counts (``quarantine_index.py``), and there is no ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tailrace.base import durable
from tailrace.errors import SinkError
from tailrace.lake.store.layout import LakeLayout, checked_quarantine_name, is_quarantine
from tailrace.lake.store.manifest import Commit

_REMOVE: Final = "Move it out of the directory"


@dataclass(frozen=True, slots=True)
class QuarantineLedger:
    """The ledger. ``replaced`` has a file's successor, or ``None`` where all of its events were erased."""

    since: int
    replaced: Mapping[str, str | None]

    @classmethod
    def read(cls, layout: LakeLayout) -> QuarantineLedger | None:
        """The ledger, every name in it checked; ``None`` where there is none."""
        path = _path(layout)
        known = durable.read_sealed(path)
        if known is None:
            return None
        since, replaced = known.get("since"), known.get("replaced")
        if not isinstance(since, int) or isinstance(since, bool) or not isinstance(replaced, dict):
            raise SinkError(f"{path} is damaged: it does not name files of the quarantine")
        for name in (*replaced, *(one for one in replaced.values() if one is not None)):
            checked_quarantine_name(name, path)
        return cls(since, replaced)

    def write(self, layout: LakeLayout) -> None:
        """Write it. The caller holds the lock. Raises LakeFullError."""
        with durable.writing(_path(layout)):
            durable.write_sealed(_path(layout), {"since": self.since, "replaced": dict(self.replaced)})

    def missing(self, name: str, present: Collection[str]) -> str | None:
        """Which file is missing of those that hold, or held in turn, the events of the file ``name``. ``None`` where
        one of them is there, or the events were erased."""
        found: str | None = name
        while found is not None and found not in present:
            if found not in self.replaced:
                return found
            found = self.replaced[found]
        return None


def begin_ledger(layout: LakeLayout, number: int) -> None:
    """Begin the ledger before the first commit after ``number`` that puts events aside. The caller holds the lock."""
    if not _path(layout).exists():
        QuarantineLedger(number, {}).write(layout)


def note_replaced(layout: LakeLayout, replaced: Mapping[str, str | None]) -> QuarantineLedger | None:
    """Note that files are about to go. Returns the ledger as it was. The caller holds the lock."""
    known = QuarantineLedger.read(layout)
    if known is not None and replaced:
        replace(known, replaced={**known.replaced, **replaced}).write(layout)
    return known


def ledger_fault(
    layout: LakeLayout,
    present: Callable[[], Collection[str]],
    commits: Callable[[int], Iterable[Commit]],
) -> tuple[str, str] | None:
    """What is wrong with the files of the quarantine, with a hint. ``present`` gives the names of those that are there,
    and ``commits`` the commits after a number. Takes no lock: a fault is only one that a second look finds too."""
    first = _look(layout, present, commits)
    return first if first is None or _look(layout, present, commits) == first else None


def _look(
    layout: LakeLayout,
    present: Callable[[], Collection[str]],
    commits: Callable[[int], Iterable[Commit]],
) -> tuple[str, str] | None:
    assert isinstance(layout.root, Path)
    known = QuarantineLedger.read(layout)
    named = [] if known is None else [name for one in commits(known.since) for name in one.quarantined]
    there = present()
    for name in sorted(there):
        if not is_quarantine(name):
            return f"{layout.root / name} is not a name that the quarantine uses", _REMOVE
    known = QuarantineLedger.read(layout)  # once more: what has gone meanwhile was noted before
    lost = [] if known is None else [one for name in named if (one := known.missing(name, there)) is not None]
    if lost:
        return f"{layout.root / min(lost)} is missing: the quarantine held it", (
            f"Restore it from a copy. To go on without its events, remove {_path(layout)}"
        )
    return None


def _path(layout: LakeLayout) -> Path:
    return layout.local / "quarantine-ledger.json"
