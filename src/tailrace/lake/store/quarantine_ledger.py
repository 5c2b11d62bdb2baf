"""Which files of a quarantine in a directory must be there: ``_tailrace/quarantine-ledger.json``.

In a directory a file counts because it lies in ``_quarantine``, so one that is lost, or that somebody puts there, would
change what the quarantine holds, and nobody could tell. The ledger names the files of all commits up to one, and the
log those of the commits after it: the ledger is updated before the log drops any (``keep_up``). ``replaced`` says which
of these files were merged since, or erased as a whole. That is written before a file is removed, so after a crash it
may name files that are still there, but it never lacks one that is gone.

The ledger names its lake, and ``lake.json`` says that there is one, so the ledger of another lake is refused, and so is
a missing one. An older copy names too few files, or some that were merged since, or it ends before the log begins.

A lake of an older version of Tailrace has no ledger until it puts events aside again. The ledger then begins with the
files that are there: what was lost before is not known.

In a store the index says what counts (``quarantine_index.py``), and there is no ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tailrace.base import durable
from tailrace.errors import SinkError
from tailrace.lake.store.delta_log import FORMAT, check_format
from tailrace.lake.store.lake_root import read_sealed, write_sealed
from tailrace.lake.store.layout import LakeLayout, checked_quarantine_name, is_quarantine
from tailrace.lake.store.manifest import Commit

_REMOVE: Final = "Move it out of the directory"
#: In ``lake.json``: the lake has a ledger.
_MARK: Final = "quarantineLedger"


@dataclass(frozen=True, slots=True)
class QuarantineLedger:
    """The ledger: ``files`` count, of all commits up to number ``commit``. ``replaced`` has a file's successor, or
    ``None`` where all of its events were erased."""

    commit: int
    files: frozenset[str]
    replaced: Mapping[str, str | None]

    @classmethod
    def read(cls, layout: LakeLayout) -> QuarantineLedger | None:
        """The ledger, every name in it checked; ``None`` where the lake has none yet. Raises SinkError where it was
        lost, or is not this lake's."""
        path, lake = _path(layout), _lake(layout)
        known = durable.read_sealed(path)
        if known is None:
            if _MARK in lake:
                raise SinkError(f"{path} is missing, and the lake has a quarantine", hint=_restore(layout))
            return None
        check_format(known, path)
        if known.get("lake") != lake.get("id"):
            raise SinkError(f"{path} is another lake's", hint=_restore(layout))
        commit, files, replaced = (known.get(key) for key in ("commit", "files", "replaced"))
        if (
            not isinstance(commit, int)
            or isinstance(commit, bool)
            or not isinstance(files, list)
            or not isinstance(replaced, dict)
        ):
            raise SinkError(f"{path} is damaged: it does not name files of the quarantine", hint=_restore(layout))
        for name in (*files, *replaced, *(one for one in replaced.values() if one is not None)):
            checked_quarantine_name(name, path)
        return cls(commit, frozenset(files), replaced)

    def write(self, layout: LakeLayout) -> None:
        """Write it. The caller holds the lock. Raises LakeFullError."""
        value = {
            "format": FORMAT,
            "lake": _lake(layout).get("id"),
            "commit": self.commit,
            "files": sorted(self.files),
            "replaced": dict(self.replaced),
        }
        with durable.writing(_path(layout)):
            durable.write_sealed(_path(layout), value)

    def up_to(self, layout: LakeLayout, commits: Callable[[int], Iterable[Commit]]) -> QuarantineLedger:
        """With the files that the commits after ``commit`` name. Raises SinkError where the log has dropped some."""
        last, files = self.commit, set(self.files)
        for one in commits(self.commit):
            if last == self.commit and one.number > last + 1:
                raise SinkError(f"{_path(layout)} is older than the lake's log", hint=_restore(layout))
            last = one.number
            files.update(one.quarantined)
        return replace(self, commit=last, files=frozenset(files))

    def settled(self, present: Collection[str]) -> QuarantineLedger:
        """With a file's successor in its place, where it was replaced. A file that is still there keeps its entry in
        ``replaced``: an erasure may be about to remove it."""
        held = frozenset(one for name in self.files if (one := self._holder(name, present)) is not None)
        return replace(self, files=held, replaced={one: self.replaced[one] for one in held if one in self.replaced})

    def lost(self, present: Collection[str]) -> list[str]:
        """The files that are missing, sorted."""
        return sorted({one for name in self.files if (one := self._holder(name, present)) is not None} - set(present))

    def strange(self, present: Collection[str]) -> list[str]:
        """The files that are there and that the lake has not put aside, sorted."""
        made = {one for one in self.replaced.values() if one is not None}
        return sorted(set(present) - self.files - set(self.replaced) - made)

    def _holder(self, name: str, present: Collection[str]) -> str | None:
        """Which file holds the events of the file ``name``, or should hold them. ``None`` where they were erased."""
        while name not in present and name in self.replaced:
            after = self.replaced[name]
            if after is None:
                return None
            name = after
        return name


