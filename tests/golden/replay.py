"""Our engine over an oplog held in memory: what the golden and the differential tests compare with the server.

An aggregate command goes in as the server would be sent it; events, post-batch resume tokens and errors come out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

import bson
from bson.raw_bson import RawBSONDocument

from tailrace.core.expression import compile_stages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import first_elements, parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.version_proof import version_proof
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import (
    Answer,
    DocumentLookup,
    NeedDocuments,
    NeedEntries,
    NeedPreImages,
    OplogBatch,
    PreImageKey,
    Request,
)
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.stream import ONE_OPLOG, Stream, open_stream
from tailrace.errors import TailraceError
from tailrace.read.source.drive import drive
from tests.golden.recording import Recording, StreamError, entry_time

Documents = Callable[[Sequence[DocumentLookup]], list[bytes | None]]
EVERYTHING = 1 << 62
EMPTY = bson.encode({})
BEGINNING = ClusterTime.of(1, 0)


@lru_cache(maxsize=8)
def entry_filter(query: bytes | None) -> Callable[[bytes], bool]:
    """The query as a test of raw entries, by our own query language."""
    if query is None:
        return lambda entry: True
    compiled = compile_stages([bson.encode({"$match": RawBSONDocument(query)})])
    # Each answer is kept too: a recording is read again and again, in other batches.
    return cache(lambda entry: compiled.apply(entry) is not None)


class MemoryOplog:
    """Oplog entries, pre-images and current documents in memory, answering a pipeline's requests."""

    def __init__(self, entries: Sequence[bytes], pre_images: Iterable[bytes], documents: Documents) -> None:
        self.entries = entries
        self.times = [entry_time(entry) for entry in entries]
        self._by_time = dict(zip(self.times, entries, strict=True))
        self._pre_images = {
            _pre_image_key(stored): bytes(stored["preImage"].raw) for stored in map(RawBSONDocument, pre_images)
        }
        self._documents = documents

    def answer(self, request: Request) -> Answer:
        match request:
            case NeedEntries(times):
                return [self._by_time.get(time) for time in times]
            case NeedPreImages(keys):
                return [self._pre_images.get(key) for key in keys]
            case NeedDocuments(lookups):
                return list(self._documents(lookups))

    def batches(
        self, after: ClusterTime, until: ClusterTime, entries_max: int, oplog_filter: bytes | None = None
    ) -> Iterable[OplogBatch]:
        """The entries with ``after`` < ts <= ``until`` in runs of ``entries_max``; the last one promises ``until``.

        ``oplog_filter`` leaves entries out of their runs.
        """
        passes = entry_filter(oplog_filter)
        first, last = bisect_right(self.times, after), bisect_right(self.times, until)
        for start in range(first, last, entries_max):
            end = min(start + entries_max, last)
            high_water = until if end == last else self.times[end - 1]
            yield OplogBatch(b"".join(filter(passes, self.entries[start:end])), high_water)
        if first >= last:
            yield OplogBatch(b"", until)


class Oplog(Protocol):
    """Where a stream's entries and answers come from."""

    def answer(self, request: Request) -> Answer: ...

    def batches(
        self, after: ClusterTime, until: ClusterTime, entries_max: int, oplog_filter: bytes | None = None
    ) -> Iterable[OplogBatch]: ...


