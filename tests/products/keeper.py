"""One product in one run: its store, the copies that were made of it, and its processes."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tailrace.core.oplog.cluster_time import ClusterTime
from tests.products.children import Child, Outcome, carried_out, crash
from tests.products.product import Job, Product
from tests.products.spark_child import SparkChild

_COPIES_MAX = 3
#: The share of runs that read from the hidden member, if there is one.
_HIDDEN = 0.3


class Running(Protocol):
    """A run that has begun."""

    def outcome(self) -> Outcome:
        """Wait for its end."""


class _OnSpark:
    """A run in a thread of this process."""

    def __init__(self, product: Product, job: Job) -> None:
        self._product, self._job = product, job
        self._ended: list[Outcome] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._ended.append(carried_out(self._product, self._job))
        except Exception as error:  # noqa: BLE001  as of a child: it is told as wrong
            self._ended.append(Outcome("wrong", crash(error)))

    def outcome(self) -> Outcome:
        """See ``Running``."""
        self._thread.join()
        return self._ended[0]


class Killed:
    """A run that SIGKILL ends after a while, whatever it is doing then."""

    def __init__(self, child: Child, after_s: float) -> None:
        self._child, self._after_s = child, after_s
        self.was_running = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(self._after_s)
        self.was_running = self._child.kill()

    def outcome(self) -> Outcome:
        """See ``Running``."""
        self._thread.join()
        return Outcome("killed")


class Keeper:
    """Runs a product forward, and keeps a few older copies of its store."""

    def __init__(self, product: Product, folder: Path, job: Job) -> None:
        self.product = product
        self.root = folder / product.name / "store"
        self._copies = folder / f"{product.name}.copies"
        self._job = replace(job, product=product.name, folder=str(self.root))
        self._count = 0

    @property
    def name(self) -> str:
        return self.product.name

    @property
    def leases(self) -> str:
        """The deployment with the positions that are kept in MongoDB."""
        return str(self._job.options.get("leases") or self._job.uri)

    @property
    def has_begun(self) -> bool:
        return self._count > 0

    def job(self, until: ClusterTime, more: Mapping[str, Any] | None = None, **changed: Any) -> Job:
        """The next run. ``changed``: fields with other values this time; ``more``: further options."""
        options = {**self._job.options, **(more or {})}
        hidden, chance = str(options["hidden"]), random.Random(f"{self._job.seed} {self.name} {self._count}").random()
        if hidden and not self.product.has_leases and chance < _HIDDEN:
            changed = {"uri": hidden, **changed}
        return replace(self._job, until=int(until), seed=self._job.seed + self._count, options=options, **changed)

    def run(self, job: Job) -> Outcome:
        """Run it to its end."""
        return self.begin(job).outcome()

    def begin(self, job: Job) -> Running:
        """Begin it, in a process of its own or on the harness's Spark session."""
        self._count += 1
        return _OnSpark(self.product, job) if self.product.on_spark else Child(job)

    def begin_apart(self, job: Job) -> SparkChild:
        """Begin one of Spark's in a process of its own, which can be killed."""
        self._count += 1
        return SparkChild(job, self.root.parent / "apart")

    def forget(self) -> None:
        """Begin again, with an empty store and no copies."""
        shutil.rmtree(self._copies, ignore_errors=True)
        self._count = 0

    # -- copies -----------------------------------------------------------------------------------------------------

    def keep(self) -> Path:
        """Copy the store as it is now."""
        copy = self._copies / f"{self._count:06d}"
        if copy.exists():
            shutil.rmtree(copy)
        if self.root.exists():
            shutil.copytree(self.root, copy, symlinks=True)
        else:
            copy.mkdir(parents=True)
        self.product.keep_leases(self._job, copy)
        for old in self.copies()[:-_COPIES_MAX]:
            shutil.rmtree(old)
        return copy

    def copies(self) -> list[Path]:
        """From the oldest on."""
        return sorted(self._copies.iterdir()) if self._copies.exists() else []

    def restore(self, copy: Path) -> None:
        """Replace the store by a copy."""
        _replace(self.root, copy)

    def put_leases_back(self, copy: Path) -> None:
        """Restore the store's part in MongoDB from a copy."""
        self.product.put_leases_back(self._job, copy)

    def restore_part(self, copy: Path, part: str, rng: random.Random) -> str | None:
        """Restore the files that match a pattern from a copy, all or one of them; a file that the copy lacks is
        removed. Returns what was restored or removed, ``None`` if both are already the same."""
        if part == "newest log":
            return self._lose_newest_log(rng)
        names = {path.relative_to(base) for base in (self.root, copy) for path in base.glob(part)}
        changed = sorted(name for name in names if not _same(self.root / name, copy / name))
        if changed and rng.random() < 0.5:
            changed = [rng.choice(changed)]
        for name in changed:
            _replace(self.root / name, copy / name)
        return ", ".join(map(str, changed)) or None

    def _lose_newest_log(self, rng: random.Random) -> str | None:
        """Lose the newest file of one table's log."""
        logs = [sorted(folder.glob("*.json")) for folder in sorted(self.root.glob("**/_delta_log"))]
        longer = [files for files in logs if len(files) > 1]
        if not longer:
            return None
        lost = rng.choice(longer)[-1]
        lost.unlink()
        return str(lost.relative_to(self.root))

    def files(self) -> list[Path]:
        """Our files, which can be damaged."""
        found = self.root.glob(self.product.own_files)
        return sorted(path for path in found if path.is_file() and path.stat().st_size > 0)


def _replace(here: Path, there: Path) -> None:
    if here.is_dir():
        shutil.rmtree(here)
    else:
        here.unlink(missing_ok=True)
    if there.is_dir():
        shutil.copytree(there, here, symlinks=True)
    elif there.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(there, here)


def _same(here: Path, there: Path) -> bool:
    if here.is_dir() or there.is_dir():
        return _contents(here) == _contents(there)
    return here.exists() and there.exists() and here.read_bytes() == there.read_bytes()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
