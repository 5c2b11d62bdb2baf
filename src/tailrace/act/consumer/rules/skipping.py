"""What a listener does when a change is left out: because an operator asked for that, or because the stream cannot give
it. Part of ``rules.listener``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.act.consumer.rules.errors import LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease_logic import Steps
from tailrace.act.consumer.rules.need import JudgeError, Pulled, SkipChange
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.stream_logic import StreamLogic
from tailrace.errors import TailraceError


class SkippingLogic(StreamLogic):
    """Those attributes that are not a stream's are a ``ListenerLogic``'s."""

    _again: int
    _changes: Any
    _doubt: Any
    _invalidated: Any
    _refused: tuple[Any, int]
    _wait_after: Any

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

    def _pass_over(self, owned: Ownership, pulled: Pulled, error: TailraceError) -> Steps:
        """The stream has ended at a change that it cannot give. The error policy is asked, as for a handler's error:
        try again, leave the change out, or end with the stream's own error."""
        (change,) = self._changes(owned, [pulled])
        if self._position is not None and self._position.token == change.position.token:
            raise error  # it was left out, and the stream cannot go on after it either
        self._refused = (pulled.token, self._refused[1] + 1 if self._refused[0] == pulled.token else 1)
        self.statistics.failures += 1
        decision = yield from self._ask(JudgeError(change, error, self._refused[1]))
        if decision == "stop":
            raise error
        if decision == "retry":
            yield from self._pause(self._wait_after(error, self._refused[1]), error.message)
            if self.leaves:
                return
        else:
            self.statistics.skipped += 1
            yield from self._renew(owned)
            self._moved(change.position)
            if pulled.invalidate:
                yield from self._invalidated(owned)
                return
            yield from self._commit(owned)
        yield from self._open(owned)
