"""What a batch of entries has become for one stream is given to all streams that ask for the same. No I/O.

Streams that ask for the same, and are between two replies, make the same reply from the same entries: it depends only
on what they ask for and on the entries. So the first of them makes it, and the others are given its bytes; in each only
the cursor's id differs. A stream that was given a reply still has to perform that step itself: its own cursor is where
it was. It does so when it next needs its cursor (``Engine.settled``), only for the last such batch, since the earlier
ones leave no trace in a cursor that has read on. Its reply must then be the one that was given.

Only steps that are known to leave no other trace are shared: batches of writes, without commands, whose events went
into one reply and needed nothing to be looked up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.core.raw_bson import ARRAY, OBJECT, encode_document, encode_element
from tailrace.watch.gateway.reply_facts import CursorFacts, facts_of_reply, reached
from tailrace.watch.gateway.rights import User

#: Steps that are kept for streams which come to them later, and what all may take that a stream still has to do.
_STEPS_MAX: Final = 1024
_BYTES_MAX: Final = 32 << 20
#: Entries and replies above this are not shared: they would be kept for streams that pause.
_BATCH_BYTES_MAX: Final = 16 << 10
_REPLY_BYTES_MAX: Final = 64 << 10
#: In an entry of a command, and where a user's document looks like one.
_COMMAND_ENTRY: Final = b"\x02op\x00" + raw_bson.encode_string("c")
_ID: Final = b"\x12id\x00"
#: What follows a cursor in a reply: its end, ``ok``, and the reply's end.
_AFTER_CURSOR: Final = 1 + len(encode_element(raw_bson.DOUBLE, b"ok", bytes(8))) + 1
_STARTS: Final = frozenset({b"resumeAfter", b"startAfter", b"startAtOperationTime"})
#: They say nothing of what is asked.
_OF_THE_COMMAND: Final = frozenset({b"lsid", b"$clusterTime", b"cursor", b"maxTimeMS"})


@dataclass(eq=False, slots=True)
class SharedStep:
    """``batch``    the entries
    ``head``, ``tail``  the reply before and after the cursor's id
    ``holders``  how many streams were given it and have to do it themselves
    ``stamped``  for its sender: the same with the server's times, of which clock document
    """

    batch: OplogBatch
    batch_size: int | None
    head: bytes
    tail: bytes
    facts: CursorFacts
    reached: ClusterTime
    holders: int = 0
    is_kept: bool = True
    stamped: tuple[object, bytes, bytes] | None = None

    @property
    def size(self) -> int:
        return len(self.batch.raw) + len(self.head) + len(self.tail)

    def reply(self, cursor_id: int) -> bytes:
        return self.head + raw_bson.encode_int64(cursor_id) + self.tail


@dataclass(eq=False, slots=True)
class AskedAlike:
    """The streams that ask the same, and how many they are."""

    streams: int = 0


@dataclass(eq=False, slots=True)
class Sharing:
    """Of one stream: what it asks, and whether it stands where it may share.

    ``asked``     the same for streams that ask the same, and ``alike`` those streams
    ``form``      of its tokens; ``None`` until it has given an event of its own
    ``is_settled``  it stands between two replies: all that it has read was given
    ``owed``      the step that it was given and has to do itself
    ``own_ms``    when its cursor was used last, on the cursors' clock
    """

    asked: Hashable
    alike: AskedAlike = field(default_factory=AskedAlike)
    form: bytes | None = None
    is_settled: bool = False
    owed: SharedStep | None = None
    own_ms: int = 0


@dataclass(eq=False, slots=True)
class SharedSteps:
    """``held``: bytes of the steps that are kept, and of those that streams have to do themselves."""

    held: int = 0
    _alike: dict[Hashable, AskedAlike] = field(default_factory=dict)
    _steps: dict[Hashable, SharedStep] = field(default_factory=dict)

    def joined(self, sharing: Sharing) -> None:
        """A stream was opened."""
        sharing.alike = self._alike.setdefault(sharing.asked, sharing.alike)
        sharing.alike.streams += 1

    def left(self, sharing: Sharing) -> None:
        """A stream was closed; it has nothing to do any more."""
        self.taken(sharing)
        sharing.alike.streams -= 1
        if not sharing.alike.streams:
            del self._alike[sharing.asked]

    def found(self, sharing: Sharing, batch: OplogBatch, batch_size: int | None) -> SharedStep | None:
        """The step that another stream has done of this batch, after which nothing stood."""
        if not sharing.is_settled or sharing.form is None or sharing.alike.streams < 2:
            return None
        return self._steps.get((sharing.alike, sharing.form, batch.raw, batch.high_water, batch_size))

    def add(self, sharing: Sharing, batch: OplogBatch, batch_size: int | None, cursor_id: int, reply: bytes) -> None:
        """Note what a stream has made of a batch: its only one for this reply, for which nothing was looked up, and
        after which nothing stood."""
        if sharing.form is None or sharing.alike.streams < 2 or len(batch.raw) > _BATCH_BYTES_MAX:
            return
        if len(reply) > _REPLY_BYTES_MAX or self.held > _BYTES_MAX or _COMMAND_ENTRY in batch.raw:
            return
        facts = facts_of_reply(reply)
        at = len(reply) - _AFTER_CURSOR - len(facts.namespace.encode()) - 9 - 8
        if reply[at - len(_ID) : at + 8] != _ID + raw_bson.encode_int64(cursor_id):
            return
        step = SharedStep(batch, batch_size, reply[:at], reply[at + 8 :], facts, reached(reply))
        key = sharing.alike, sharing.form, batch.raw, batch.high_water, batch_size
        if key not in self._steps:
            self._steps[key] = step
            self.held += step.size
        while len(self._steps) > _STEPS_MAX:
            oldest = self._steps.pop(next(iter(self._steps)))
            oldest.is_kept = False
            self._released(oldest)

    def give(self, sharing: Sharing, step: SharedStep) -> None:
        """A stream is given a step: it has to do it itself, and no earlier one any more."""
        self.taken(sharing)
        sharing.owed = step
        step.holders += 1

    def taken(self, sharing: Sharing) -> SharedStep | None:
        """The step that a stream has to do itself, which it owes no longer."""
        step, sharing.owed = sharing.owed, None
        if step is not None:
            step.holders -= 1
            self._released(step)
        return step

    def _released(self, step: SharedStep) -> None:
        if not step.is_kept and not step.holders:
            self.held -= step.size


def asked_by(namespace: str, command: bytes, users: frozenset[User], version: str) -> Hashable:
    """What an aggregate asks, for whom and of which server version: all of it but where the stream begins, its session
    and its first batch. The namespace, options, stages, comment, read preference and read concern are in it."""
    parts = []
    for element in raw_bson.elements(command):
        if element.name in _OF_THE_COMMAND:
            continue
        if element.name == b"pipeline" and element.type == ARRAY:
            parts.append(_without_start(raw_bson.value(command, element)))
        elif element.name == b"readConcern" and element.type == OBJECT:
            parts.append(b"readConcern" + _without(raw_bson.value(command, element), frozenset({b"afterClusterTime"})))
        else:
            parts.append(command[element.start : element.end])
    return namespace, tuple(parts), users, version


def _without_start(pipeline: bytes) -> bytes:
    """The stages without what says where the stream begins."""
    stages = list(raw_bson.elements(pipeline))
    if not stages or stages[0].type != OBJECT:
        return pipeline
    first = raw_bson.value(pipeline, stages[0])
    named = next(raw_bson.elements(first), None)
    if named is None or named.type != OBJECT:
        return pipeline
    return _without(raw_bson.value(first, named), _STARTS) + pipeline[stages[0].end :]


def _without(document: bytes, names: frozenset[bytes]) -> bytes:
    kept = (document[each.start : each.end] for each in raw_bson.elements(document) if each.name not in names)
    return encode_document(*kept)
