"""UnwindTransaction: the entry that commits a transaction becomes the transaction's operations (semantics 4).

A large transaction is a chain of entries linked backwards by ``prevOpTime``. The chain's earlier members are requested
(``NeedEntries``) one at a time and passed on in bounded pieces, so that memory does not grow with the transaction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Final, TypeAlias

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import OplogEntry, apply_ops, parse_entry, parse_operation
from tailrace.core.plan.request import Answer, NeedEntries
from tailrace.core.stage.oplog_match import OplogMatch
from tailrace.errors import ChangeStreamHistoryLost, OplogFormatError

#: Gets the entries of a transaction that came before the others, by their cluster times.
EntriesAt: TypeAlias = Callable[[Sequence[ClusterTime]], list[bytes | None]]
Pieces: TypeAlias = Generator["NeedEntries | list[OplogEntry]", Answer, None]

#: A piece given on holds at most about this many operations or bytes.
_PIECE_OPERATIONS_MAX: Final = 1_000
_PIECE_BYTES_MAX: Final = 4 * 1024 * 1024
#: Chain members on their way are remembered up to this many bytes: they mostly stand just before their commit.
_REMEMBERED_BYTES_MAX: Final = 16 * 1024 * 1024
#: A chain longer than this is no transaction that a server writes (16 MB an entry at the least full).
_CHAIN_MEMBERS_MAX: Final = 1_000_000

_ALL: Final = slice(None, None)

_HISTORY_LOST: Final = (
    "Oplog no longer has history necessary for $changeStream to observe operations from a committed transaction."
)


class UnwindTransaction:
    """Gives each operation of a committed transaction as an entry of its own, in order; other entries pass.

    ``txn_op_index`` counts every operation of the chain from 0, whether or not it passes the stream's filter.
    """

    def __init__(self, oplog_match: OplogMatch, *, multi_op_is_no_transaction: bool = False) -> None:
        self._match = oplog_match
        self._multi_op_is_no_transaction = multi_op_is_no_transaction
        self._remembered: OrderedDict[ClusterTime, bytes] = OrderedDict()
        self._remembered_bytes = 0

    def process(self, entries: list[OplogEntry]) -> Pieces:
        """Yields lists of operations, and ``NeedEntries`` for chain members; in oplog order."""
        piece: list[OplogEntry] = []
        for entry in entries:
            if entry.operation != "c" or not is_commit(entry):
                piece.append(entry)
                continue
            if piece:
                yield piece
                piece = []
            yield from self._unwind(entry)
        if piece:
            yield piece

    def remember(self, time: ClusterTime, raw: bytes) -> None:
        """Keep a chain member that is read before its commit, within the bound; asking again is always possible."""
        if len(raw) > _REMEMBERED_BYTES_MAX // 4 or time in self._remembered:
            return
        self._remembered[time] = raw
        self._remembered_bytes += len(raw)
        while self._remembered_bytes > _REMEMBERED_BYTES_MAX:
            _, dropped = self._remembered.popitem(last=False)
            self._remembered_bytes -= len(dropped)

    def _unwind(self, commit: OplogEntry) -> Pieces:
        index = 0
        if commit.multi_op and self._multi_op_is_no_transaction:
            # Its prevOpTime leads to the session's earlier statements, which are no part of it.
            commit.lsid = commit.txn_number = None
            yield from self.operations(commit, commit, index)
            return
        chain = yield from self.chain_before(commit)
        for time, term in chain:
            member = yield from self._member(time, term)
            index = yield from self.operations(commit, member, index)
        yield from self.operations(commit, commit, index)

    def chain_before(self, commit: OplogEntry) -> Generator[NeedEntries, Answer, list[tuple[ClusterTime, int]]]:
        """The chain's earlier members as op times (cluster time, term), oldest first."""
        chain: list[tuple[ClusterTime, int]] = []
        member = commit
        while member.prev_op_time is not None:
            if member.prev_op_time > commit.cluster_time:
                # The server looks for an entry that it has not come to, and says that it is gone.
                raise _history_lost(member.prev_op_time, member.prev_op_term)
            if member.prev_op_time >= member.cluster_time:
                raise OplogFormatError("a transaction's prevOpTime does not lead back", position=commit.position)
            if len(chain) >= _CHAIN_MEMBERS_MAX:
                raise OplogFormatError("a transaction's chain has no end", position=commit.position)
            chain.append((member.prev_op_time, member.prev_op_term))
            member = yield from self._member(*chain[-1])
        chain.reverse()
        return chain

    def _member(self, time: ClusterTime, term: int) -> Generator[NeedEntries, Answer, OplogEntry]:
        return parse_entry((yield from self.member(time, term)))

    def member(self, time: ClusterTime, term: int) -> Generator[NeedEntries, Answer, bytes]:
        """The BSON of a chain's entry. Raises ``ChangeStreamHistoryLost`` where the oplog no longer has it."""
        raw = self._remembered.get(time)
        if raw is None:
            answer = yield NeedEntries((time,))
            raw = answer[0] if answer else None
            if raw is not None:
                self.remember(time, raw)
        if raw is None:
            raise _history_lost(time, term)
        return raw

    def operations(
        self, commit: OplogEntry, member: OplogEntry, index: int, part: slice = _ALL
    ) -> Generator[NeedEntries | list[OplogEntry], Answer, int]:
        """Pass on the operations of one member that pass the filter; ``index`` is that of its first one. Of these only
        the ``part`` given. Returns the index after the last one."""
        piece: list[OplogEntry] = []
        piece_bytes = passed = 0
        may_pass = self._match.may_pass
        try:
            for position, raw in islice(enumerate(apply_ops(member)), part.start, part.stop):
                operation = parse_operation(raw, member.position)
                if operation.operation == "n":
                    raise OplogFormatError(
                        "Unexpected noop entry within a transaction", position=member.position, code=5543809
                    )
                if self._match.matches_inner(operation):
                    _adopt(operation, commit, member)
                    operation.txn_op_index = index + position
                    operation.image_index = position
                    if may_pass is None or may_pass(operation):
                        piece.append(operation)
                        piece_bytes += len(raw)
                passed = position + 1
                if len(piece) >= _PIECE_OPERATIONS_MAX or piece_bytes >= _PIECE_BYTES_MAX:
                    full, piece, piece_bytes = piece, [], 0
                    yield full
        except OplogFormatError:
            # What stands before the damage is delivered before the error.
            if piece:
                yield piece
            raise
        if piece:
            yield piece
        return index + passed


