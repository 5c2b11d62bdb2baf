"""A source with computed pre-images: what it reads passes through the image state on its way to the stream."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from tailrace.base import durable
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.erased import ERASED, erased_collections
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.core.plan.profile import ServerProfile
from tailrace.core.plan.request import OplogBatch, PreImageKey
from tailrace.read.images.bucket import AGAIN, ImagesInUseError, ImageStateError
from tailrace.read.images.directory import StateNote, check_kind, make_folder, other_stream
from tailrace.read.images.fold import ImageFolder
from tailrace.read.images.found import Images
from tailrace.read.images.seed import SEED_BATCHES, SeededFrom, seed
from tailrace.read.images.state import ImageState
from tailrace.read.source.batch import entry_time
from tailrace.read.source.live import LiveSource, RelayedSource
from tailrace.read.source.witness import check_witness, identity_if_allowed, newest_mark

_BATCH_BYTES: Final = 4 << 20
#: Batches go to disk together. What a crash loses of them is read from the oplog again.
_MEMORY_BYTES: Final = 64 << 20
#: Written in a shard's directory: the time at which its state began with nothing.
_EMPTY: Final = "began-empty.json"
#: How often to check whether another process has released the state.
_LOOK_S: Final = 0.05
#: The file that says whose a directory is.
STREAM: Final = "stream.json"
#: In the state's witness: the same as in that file.
_OF_STREAM: Final = "stream"

_log = logging.getLogger("tailrace.images")


class ExactSource(RelayedSource):
    """Reads from another source, but answers ``pre_images`` only from the state in ``directory``.

    ``source``   reads the oplog of a replica set
    ``kernel``   whether the compiled code is ready
    ``scope``    of the stream. A directory belongs to one scope of one replica set, and to one stream at a time
    ``recover``  whether a new state for a stream that begins at some time is made of all that the source holds before
    ``of_shard`` the source is one shard of a cluster, and the state holds its documents; a new state may begin with
    ``tail``
    ``wait_s``   how long to wait for a state that another process has open
    ``reads``    whether ``tail`` was called; ``ended`` is set once it has released the state

    Raises UsageError for a directory of another scope or deployment, ImageStateError if it cannot be used.
    """

    def __init__(
        self,
        source: LiveSource,
        directory: str | Path,
        scope: Scope,
        profile: ServerProfile,
        *,
        kernel: Callable[[int], bool] = lambda size: False,
        recover: bool = False,
        of_shard: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__(source)
        self._wait_s = wait_s
        self._of_shard = of_shard
        self.ended = threading.Event()
        self.reads = False
        self._recover = recover
        self._kernel = kernel
        self._directory = Path(directory)
        self._scope, self._profile = scope, profile
        self._images: Images = {}
        self._identity: DeploymentIdentity | None = None
        self._state: ImageState | None = None
        self._note = StateNote(self._directory, of_shard=of_shard)
        #: Whose the directory is, next to the state and in it: two states may have changed places.
        self._stream: dict[str, object] = {"of": source.name, "scope": str(scope)}
        self._claim()

    @property
    def state(self) -> ImageState:
        """The state; it is opened at first use."""
        if self._state is None:
            self._state = self._opened()
        return self._state

    def _opened(self) -> ImageState:
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                return ImageState.open(self._directory, memory_bytes=_MEMORY_BYTES)
            except ImagesInUseError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_LOOK_S)

    def read_from(self, source: LiveSource) -> None:
        """Read from another source of the same replica set, before ``tail``: one that nobody has interrupted, or that
        waits for longer."""
        self._live = source

    def use_profile(self, profile: ServerProfile) -> None:
        """The entries that ``tail`` reads from its next call on are those of another server version."""
        self._profile = profile

    def _claim(self) -> None:
        if not self._of_shard:
            check_kind(self._directory, sharded=False)
        else:
            make_folder(self._directory.parent.parent)
        path = self._directory / STREAM
        with self.state as state:  # one at a time
            record = durable.read_sealed(path)
            if record is None and state.position is not None:
                raise ImageStateError(
                    f"the file {path}, which says whose images are in {self._directory}, is missing", hint=AGAIN
                )
            if record is None:
                durable.write_sealed(path, self._stream)
        self._state = None
        self._check_stream(record or self._stream)

    def _check_stream(self, found: Mapping[str, object]) -> None:
        if found != self._stream:
            raise other_stream(
                f"the images in {self._directory} belong to {found.get('scope')} on {found.get('of')}, and the "
                f"stream is of {self._scope} on {self._live.name}"
            )

    def begin(self, after: ClusterTime | None, client: MongoClient[Any], *, joins: bool = False) -> ClusterTime:
        """Where a stream begins that is to begin after ``after``, or now (``None``). The state is brought to this time.
        A new state is seeded with the current documents if the stream begins now. Otherwise it knows only documents
        that are written later than the stream's beginning, or with ``recover`` later than the source's beginning; that
        is told, unless the state is of a shard that ``joins`` a stream that runs. Raises OtherHistoryError where a
        state was made of another deployment, or of a history that is gone, ImageStateError where one that had begun is
        not there any more."""
        self._check_history(client)
        begins_again = self._began_empty_after(after)
        if self.state.position is None or self.state.position < SEED_BATCHES or begins_again:
            if after is None:
                begun = self._seeded(client)
            else:
                if not begins_again:
                    self._check_new(after, joins=joins)
                begun = self._begun_empty(after)
        else:
            begun = self._live.operation_time() if after is None else after
        self._note.write()
        return begun

    def _seeded(self, client: MongoClient[Any]) -> ClusterTime:
        """The state becomes a copy of what is there. Returns its time."""
        self._note.remove()
        (self._directory / _EMPTY).unlink(missing_ok=True)
        mark = newest_mark(self._live)
        given = SeededFrom(client, self._live, self._folder(), snapshots=self._profile.series >= (5, 0))
        return seed(self.state, given, self._scope, witness=lambda: self._witness(mark))

    def _begun_empty(self, after: ClusterTime) -> ClusterTime:
        """The state begins with nothing, at ``after`` or where what it is recovered from begins."""
        self._note.remove()
        if self._of_shard:
            durable.write_sealed(self._directory / _EMPTY, {"at": int(after)})
        self.state.clear()
        known = min(after, ClusterTime(self._live.oldest()[0] - 1)) if self._recover else after
        with self.state.batch(int(known)):
            pass
        self.state.settle()
        return after

    def _check_new(self, after: ClusterTime, *, joins: bool) -> None:
        """A stream goes on at a time, and knows no document then. Raises ImageStateError where it knew some."""
        if self._recover:
            return
        if self._note.is_there:
            raise ImageStateError(
                f"the images in {self._directory} are gone: the stream had begun, and the directory is empty",
                hint=AGAIN,
            )
        if not joins:
            _log.warning(
                "the images in %s begin at %s with no document: until one is inserted or replaced, its images are not "
                "known. If the stream had images before, put their directory back",
                self._directory,
                after,
            )

    def _check_history(self, client: MongoClient[Any]) -> None:
        """Whose history the state belongs to; and from now on, what its witness says."""
        known = self._known_witness()
        self._identity = self._identified(client)
        if known is not None:
            check_witness(
                known,
                self._identity,
                {self._live.name: self._live},
                what=f"the images in {self._directory}",
                hint="Connect to the deployment that they were made from, or give this stream a new directory",
            )

    def _identified(self, client: MongoClient[Any]) -> DeploymentIdentity:
        return identity_if_allowed(client)

    def _known_witness(self) -> Witness | None:
        kept = self.state.witness
        if kept is None:
            return None
        try:
            document = json.loads(kept)
            witness = Witness.from_document(document)
        except ValueError as error:
            raise ImageStateError(f"the images in {self._directory} are damaged: {error}", hint=AGAIN) from None
        self._check_stream(document.get(_OF_STREAM, self._stream))
        return witness

    def _witness(self, mark: EntryMark | None) -> bytes | None:
        """What the state keeps: whose it is, and an entry of its oplog. ``None`` where this is not known, and it keeps
        what it has."""
        if self._identity is None:
            return None
        entries = {} if mark is None else {self._live.name: mark}
        return json.dumps({**Witness(self._identity, entries).to_document(), _OF_STREAM: self._stream}).encode()

    def _began_empty_after(self, after: ClusterTime | None) -> bool:
        """Whether a stream goes back to before the beginning of a shard's state that began with nothing, as that of a
        shard that joined later does. Such a state can as well begin there: it knew nothing at its beginning. What it
        has learned since is read again, so the oplog must still hold all of that."""
        is_asked = self._of_shard and after is not None
        began = durable.read_sealed(self._directory / _EMPTY) if is_asked else None
        if began is None or after is None:
            return False
        at = int(str(began["at"]))
        return int(after) < at and self._live.oldest()[0] <= at

    def take_back(self, after: ClusterTime) -> None:
        """Undo what the state holds from after ``after``. Raises ImageStateError if it cannot."""
        self.state.undo_until(int(after))
        position = self.state.position
        if position is None or position < SEED_BATCHES:
            raise ImageStateError(
                f"the images in {self._directory} begin later than {after}",
                hint="Begin the stream later, or with a new directory",
            )

    def tail(self, after: ClusterTime, **options: Any) -> Generator[OplogBatch, None, None]:
        """See OplogSource. The filter is not used, since the state needs every change in scope. The state stays open
        while this runs."""
        options.pop("oplog_filter", None)
        self.reads = True
        try:
            if self._of_shard and self.state.position is None:
                self.begin(after, self._live.client, joins=True)
            folder = self._at(after)
            yield from self._folded(folder, self._live.tail(after, **options))
        finally:
            self.release()
            self.ended.set()

    def read(
        self,
        after: ClusterTime,
        until: ClusterTime,
        *,
        batch_bytes_max: int = _BATCH_BYTES,
        **options: Any,
    ) -> Generator[OplogBatch, None, None]:
        """See OplogSource; the filter is not used here either. The state must have begun. It keeps what it takes to go
        back to ``after``, so that the same range can be read again, with the same images, until a later one is."""
        try:
            folder = self._at(after)
            self.state.hold(int(after))
            yield from self._folded(folder, self._live.read(after, until, batch_bytes_max=batch_bytes_max))
        finally:
            self.release()

    def _folded(self, folder: ImageFolder, batches: Iterable[OplogBatch]) -> Generator[OplogBatch, None, None]:
        for batch in batches:
            self._images = self._applied(folder, batch) if batch.raw else {}
            yield batch._replace(images=self._images)

    def _at(self, after: ClusterTime) -> ImageFolder:
        """Bring the state to ``after``: undo batches first, then apply what the oplog holds."""
        if self._identity is None:  # a worker does not begin the state; asked now, since the state writes as it closes
            known = self._known_witness()
            self._identity = None if known is None else known.identity
        self.take_back(after)
        folder = self._folder()
        position = ClusterTime(self.state.position or 0)
        for batch in self._live.read(position, after, batch_bytes_max=_BATCH_BYTES):
            if batch.raw:
                self._applied(folder, batch, again=self._of_shard)
        return folder

    def _folder(self) -> ImageFolder:
        return ImageFolder(self.state, self._scope, self._profile, kernel=self._kernel, of_shard=self._of_shard)

    def _applied(self, folder: ImageFolder, batch: OplogBatch, *, again: bool = False) -> Images:
        if ERASED in batch.raw:
            self._refuse_erased(batch.raw)
        before, self.state.next_witness = self.state.next_witness, lambda: self._witness(_last_mark(batch.raw))
        try:
            return folder.fold(batch, self._live.entries, again=again)
        except BaseException:
            self.state.next_witness = before
            raise

    def _refuse_erased(self, raw: bytes) -> None:
        """An archive from which documents were erased no longer says what later changes of them were made to."""
        for entry in raw_bson.split(raw):
            for name in erased_collections(entry):
                database, _, collection = name.partition(".")
                if self._scope.database in (None, database) and self._scope.collection in (None, collection):
                    raise ImageStateError(
                        f"documents of {name} were erased from the archive at {entry_time(entry)}: exact images cannot "
                        "be followed across that",
                        hint="Begin a new directory of images at a later time, or use the oplog alone",
                    )

    def release(self) -> None:
        """Close the state, so that another stream can use it. May be called again."""
        state, self._state = self._state, None
        if state is not None:
            state.close()

    def release_unread(self) -> None:
        """Release the state if ``tail`` was never called: ``tail`` releases it itself. May be called from any
        thread."""
        if not self.reads:
            self.release()

    def pre_images(self, keys: Sequence[PreImageKey]) -> list[bytes | None]:
        """The documents before operations of the batch that was read last."""
        return [self._images.get(PreImageKey(*key)) for key in keys]


def _last_mark(raw: bytes) -> EntryMark:
    """The mark of the last of a batch's entries."""
    start = 0
    while (end := raw_bson.document_end(raw, start)) < len(raw):
        start = end
    return EntryMark.of(entry_time(raw, start), raw[start:])
