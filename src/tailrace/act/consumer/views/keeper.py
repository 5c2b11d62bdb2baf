"""The two listeners of a view, one for each direction."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from tailrace.act.consumer.change import Change
from tailrace.act.consumer.lease import LeaseStore
from tailrace.act.consumer.listener import Listener
from tailrace.act.consumer.views.documents import BATCH
from tailrace.act.consumer.views.totals import Totals
from tailrace.act.consumer.views.totals_upkeep import TotalsUpkeep
from tailrace.act.consumer.views.upkeep import ViewUpkeep
from tailrace.act.consumer.views.view import View
from tailrace.errors import UsageError
from tailrace.watch.client.client import Client

#: Changes of targets that are handled together. To handle one again does no harm.
COMMIT_EVERY: Final = 1_000
_BEGIN_S: Final = 120.0
_STEP_S: Final = 0.05

_log = logging.getLogger("tailrace.consumer")


class _StoppedError(Exception):
    """The keeper was stopped at its first start."""


class _Targets:
    """The handler for changes of the target."""

    def __init__(self, upkeep: ViewUpkeep) -> None:
        self._upkeep = upkeep

    def __call__(self, change: Change) -> None:
        self._upkeep.target_changed(change)

    def handle_batch(self, changes: Sequence[Change]) -> int:
        return self._upkeep.targets_changed(changes)


class _TotalsSource:
    """The handler for changes of the source of totals."""

    def __init__(self, upkeep: TotalsUpkeep) -> None:
        self._upkeep = upkeep

    def __call__(self, change: Change) -> None:
        self._upkeep.source_changed(change)

    def handle_batch(self, changes: Sequence[Change]) -> int:
        return self._upkeep.sources_changed(changes)


class ViewKeeper:
    """Keeps a view, or totals: a listener follows the source and one the target, each under a lease of its own, so that
    as many processes as one likes may run the same keeper.

    At its first start it begins to follow the source first, and then handles a copy of the existing targets
    (``start="snapshot"``), so nothing is missed between the two. With totals, the ledger is written in between, and
    ``start`` waits until that is done.

    Args:
        client: from ``tailrace.connect()``
        store: where leases and positions are kept
        resource: the leases are called ``<resource>/source`` and ``<resource>/target``; by default ``view <name>``
        options: further options for both listeners (``partitions``, ``commit_every``, ``lease_seconds``, ...)
    """

    def __init__(
        self,
        client: Client[Any],
        view: View | Totals,
        *,
        store: LeaseStore,
        resource: str | None = None,
        batch: int = BATCH,
        **options: Any,
    ) -> None:
        self.upkeep: ViewUpkeep
        followed: Any
        if isinstance(view, Totals):
            self.upkeep = counting = TotalsUpkeep(client, view, batch=batch)
            followed = _TotalsSource(counting)
        else:
            self.upkeep = ViewUpkeep(client, view, batch=batch)
            followed = self.upkeep.source_changed
        self._store = store
        name = resource or f"view {view.name} of {view.target}"
        if options.get("on_history_lost") == "snapshot":
            # A copy of the source does not show which of its documents were deleted.
            raise UsageError(
                "a view cannot recover from lost history with a copy of its source (on_history_lost='snapshot')",
                hint="After error 286, start it under another resource: the fields of all targets are written again",
            )
        shared: dict[str, Any] = {"store": store, "on_invalidate": "resume", "commit_every": COMMIT_EVERY, **options}
        shared.setdefault("commit_interval", 1.0)
        self._source = Listener(
            _collection(client, view.source),
            followed,
            resource=f"{name}/source",
            start="now",
            **shared,
        )
        self._target = Listener(
            _collection(client, view.target),
            _Targets(self.upkeep),
            resource=f"{name}/target",
            start="snapshot",
            full_document="updateLookup",
            **shared,
        )
        self._stopped = threading.Event()
        #: One that is stopped at its start has not begun to follow the target.
        self._begun: list[Listener] = []

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listener of the source and that of the target."""
        return (self._source, self._target)

    def start(self) -> Self:
        """Keep the view in threads of their own. Returns when both listeners have begun, or others hold the leases.
        Raises UsageError if the view cannot be written, and at the first start if a target names several sources."""
        self.upkeep.check_deployment()
        before = self._store.read(self._target.resource)
        is_first = before is None or before.position is None
        if is_first:
            self.upkeep.check_targets()
            if isinstance(self.upkeep, TotalsUpkeep):
                self.upkeep.begin()
        if not self.upkeep.has_index():
            _log.warning(*self.upkeep.without_index)
        self._begin(self._source)
        try:
            if self._source_has_begun() and is_first and isinstance(self.upkeep, TotalsUpkeep):
                # Before the targets' listener writes its first position: a keeper that is killed here does it again.
                with suppress(_StoppedError):
                    self.upkeep.fill(check=self._check_stopped)
        except BaseException:
            self.stop()
            raise
        if not self._stopped.is_set() and not self._source_has_ended():
            self._begin(self._target)
        return self

    def _begin(self, listener: Listener) -> None:
        self._begun.append(listener)
        listener.start()

    def _source_has_ended(self) -> bool:
        """Whether it has, also by an error: our own ``join`` raises that."""
        try:
            return self._source.join(0)
        except Exception:  # noqa: BLE001
            return True

    def _source_has_begun(self) -> bool:
        """Wait until the source is followed, by whomever. Totals must not be computed before."""
        deadline = time.monotonic() + _BEGIN_S
        while not self._stopped.wait(_STEP_S) and not self._source_has_ended():
            lease = self._store.read(self._source.resource)
            if lease is not None and lease.position is not None:
                return True
            if time.monotonic() > deadline and not isinstance(self.upkeep, TotalsUpkeep):
                break
        return False

    def _check_stopped(self) -> None:
        if self._stopped.is_set() or self._source_has_ended():
            raise _StoppedError

    def stop(self) -> None:
        """Ask both to end, from any thread."""
        self._stopped.set()
        self._source.stop()
        self._target.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, ``timeout`` seconds at most. Raises what ended one of them; the other is stopped then."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                ended = [one.join(_STEP_S) for one in self._begun]
            except BaseException:
                self.stop()
                raise
            if all(ended):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def run(self) -> None:
        """Keep the view until ``stop()``."""
        self.start()
        self.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        if error is None:
            self.join()


def _collection(client: Client[Any], namespace: str) -> Any:
    database, _, name = namespace.partition(".")
    return client[database][name]
