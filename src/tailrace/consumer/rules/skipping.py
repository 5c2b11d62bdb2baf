"""What a listener does where an operator wants its next change left out: part of ``rules.listener``."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from tailrace.consumer.rules.errors import LeaseStoreUnavailable
from tailrace.consumer.rules.need import Need, Outcome, Pulled, SkipChange
from tailrace.consumer.rules.ownership import Ownership
from tailrace.consumer.rules.position import StreamPosition
from tailrace.consumer.rules.settings import ListenerStatistics

Steps = Generator[Need, Outcome, Any]


class SkippingLogic:
    """The attributes and steps are those of a ``ListenerLogic``."""

    statistics: ListenerStatistics
    _position: StreamPosition | None
    _again: int
    _ask: Any
    _changes: Any
    _commit: Any
    _doubt: Any
    _invalidated: Any
    _moved: Any
    _open: Any
    _renew: Any

    def _skip(self, owned: Ownership, pulled: Pulled, skip: Mapping[str, Any]) -> Steps:
        """Leave the change out, as an operator has asked for; whether that is done. The dead letter is written first: a
        crash between leaves the same change out again. Inside a snapshot no position stands between two documents."""
        if self._position is None or self._position.snapshot is not None or pulled.position is not None:
            return False
        again = self._again
        (change,) = self._changes(owned, [pulled])
        try:
            if not (yield from self._ask(SkipChange(change, skip, pulled.error))):
                self._again = again
                return False
        except LeaseStoreUnavailable as error:
            yield from self._doubt(owned, error)
        self.statistics.skipped += 1
        yield from self._renew(owned)
        self._moved(change.position)
        yield from self._commit(owned, ends_skip=True)
        owned.skip = None
        if pulled.invalidate:
            yield from self._invalidated(owned)
        elif pulled.error is not None:
            yield from self._open(owned)
        return True
