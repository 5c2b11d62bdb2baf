"""Which objects are the quarantine of a lake in a store: ``_tailrace/quarantine.json`` names them.

A store renames nothing, so where an object lies cannot say whether it counts. A task uploads it under the name that it
keeps, the commit of its micro-batch names it, and then the index does: it says up to which commit it knows. What the
index does not name, and no commit after that one, does not count. A merge or an erasure uploads what takes the place of
other objects, exchanges the index for one that names it instead, under ``If-Match``, and then removes the others.

The index is the fence between machines, too. It has the session of the stream that has opened the lake last, which
``session.py`` explains; whoever changes it must know that session, as of the very index that is exchanged. So after a
stream on another machine has written its own session into it, nothing that this stream removes as a leftover can be
named by it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError
from tailrace.lake.store.layout import QUARANTINE, LakeLayout, checked_quarantine_name, is_quarantine
from tailrace.lake.store.manifest import Commit
from tailrace.lake.store.session import refuse_other_session

_RESTORE = "Restore it from a copy; without it nobody can say what the quarantine holds"
_TRIES = 8


@dataclass(frozen=True, slots=True)
class QuarantineIndex:
    """The index as it was read with ``tag``: ``files`` count, of all commits up to number ``commit``; ``going`` were
    replaced, and may still have to be removed."""

    session: str
    commit: int
    files: tuple[str, ...]
    going: tuple[str, ...] = ()
    tag: str = ""

    @classmethod
    def read(cls, layout: LakeLayout) -> QuarantineIndex | None:
        """The index of a lake in a store, every name in it checked; ``None`` where there is none."""
        place = _place(layout)
        try:
            content, tag = place.read()
        except FileNotFoundError:
            return None
        value = durable.unsealed(durable.parse_json(content, place), place)
        session, commit, files, going = (value.get(key) for key in ("session", "commit", "files", "going"))
        if not (
            isinstance(session, str)
            and isinstance(commit, int)
            and not isinstance(commit, bool)
            and isinstance(files, list)
            and isinstance(going, list)
        ):
            raise SinkError(f"{place} is damaged: it does not name the files of a quarantine", hint=_RESTORE)
        counting, replaced = (tuple(checked_quarantine_name(one, place) for one in some) for some in (files, going))
        return cls(session, commit, counting, replaced, tag)

    def with_commit(self, commit: Commit | None) -> QuarantineIndex:
        """With the files that ``commit`` names, if the index does not know it yet."""
        if commit is None or not commit.quarantined or commit.number <= self.commit:
            return self
        return replace(self, commit=commit.number, files=tuple(sorted({*self.files, *commit.quarantined})))

    def exchange(self, layout: LakeLayout, known: QuarantineIndex | None) -> None:
        """Put this index in the place of the one that is ``known``. Raises FileExistsError where that is another."""
        value = {"session": self.session, "commit": self.commit, "files": [*self.files], "going": [*self.going]}
        if known is None:
            _place(layout).create(durable.sealed(value))
        else:
            _place(layout).swap(durable.sealed(value), known.tag)


_NONE: Final = QuarantineIndex("", 0, ())


def stored_files(layout: LakeLayout, newest: Commit | None) -> list[ObjectPlace]:
    """The objects of the quarantine, those of the newest micro-batch included that the index does not name yet."""
    known = QuarantineIndex.read(layout) or _NONE
    return [_root(layout) / name for name in known.with_commit(newest).files]


def checked_files(
    layout: LakeLayout, newest: Callable[[], Commit | None], commits: Callable[[], Iterable[Commit]]
) -> list[ObjectPlace]:
    """As ``stored_files``, where another machine may change the quarantine meanwhile, and nobody has looked at the
    index before. ``commits`` gives those that the log keeps; they are read only if there are objects that do not count.
    Raises SinkError where the index was lost or set back, or an object is missing."""
    for _ in range(_TRIES):
        known, listed = QuarantineIndex.read(layout), objects_present(layout)
        last = newest()
        counting = (known or _NONE).with_commit(last).files
        kept: tuple[Commit, ...] = ()
        if listed.difference(counting):
            kept, last = tuple(commits()), newest()  # in this order: a commit after the last one is not the index's yet
            counting = (known or _NONE).with_commit(last).files
        problem = _fault(layout, known, listed, last, kept)
        if not problem:
            return [_root(layout) / name for name in counting]
        if QuarantineIndex.read(layout) == known:
            raise SinkError(problem, hint=_RESTORE)
    raise SinkError(f"{_root(layout) / QUARANTINE} keeps changing", hint="Try again")


def add_commit(layout: LakeLayout, commit: Commit | None) -> None:
    """Let the index name the files of ``commit``. The caller holds the lock."""
    if commit is None or not commit.quarantined:
        return
    for _ in range(_TRIES):
        known = _ours(layout)
        added = known.with_commit(commit)
        if added is known:
            return
        with suppress(FileExistsError):
            added.exchange(layout, known)
            durable.step("commit.quarantine")
            return
    raise _changed(layout)


def replace_files(layout: LakeLayout, replaced: Mapping[str, str | None]) -> None:
    """Let each file be replaced by the object named, which is there, or by nothing; then the replaced ones go. Where
    nothing is to be replaced, those go that an interrupted call has left. The caller holds the lock. Raises SinkError
    where one of them no longer counts, or another machine has changed the quarantine."""
    if not replaced and QuarantineIndex.read(layout) is None:
        return  # a lake that no stream has opened since there is an index
    known = _ours(layout)
    _remove(layout, known.going)
    if not replaced:
        return
    gone = sorted(set(replaced) - set(known.files))
    if gone:
        raise SinkError(f"{_root(layout) / gone[0]} is no longer in the quarantine", hint="Try again")
    made = {name for name in replaced.values() if name is not None}
    files = tuple(sorted({*known.files, *made} - set(replaced)))
    try:
        replace(known, files=files, going=tuple(sorted(replaced))).exchange(layout, known)
    except FileExistsError:
        raise _changed(layout) from None
    durable.step("quarantine.noted")
    _remove(layout, sorted(replaced))


def open_index(layout: LakeLayout, session: str, newest: Commit | None, commits: Iterable[Commit]) -> None:
    """Write the session of a stream that has just opened the lake into the index, with what the ``newest`` micro-batch
    has put aside. ``commits`` are those that the log keeps. Raises SinkError where the index was lost or set back."""
    kept = tuple(commits)
    for _ in range(_TRIES):
        known = QuarantineIndex.read(layout)
        problem = _fault(layout, known, objects_present(layout), newest, kept)
        if problem and QuarantineIndex.read(layout) == known:  # nothing was merged meanwhile
            raise SinkError(problem, hint=_RESTORE)
        if not problem:
            ours = (known or _NONE).with_commit(newest)
            with suppress(FileExistsError):
                replace(ours, session=session).exchange(layout, known)
                return
    raise _changed(layout)


def index_fault(layout: LakeLayout, newest: Commit | None, commits: Iterable[Commit]) -> str | None:
    """What is wrong with the index, in a sentence, as ``open_index`` finds it."""
    return _fault(layout, QuarantineIndex.read(layout), objects_present(layout), newest, commits) or None


def _fault(
    layout: LakeLayout,
    known: QuarantineIndex | None,
    listed: Collection[str],
    newest: Commit | None,
    commits: Iterable[Commit],
) -> str:
    waiting = set() if newest is None else set(newest.quarantined)
    put_aside = [one.number for one in commits if one.quarantined and not waiting.intersection(one.quarantined)]
    if known is None and (put_aside or set(listed) - waiting):
        return f"{_place(layout)} is missing, and the lake has a quarantine"
    if known is None:
        return ""
    if max(put_aside, default=0) > known.commit:
        return f"{_place(layout)} is older than the lake's log"
    lost = sorted(set(known.with_commit(newest).files) - set(listed))
    return f"{_root(layout) / lost[0]} is missing: the quarantine names it" if lost else ""


def uncounted(layout: LakeLayout, newest: Commit | None) -> list[ObjectPlace]:
    """Objects of the quarantine that do not count: of running or interrupted work."""
    places = [_root(layout) / name for name in sorted(objects_present(layout))]
    counted = {place.key for place in stored_files(layout, newest)} if places else set()
    return [place for place in places if place.key not in counted]


def objects_present(layout: LakeLayout) -> set[str]:
    """The names of all objects of the quarantine, whether they count or not."""
    found = (f"{QUARANTINE}/{one.name}" for one in (_root(layout) / QUARANTINE).objects())
    return {name for name in found if is_quarantine(name)}


def _ours(layout: LakeLayout) -> QuarantineIndex:
    known = QuarantineIndex.read(layout)
    if known is None:
        raise SinkError(
            f"{_place(layout)} is missing", hint="Start the stream again: that makes it, or says what is lost"
        )
    refuse_other_session(layout, known.session)
    return known


def _remove(layout: LakeLayout, names: Collection[str] | Sequence[str]) -> None:
    for name in names:
        (_root(layout) / name).unlink(missing_ok=True)
        durable.step("quarantine.removed")


def _changed(layout: LakeLayout) -> SinkError:
    hint = "A lake has one stream. Start again if this is it"
    return SinkError(f"another program has changed {_place(layout)} meanwhile", hint=hint)


def _root(layout: LakeLayout) -> ObjectPlace:
    assert isinstance(layout.root, ObjectPlace)
    return layout.root


def _place(layout: LakeLayout) -> ObjectPlace:
    return _root(layout) / "_tailrace" / "quarantine.json"