def begin_ledger(layout: LakeLayout, number: int, present: Collection[str]) -> None:
    """Begin the ledger, if there is none yet, before the first commit after ``number`` that puts events aside, with the
    files that are ``present``. The caller holds the lock. Raises SinkError where it was lost or is damaged."""
    if QuarantineLedger.read(layout) is None:
        _begin(layout, number, present)
    _mark(layout)


def keep_up(
    layout: LakeLayout, present: Callable[[], Collection[str]], commits: Callable[[int], Iterable[Commit]]
) -> None:
    """Let the ledger name the files of all ``commits`` so far, before the log drops any. The caller holds the lock.
    Raises LakeFullError, and SinkError where it was lost, is damaged, or older than the log."""
    known = QuarantineLedger.read(layout)
    if known is not None:
        known.up_to(layout, commits).settled(present()).write(layout)


def note_replaced(layout: LakeLayout, replaced: Mapping[str, str | None]) -> QuarantineLedger | None:
    """Note that files are about to go. Returns the ledger as it was. The caller holds the lock."""
    known = QuarantineLedger.read(layout)
    if known is not None and replaced:
        replace(known, replaced={**known.replaced, **replaced}).write(layout)
    return known


def go_on_without(
    layout: LakeLayout, number: int, present: Collection[str], commits: Callable[[int], Iterable[Commit]]
) -> int | None:
    """Let the ledger name the files that are ``present`` after ``number``, the newest commit. Returns how many were
    lost, or ``None`` where the ledger could not tell: then all that is there counts. The caller holds the lock."""
    with suppress(SinkError):
        known = QuarantineLedger.read(layout)
        if known is not None:
            known = known.up_to(layout, commits).settled(present)
            lost = set(known.lost(present))
            replace(known, commit=number, files=known.files - lost).write(layout)
            return len(lost)
    _begin(layout, number, present)
    _mark(layout)
    return None


def ledger_fault(
    layout: LakeLayout,
    present: Callable[[], Collection[str]],
    commits: Callable[[int], Iterable[Commit]],
) -> tuple[str, str] | None:
    """What is wrong with the files of the quarantine, with a hint. ``present`` gives the names of those that are there,
    and ``commits`` the commits after a number. Takes no lock: a fault is only one that a second look finds too. Raises
    SinkError where the ledger itself was lost, or cannot be this lake's."""
    first = _look(layout, present, commits)
    return first if first is None or _look(layout, present, commits) == first else None


def _look(
    layout: LakeLayout,
    present: Callable[[], Collection[str]],
    commits: Callable[[int], Iterable[Commit]],
) -> tuple[str, str] | None:
    assert isinstance(layout.root, Path)
    named = _up_to_now(layout, commits)
    there = present()
    for name in sorted(there):
        if not is_quarantine(name):
            return f"{layout.root / name} is not a name that the quarantine uses", _REMOVE
    known = QuarantineLedger.read(layout)  # once more: what has gone meanwhile was noted before
    if named is None or known is None:
        return None
    now = replace(named, replaced={**named.replaced, **known.replaced})
    if lost := now.lost(there):
        return f"{layout.root / lost[0]} is missing: the quarantine held it", _restore(layout)
    if strange := replace(now, files=now.files | known.files).strange(there):
        return f"{layout.root / strange[0]} is not a file that the lake has put aside", (
            f"{_REMOVE}. If {_path(layout)} is an older copy, restore the newer one"
        )
    return None


def _up_to_now(layout: LakeLayout, commits: Callable[[int], Iterable[Commit]]) -> QuarantineLedger | None:
    """The ledger with the files of all commits so far. Ledger and log may both change between the two reads."""
    known = QuarantineLedger.read(layout)
    try:
        return None if known is None else known.up_to(layout, commits)
    except SinkError:
        if known == QuarantineLedger.read(layout):
            raise
        return _up_to_now(layout, commits)


def _begin(layout: LakeLayout, number: int, present: Collection[str]) -> None:
    QuarantineLedger(number, frozenset(one for one in present if is_quarantine(one)), {}).write(layout)
    durable.step("quarantine.ledger")


def _mark(layout: LakeLayout) -> None:
    """Let ``lake.json`` say that there is a ledger, once there is one."""
    lake = _lake(layout)
    if lake and _MARK not in lake:
        with durable.writing(Path(str(layout.identity))):
            write_sealed(layout.identity, {**lake, _MARK: True})


def _lake(layout: LakeLayout) -> Mapping[str, Any]:
    return read_sealed(layout.identity) or {}


def _restore(layout: LakeLayout) -> str:
    way_out = f"tailrace lake compact {layout.root} --accept-lost"
    return f"Restore it from the newest copy. To go on without what the quarantine has lost: {way_out}"


def _path(layout: LakeLayout) -> Path:
    return layout.local / "quarantine-ledger.json"
