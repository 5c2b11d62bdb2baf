"""Who holds which lane: every process decides for itself, by what the leases say.

Each process that takes part is known by a lease of its own. The lanes are divided evenly; where that leaves a
remainder, the processes that hold most already get one more, so that few lanes move. A process gives up what exceeds
its share, and takes free lanes up to it. Two may want one lane at the same time: its lease decides. What they see may
be out of date: the shares are computed again a moment later, and settle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Moves(NamedTuple):
    """Lanes for one process to ``take`` (their leases are free) and to ``give_up``."""

    take: tuple[int, ...]
    give_up: tuple[int, ...]


def share(me: str, members: Collection[str], held: Mapping[str, int], lanes: int) -> int:
    """How many lanes are ``me``'s. ``held`` is how many each member holds now."""
    everybody = sorted({me, *members}, key=lambda member: (-held.get(member, 0), member))
    each, left = divmod(lanes, len(everybody))
    return each + (everybody.index(me) < left)


def moves(
    me: str,
    members: Collection[str],
    owners: Mapping[int, str],
    lanes: int,
    *,
    handed: Collection[int] = (),
    closed: Collection[int] = (),
) -> Moves:
    """What ``me`` should do. ``owners`` are the lanes under a lease that has not expired, and whose.

    ``handed``  lanes that an operator leaves to ``me`` alone for a time: they are taken in addition to its share
    ``closed``  lanes that are paused, or left to another process

    Neither are divided with the others.
    """
    apart = {*handed, *closed}
    divided = [lane for lane in range(lanes) if lane not in apart]
    held: dict[str, int] = {}
    for owner in (owners[lane] for lane in divided if lane in owners):
        held[owner] = held.get(owner, 0) + 1
    mine = [lane for lane in divided if owners.get(lane) == me]
    due = share(me, members, held, len(divided))
    free = [lane for lane in divided if lane not in owners]
    # Begin at another free lane than the others do: fewer attempts meet.
    first = sorted({me, *members}).index(me) * len(free) // len({me, *members}) if free else 0
    free = free[first:] + free[:first]
    take = [*sorted(set(handed) - owners.keys()), *free[: max(0, due - len(mine))]]
    return Moves(tuple(take), (*mine[due:], *sorted(lane for lane in closed if owners.get(lane) == me)))