class OurStream:
    """One change stream of ours: opened from an aggregate command, moved forward by cluster time.

    ``error`` is what ended it in the server's terms, ``raised`` as we raised it; ``events`` and ``tokens`` are what it
    gave until then, each as raw BSON.
    """

    def __init__(
        self,
        oplog: Oplog,
        database: str,
        command: Mapping[str, Any],
        *,
        server: str,
        now: ClusterTime | None = None,
        pushes_down: bool = True,
        kernel: KernelUse = "auto",
    ) -> None:
        self.events: list[bytes] = []
        self.tokens: list[bytes] = []
        self.error: StreamError | None = None
        self.raised: TailraceError | None = None
        self.server = server
        self._oplog = oplog
        self._stream: Stream | None = None
        try:
            plan = build_plan(options_of(database, command), profile_for(server))
            if plan.read_after is None:
                plan = plan.start_at(BEGINNING if now is None else now)
            assert plan.read_after is not None
            self.position = plan.read_after
            self._stream = open_stream(plan, pushes_down=pushes_down, kernel=kernel)
        except TailraceError as error:
            self._fail(error)

    @property
    def never_opened(self) -> bool:
        return self._stream is None

    @property
    def closed(self) -> bool:
        return self._stream is None or self._stream.invalidated or self.error is not None

    @property
    def resume_token(self) -> bytes:
        assert self._stream is not None
        return self._stream.token.to_bson()

    def advance(self, until: ClusterTime, *, entries_max: int = EVERYTHING) -> None:
        """Process the oplog up to ``until`` inclusive, ``entries_max`` entries a batch."""
        if self.closed:
            return
        assert self._stream is not None
        oplog_filter = self._stream.oplog_filter
        for batch in self._oplog.batches(self.position, until, entries_max, oplog_filter):
            if self.closed:
                return
            try:
                self._stream.feed(ONE_OPLOG, batch)
                for block in drive(self._stream, lambda need: self._oplog.answer(need.request)):
                    self.events += block.events()
                    self.tokens += block.tokens()
            except TailraceError as error:
                self._fail(error)
            self.position = batch.high_water

    def _fail(self, error: TailraceError) -> None:
        self.raised = error
        self.error = StreamError(error.code or 0, error.message, frozenset(error.labels))


@lru_cache(maxsize=2)
def memory_of(recording: Recording) -> MemoryOplog:
    """A recording's oplog and images. Kept, since each of its hundred streams is replayed several times."""
    documents = {
        (stored["ns"], bytes(stored["documentKey"].raw)): None
        if stored["document"] is None
        else bytes(stored["document"].raw)
        for stored in map(RawBSONDocument, recording.documents)
    }

    def answer(lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
        return [documents[f"{wanted.database}.{wanted.collection}", wanted.document_key] for wanted in lookups]

    major = int(recording.server.partition(".")[0])
    return MemoryOplog([as_written_by(major, entry) for entry in recording.oplog], recording.pre_images, answer)


def as_written_by(major: int, raw: bytes) -> bytes:
    """An entry as servers up to this version write it. Two kinds of crafted entries are written by later ones alone, so
    we refuse them; the recorded server took them for a command and a transaction of its own."""
    if major >= 8 or b"applyOps" not in raw:
        return raw
    parsed = parse_entry(raw)
    proof = version_proof(parsed, first_elements(parsed.o or EMPTY))
    if proof is None or int(proof.version.partition(".")[0]) <= major:
        return raw
    entry = bson.decode(raw)
    if entry.pop("multiOpType", None) is None:
        entry["o"]["$db"] = "admin"
    return bson.encode(entry)


def options_of(database: str, command: Mapping[str, Any]) -> StreamOptions:
    """The stream that an aggregate command with a leading $changeStream asks for."""
    stage, *rest = command["pipeline"]
    options = stage["$changeStream"]
    if isinstance(command["aggregate"], str):
        scope = Scope.of_collection(database, command["aggregate"])
    elif database == "admin" and isinstance(options, Mapping) and options.get("allChangesForCluster") is True:
        scope = Scope.cluster()
    else:
        scope = Scope.of_database(database)
    v2 = command.get("$_generateV2ResumeTokens")
    needs_merge = bool(command.get("needsMerge", False))
    return StreamOptions.parse(scope, options, rest, generate_v2_tokens=v2, needs_merge=needs_merge)


def _pre_image_key(stored: RawBSONDocument) -> PreImageKey:
    key = stored["_id"]
    return PreImageKey(bytes(key["nsUUID"]), ClusterTime.from_timestamp(key["ts"]), int(key["applyOpsIndex"]))
