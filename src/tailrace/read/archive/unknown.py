"""How many of the archived entries are of kinds that this version does not know. They are kept like all others: a later
version of Tailrace may make their events."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.oplog.entry import parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import profile_for
from tailrace.core.stage.oplog_match import OplogMatch
from tailrace.errors import TailraceError
from tailrace.read.source.unknown_kinds import tell_of_unknown_kinds

_WRITES: Final = pa.array(["i", "u", "d"])
#: Of no-ops and commands: transactions, whose operations are not looked into, and what the servers say when idle.
_UNINTERESTING: Final = pa.array(["", "admin.$cmd"])
_NOT_WRITES: Final = pa.array(["c", "n"])


class UnknownEntries:
    """Counts the entries of one oplog that are of unknown kinds, by kind; ``version`` is the servers'."""

    def __init__(self, version: str) -> None:
        options = StreamOptions(Scope.cluster(), show_expanded_events=True, show_system_events=True)
        self._match = OplogMatch(options, profile_for(version))

    @property
    def counts(self) -> dict[str, int]:
        return self._match.unknown_operations

    def saw(self, batch: pa.RecordBatch) -> None:
        """Look at rows of ``tailrace.read.archive.columns.SCHEMA``."""
        operation, namespace = batch.column("operation"), batch.column("namespace")
        known = pc.or_(
            pc.is_in(operation, _WRITES),
            pc.and_(pc.is_in(operation, _NOT_WRITES), pc.is_in(namespace, _UNINTERESTING)),
        )
        for entry in batch.column("entry").filter(pc.invert(known)):
            with suppress(TailraceError):  # readers of the archive learn what is wrong with an entry
                self._match.matches(parse_entry(entry.as_py()))
        tell_of_unknown_kinds()
