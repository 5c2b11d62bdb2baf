"""Transactions that are on their way: what the entries of each that have been read so far are about."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tailrace.core.oplog.cluster_time import ClusterTime

#: As many are remembered; an older one is then about everyone when it commits.
_MEMBERS_MAX: Final = 10_000
_KEYS_MAX: Final = 1000


class Chains:
    """The entry that commits a large or a prepared transaction names no collection itself, and ``OplogMatch`` gives it
    to every stream, which looks through the transaction's earlier entries for operations of its own. A reader of all
    entries knows beforehand whether there are any: a chain links each member to the one before it by its time."""

    def __init__(self) -> None:
        self._known: OrderedDict[ClusterTime, frozenset[bytes] | None] = OrderedDict()

    def member(
        self, time: ClusterTime, previous: ClusterTime | None, keys: frozenset[bytes] | None
    ) -> frozenset[bytes] | None:
        """What the chain is about up to and with the member at ``time``, whose own operations are about ``keys``;
        ``None`` (everyone) where a part of it was not seen."""
        before: frozenset[bytes] | None = frozenset()
        if previous is not None:
            before = self._known.pop(previous, None)
        together = None if before is None or keys is None else before | keys
        if together is not None and len(together) > _KEYS_MAX:
            together = None
        self._known[time] = together
        if len(self._known) > _MEMBERS_MAX:
            self._known.popitem(last=False)
        return together