def _history_lost(time: ClusterTime, term: int) -> ChangeStreamHistoryLost:
    return ChangeStreamHistoryLost(
        f"{_HISTORY_LOST} :: caused by :: oplog no longer contains the complete write history of this "
        f"transaction, log with opTime {{ ts: {time.for_programs()}, t: {term} }} cannot be found",
        hint="Start the stream after this transaction, or keep a longer oplog",
    )


def operations_of(pieces: Pieces, entries_at: EntriesAt) -> Iterator[OplogEntry]:
    """The operations of ``UnwindTransaction.process``, one after another, for a reader that has the oplog at hand."""
    answer: Answer = None
    while True:
        try:
            piece = pieces.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(piece, list):
            yield from piece
        else:
            answer = entries_at(piece.times)


def is_commit(entry: OplogEntry) -> bool:
    """Whether a command entry that passed OplogMatch commits a transaction."""
    fields = entry.command_fields()
    return b"applyOps" in fields or b"commitTransaction" in fields


def is_chain_member(entry: OplogEntry) -> bool:
    """Whether a later entry may refer back to this one by ``prevOpTime``."""
    return entry.operation == "c" and entry.lsid is not None and b"applyOps" in entry.command_fields()


def _adopt(operation: OplogEntry, commit: OplogEntry, member: OplogEntry) -> None:
    """Give an inner operation what the commit knows; its pre-image is filed under the member that holds it."""
    operation.cluster_time = commit.cluster_time
    operation.wall_ms = commit.wall_ms
    operation.lsid = commit.lsid
    operation.txn_number = commit.txn_number
    operation.in_transaction = commit.lsid is not None
    operation.image_time = member.cluster_time
