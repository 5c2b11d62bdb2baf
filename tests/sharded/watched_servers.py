"""A cluster whose servers are watched while a workload runs: one that dies by itself ends the run, with its reason.

Under Wine, mongod 7.0 sometimes dies (of an unhandled exception in ``TransactionCoordinator``, mostly when transactions
over several shards commit while chunks move). The outcome of running operations is then unknown, so nothing can be
compared any more, and anything that waits for the server would wait for minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import TailraceError

_LOOK_S = 0.5


class ServerDiedError(Exception):
    """A server has ended by itself: nothing was compared."""


class WatchedServers:
    """Watches the servers of ``cluster`` in a ``with`` block. ``told`` is called with the error of the first one that
    is found dead, and the block ends with that error, whatever else happens. The server is restarted, so that anything
    that waits for it gets an answer."""

    def __init__(self, cluster: ShardedCluster, told: Callable[[ServerDiedError], None]) -> None:
        self._cluster = cluster
        self._told = told
        self._left = threading.Event()
        self._died: ServerDiedError | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        self._look()
        if self._died is not None and error is not self._died:
            raise self._died from error

    def _watch(self) -> None:
        while not self._left.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        for part in [self._cluster.config, *self._cluster.shards.values()]:
            for number, member in enumerate(part.members):
                # A member that has not been started yet has no process either, and no log.
                if member.log_path.exists() and not member.is_running and self._is_in(part):
                    why = f"{part.name} (mongod {self._cluster.version}) died: {member.last_words()}"
                    if self._died is None:
                        self._died = ServerDiedError(why)
                        self._told(self._died)
                    _revive(part, number)

    def _is_in(self, part: ReplicaSet) -> bool:
        """Whether it is not a former shard, which the workload may have turned off itself."""
        return part is self._cluster.config or any(part is shard for shard in self._cluster.shards.values())


def _revive(part: ReplicaSet, number: int) -> None:
    try:
        part.restart(number)
    except TailraceError as error:
        print(f"{part.name} did not start again: {error}", flush=True)
