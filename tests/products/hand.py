"""A seeded hand that restores, damages, fills, kills and points elsewhere, and the required outcome.

After each, a product is *equal* to what the server says, or *refuses* with a sentence; after a kill or a full disk it
goes on, and after a refusal too, once the cause is removed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.kills.children import EVENTS, pairs
from tests.products.children import Child, Outcome
from tests.products.following import damage_token
from tests.products.keeper import Keeper
from tests.products.stores import losing_answers
from tests.products.truth import Truth
from tests.small_disk import SmallDisk

_PAGE: Final = 4096
_ROOM: Final = 8 << 20
_DAMAGE: Final = ("bit", "cut", "zeros", "swap")


@dataclass(frozen=True)
class Elsewhere:
    """Another deployment of the same name, with other documents under the same names, and the truth about it.
    ``writes`` writes to it."""

    uri: str
    truth: Path
    writes: Any

    def write(self) -> None:
        """Write a little more, so that its history goes on past everything that was read from the other deployment."""
        self.writes.write_more()
        self.writes.pause(Truth(self.truth))

    @property
    def pause(self) -> ClusterTime:
        return Truth(self.truth).pauses()[-1]


@dataclass(frozen=True)
class Step:
    """What the hand did, and the outcome. ``wrong`` is empty if that is as required."""

    what: str
    outcome: Outcome
    wrong: str = ""


class Hand:
    """The faults of one run, by its seed. ``partial_uri`` names a user who may not read everything. ``kinds``: only
    these, by name, or with the part or the files that are to be harmed: ``older part:lake``, ``bit:*/data.mdb``."""

    def __init__(
        self,
        seed: int,
        elsewhere: Elsewhere | None,
        partial_uri: str | None = None,
        kinds: frozenset[str] = frozenset(),
    ) -> None:
        self._rng = random.Random(f"tailrace hand {seed}")
        self._elsewhere = elsewhere
        self._partial_uri = partial_uri
        self._only: dict[str, list[str]] = {}
        for kind in sorted(kinds):
            name, _, to = kind.partition(":")
            self._only.setdefault(name, []).extend([to] if to else [])

    def faults(self, keeper: Keeper) -> list[str]:
        """The names of what can be done to a product now."""
        product = keeper.product
        found = ["kill"]
        if product.copies and self._partial_uri is not None:
            found.append("rights")
        if product.is_in_store:
            found.append("lost answers")
        if product.keeps_tokens and pairs(keeper.root / EVENTS):
            found.append("token")
        if keeper.has_begun and self._elsewhere is not None:
            found += ["elsewhere", "elsewhere"]
        if product.has_leases and keeper.has_begun and keeper.copies():
            found += ["older leases", "older leases"]
        if product.has_files and keeper.has_begun:
            if product.own_files != "none":
                found += ["bit", "bit", "cut", "delete", "zeros", "swap"]
            if keeper.copies():
                found += ["older", "older", *(["older part"] * 2 if product.parts else [])]
            if product.parts:
                found.append("lost part")
            if can_mount():
                found.append("full disk")
        return [one for one in found if not self._only or one in self._only]

    def do(self, fault: str, keeper: Keeper, until: ClusterTime) -> Step:
        """Cause the fault while the product is brought forward to ``until``."""
        acts: dict[str, Callable[[Keeper, ClusterTime], Step]] = {
            "kill": self._kill,
            "full disk": self._full_disk,
            "lost answers": self._lost_answers,
            "elsewhere": self._point_elsewhere,
            "rights": self._partial_rights,
            "older leases": self._older_leases,
            "token": self._damaged_token,
        }
        act = acts.get(fault)
        return act(keeper, until) if act is not None else self._store(fault, keeper, until)

    # -- what may not be refused afterwards ---------------------------------------------------------------------------

    def _kill(self, keeper: Keeper, until: ClusterTime) -> Step:
        """SIGKILL; sometimes a Spark query is stopped instead."""
        if keeper.product.on_spark:
            return self._stop(keeper, until) if self._rng.random() < 0.3 else self._kill_spark(keeper, until)
        child = Child(keeper.job(until))
        time.sleep(self._rng.random() ** 2 * 2.0)
        was_running = child.kill()
        return self._has_to_be_equal("killed" if was_running else "killed after its end", keeper, until)

    def _kill_spark(self, keeper: Keeper, until: ClusterTime) -> Step:
        """SIGKILL to a driver while it works, and sometimes to one of its workers first."""
        child = keeper.begin_apart(keeper.job(until, {"only": "advance"}))
        what = "killed"
        try:
            if child.wait_for_work():
                time.sleep(self._rng.random() ** 2 * 3.0)
                if self._rng.random() < 0.4 and child.kill_a_worker(self._rng):
                    what = "worker and driver killed"
                    time.sleep(self._rng.random())
        finally:
            was_running = child.kill()
        return self._has_to_be_equal(what if was_running else f"{what} after its end", keeper, until)

    def _stop(self, keeper: Keeper, until: ClusterTime) -> Step:
        """A query that is stopped; the session goes on."""
        stopped = {"only": "advance", "stopped_after_s": 0.5 + self._rng.random() * 5.0}
        first = keeper.run(keeper.job(until, stopped))
        if not first.is_equal and not is_a_limit(keeper, first):
            return Step("stopped", first, f"{first.kind}: {first.text}")
        return self._has_to_be_equal("stopped", keeper, until)

    def _full_disk(self, keeper: Keeper, until: ClusterTime) -> Step:
        with small(keeper.root.parent) as disk:
            room = self._rng.choice((0, 1, 3, 10, 40, 200)) * _PAGE
            disk.leave(room)
            first = keeper.run(keeper.job(until))
            disk.make_room()
        what = f"disk with {room} bytes left ({first.kind})"
        if first.kind == "wrong":
            return Step(what, first, first.text)
        return self._has_to_be_equal(what, keeper, until)

    def _lost_answers(self, keeper: Keeper, until: ClusterTime) -> Step:
        """An object store that does what it is asked and does not say so, or breaks off."""
        with losing_answers(self._rng.randrange(1 << 30)):
            outcome = keeper.run(keeper.job(until))
        if not outcome.is_equal and not is_a_limit(keeper, outcome):
            return Step("lost answers", outcome, f"{outcome.kind}: {outcome.text}")
        return Step("lost answers", outcome)

    def _has_to_be_equal(self, what: str, keeper: Keeper, until: ClusterTime) -> Step:
        outcome = keeper.run(keeper.job(until))
        fine = outcome.is_equal or is_a_limit(keeper, outcome)
        wrong = "" if fine else f"{outcome.kind} afterwards: {outcome.text}"
        return Step(what, outcome, wrong)

    # -- what may be refused ------------------------------------------------------------------------------------------

    def _point_elsewhere(self, keeper: Keeper, until: ClusterTime) -> Step:
        """The other deployment is refused, or accepted with all of its contents; then the own one goes on."""
        there = self._elsewhere
        assert there is not None
        there.write()
        kept = keeper.keep()
        # Positions that are kept in MongoDB stay where they are, as those in files do.
        more = {"elsewhere": True, "leases": keeper.leases}
        outcome = keeper.run(keeper.job(there.pause, more, uri=there.uri, truth=str(there.truth)))
        if outcome.kind == "wrong":
            keeper.restore(kept)
            return Step("elsewhere", outcome, outcome.text)
        if outcome.is_equal or keeper.product.own_files == "none":
            keeper.restore(kept)
        # After a refusal the store must be as it was.
        return self._goes_on("elsewhere", outcome, keeper, until)

    def _partial_rights(self, keeper: Keeper, until: ClusterTime) -> Step:
        """A user who may read one database begins a store of the whole deployment: it is refused, or complete."""
        assert self._partial_uri is not None
        folder = keeper.root.parent / "rights"
        job = keeper.job(until, {"patterns": ["*.*"]}, uri=self._partial_uri, folder=str(folder))
        outcome = keeper.run(job)
        shutil.rmtree(folder, ignore_errors=True)
        return Step("rights", outcome, outcome.text if outcome.kind == "wrong" else "")

    def _damaged_token(self, keeper: Keeper, until: ClusterTime) -> Step:
        """A consumer's token is altered: it is refused, or stands for another place. What the consumer then misses does
        not count."""
        kept = keeper.keep()
        what = f"token {damage_token(keeper.root, self._rng)}"
        outcome = keeper.run(keeper.job(until, {"only": "advance"}))
        keeper.restore(kept)
        if outcome.kind == "wrong":
            return Step(what, outcome, outcome.text)
        return self._goes_on(what, outcome, keeper, until)

    def _older_leases(self, keeper: Keeper, until: ClusterTime) -> Step:
        """The database with the positions is restored from an older copy: what was done since is done again, or refused
        by its targets as stale."""
        kept = keeper.keep()
        copies = [copy for copy in keeper.copies() if copy != kept]
        keeper.put_leases_back(self._rng.choice(copies or [kept]))
        outcome = keeper.run(keeper.job(until))
        if outcome.is_equal:
            return Step("older leases", outcome)
        keeper.put_leases_back(kept)
        if outcome.kind == "wrong":
            return Step("older leases", outcome, outcome.text)
        return self._goes_on("older leases", outcome, keeper, until)

    def _store(self, fault: str, keeper: Keeper, until: ClusterTime) -> Step:
        """The altered store is refused, or does no harm. Then the good one is restored."""
        kept = keeper.keep()
        what = self._harm(fault, keeper, kept)
        outcome = keeper.run(keeper.job(until))
        if outcome.kind == "wrong":
            keeper.restore(kept)
            return Step(what, outcome, outcome.text)
        may_stay = keeper.product.makes_again or fault not in ("lost part", "delete")
        may_stay = may_stay and not (keeper.product.is_read_in_part and fault in _DAMAGE)
        if outcome.is_equal and may_stay and self._rng.random() < 0.5:
            return Step(what, outcome)  # and go on with it
        keeper.restore(kept)
        return self._goes_on(what, outcome, keeper, until)

    def _goes_on(self, what: str, outcome: Outcome, keeper: Keeper, until: ClusterTime) -> Step:
        then = keeper.run(keeper.job(until))
        fine = then.is_equal or is_a_limit(keeper, then)
        wrong = "" if fine else f"the good store, after that, is {then.kind}: {then.text}"
        return Step(what, outcome, wrong)

    def _harm(self, fault: str, keeper: Keeper, kept: Path) -> str:
        rng = self._rng
        copies = [copy for copy in keeper.copies() if copy != kept]
        if fault == "older":
            keeper.restore(rng.choice(copies or [kept]))
            return "older"
        if fault in ("older part", "lost part"):
            source = rng.choice(copies or [kept])
            if fault == "lost part":
                source = keeper.root.parent / "nothing"
                source.mkdir(exist_ok=True)
            parts = self._only.get(fault) or keeper.product.parts
            for part in rng.sample(parts, len(parts)):
                if (found := keeper.restore_part(source, part, rng)) is not None:
                    return f"{fault} {part}: {found}"
            return f"{fault}: nothing differs"
        wanted = self._only.get(fault) or ["*"]
        files = [path for path in keeper.files() if any(fnmatch.fnmatch(str(path), one) for one in wanted)]
        if not files:
            return f"{fault} of nothing"
        # Most files are of a few kinds: the kind is chosen first, so that each one is hit.
        kinds = sorted({_kind(path) for path in files})
        kind = rng.choice(kinds)
        chosen = rng.choice([path for path in files if _kind(path) == kind])
        return f"{fault} {_damage(rng, fault, chosen, files, keeper.root)}"


def is_a_limit(keeper: Keeper, outcome: Outcome) -> bool:
    """Whether a product has refused something that, according to the pages, it cannot do."""
    return outcome.kind == "refused" and any(limit in outcome.text for limit in keeper.product.limits)


def _kind(path: Path) -> str:
    return f"{path.parent.name if path.parent.name.startswith('_') else ''} {path.suffix or path.name}"


def _damage(rng: random.Random, fault: str, path: Path, files: list[Path], root: Path) -> str:
    name = str(path.relative_to(root))
    raw = bytearray(path.read_bytes())
    match fault:
        case "bit":
            place = rng.randrange(len(raw))
            raw[place] ^= 1 << rng.randrange(8)
            name = f"{place} of {len(raw)} of {name}"
        case "cut":
            del raw[rng.randrange(len(raw)) :]
        case "zeros":
            place = rng.randrange(len(raw)) // _PAGE * _PAGE
            raw[place : place + _PAGE] = bytes(len(raw[place : place + _PAGE]))
            name = f"{place} of {len(raw)} of {name}"
        case "delete":
            path.unlink()
            return name
        case "swap":
            others = [one for one in files if one.suffix == path.suffix and one.parent == path.parent and one != path]
            if others:
                other = rng.choice(others)
                swapped = other.read_bytes()
                other.write_bytes(raw)
                raw = bytearray(swapped)
                name = f"{name} and {other.name}"
    path.write_bytes(raw)
    return name


# -- a disk of its own ------------------------------------------------------------------------------------------------


def can_mount() -> bool:
    """Whether this user may mount a file system."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and not _refused


_refused: list[bool] = []


@contextmanager
def small(folder: Path) -> Iterator[SmallDisk]:
    """Make a folder a file system of its own inside the block, with a little more room than its files need."""
    away = folder.with_name(f"{folder.name}.away")
    folder.mkdir(parents=True, exist_ok=True)
    folder.rename(away)
    folder.mkdir()
    # Its pages are memory, including those that are to be missing.
    size = sum(path.stat().st_size + _PAGE for path in away.rglob("*")) + _ROOM
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False)
    if made.returncode != 0:
        _refused.append(True)
    try:
        shutil.copytree(away, folder, symlinks=True, dirs_exist_ok=True)
        yield SmallDisk(folder)
        shutil.rmtree(away)
        shutil.copytree(folder, away, symlinks=True)
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        away.rename(folder)
