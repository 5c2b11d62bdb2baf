"""GetMores of streams that ask the same, and wait for the same entries: called once for all of them.

The first of them looks into the window and has its cursor make a reply, as it would alone. The others are then given
that reply: for them nothing is looked up but that the same entries have come for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

from tailrace.read.tail.segment import Segment, TailPlace
from tailrace.read.tail.shared_tail import SharedTail
from tailrace.watch.gateway.loop_turns import STEPS, LoopTurns
from tailrace.watch.gateway.reading import Waker, now_ms
from tailrace.watch.gateway.shared_steps import SharedStep


class AlikeGetMore(Protocol):
    """A getMore that waits with others (``QuickGetMore``).

    ``place``   where its stream stands
    ``shared``  what its last step has made for others, or was given
    """

    place: TailPlace
    shared: SharedStep | None

    def step(self) -> None:
        """Do what there is to do, in a turn, and account for its time."""

    def give_in_turn(self, step: SharedStep, now: int) -> None:
        """Answer with what another has made; it was taken from the window. ``now``: on the cursors' clock."""


class WaitingAlike:
    """Those of one tenant, in the order in which they came.

    ``members``  a getMore adds itself, and takes itself away when it waits here no longer
    ``called``   when something has come for any of them; in any thread
    """

    def __init__(self, turns: LoopTurns, waker: Waker, shared: SharedTail, tenant: Hashable) -> None:
        self.members: dict[AlikeGetMore, None] = {}
        self.called: Callable[[], None] = partial(waker.of(tenant), self._step)
        self._turns, self._shared, self._tenant = turns, shared, tenant

    def _step(self) -> None:
        """Serve those for whom something has come: as many as a pass of the loop has room for, and one at least."""
        ready: list[AlikeGetMore] = []
        for member in self.members:
            if member.place.pending or not member.place.joined:
                ready.append(member)
                if len(ready) == STEPS:
                    break
        if not ready:
            return
        count = 1 + self._turns.more(self._tenant, len(ready) - 1)
        self._serve(ready[:count])
        if count < len(ready) or len(ready) == STEPS:
            self._turns.later(self._tenant, self._step)

    def _serve(self, ready: Sequence[AlikeGetMore]) -> None:
        number = 0
        while number < len(ready):
            member = ready[number]
            number += 1
            if member not in self.members:  # what was done for another has ended its wait
                continue
            pending, position = member.place.pending, member.place.position
            member.step()
            step = member.shared
            if step is None or len(pending) != 1 or position > pending[0].after:
                continue
            segment, begun = pending[0], number
            while number < len(ready) and ready[number].place.pending == pending:
                number += 1
            self._give([one for one in ready[begun:number] if one in self.members], segment, step)

    def _give(self, members: Sequence[AlikeGetMore], segment: Segment, step: SharedStep) -> None:
        if not members:
            return
        begun, now = time.perf_counter(), now_ms()
        taken = self._shared.take_whole([member.place for member in members], segment)
        for member, has_taken in zip(members, taken, strict=True):
            if has_taken:
                member.give_in_turn(step, now)
            else:
                member.step()
        self._turns.charge(self._tenant, time.perf_counter() - begun, len(members))
