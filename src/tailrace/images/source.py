"""A source whose pre-images are computed: what it reads passes through the state of images on its way to the stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient

from tailrace import durable
from tailrace.errors import UsageError
from tailrace.images.bucket import ImageStateError
from tailrace.images.fold import ImageFolder
from tailrace.images.found import Images
from tailrace.images.seed import SEED_BATCHES, seed
from tailrace.images.state import ImageState
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.profile import ServerProfile
from tailrace.plan.request import OplogBatch, PreImageKey
from tailrace.source.mongod import MongodSource

_BATCH_BYTES: Final = 4 << 20


class ExactSource:
    """Another source, but ``pre_images`` are answered from the state in ``directory``, and from nowhere else.

    ``source``   reads the oplog of a replica set
    ``kernel``   whether compiled code is ready to be used
    ``scope``    of the stream. A directory belongs to one scope of one replica set, and to one stream at a time

    Raises UsageError for a directory of another scope or deployment, ImageStateError where it cannot be used.
    """

    def __init__(
        self,
        source: MongodSource,
        directory: str | Path,
        scope: Scope,
        profile: ServerProfile,
        *,
        kernel: Callable[[int], bool] = lambda size: False,
    ) -> None:
        self._source = source
        self._kernel = kernel
        self._directory = Path(directory)
        self._scope, self._profile = scope, profile
        self._images: Images = {}
        self._state: ImageState | None = None
        self._claim()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def state(self) -> ImageState:
        """The state, which is opened where it is not."""
        if self._state is None:
            self._state = ImageState.open(self._directory)
        return self._state

    def _claim(self) -> None:
        mine: dict[str, object] = {"of": self._source.name, "scope": str(self._scope)}
        with self.state:  # one at a time
            found = durable.read_json(self._directory / "stream.json")
            if found is None:
                durable.write_json(self._directory / "stream.json", mine)
        self._state = None
        if found not in (None, mine):
            raise UsageError(
                f"the images in {self._directory} are those of {found.get('scope')} on {found.get('of')}, and the "
                f"stream is of {self._scope} on {self._source.name}",
                hint="Give each stream a directory of its own",
            )

    def begin(self, after: ClusterTime | None, client: MongoClient[Any]) -> ClusterTime:
        """Where a stream begins that was to begin behind ``after``, or now (``None``). A new state is brought there:
        for now it is seeded with what is there, and otherwise it knows the documents alone that come later."""
        if self.state.position is None or self.state.position < SEED_BATCHES:
            if after is None:
                return seed(self.state, client, self._scope)
            self.state.clear()
            with self.state.batch(int(after)):
                pass
            self.state.settle()
            return after
        return self._source.operation_time() if after is None else after

    def tail(self, after: ClusterTime, **options: Any) -> Generator[OplogBatch, None, None]:
        """See OplogSource. The filter is left out, since the state needs every change in scope. The state is open for
        as long as this is."""
        options.pop("oplog_filter", None)
        try:
            folder = self._at(after)
            for batch in self._source.tail(after, **options):
                self._images = folder.fold(batch, self._source.entries) if batch.raw else {}
                yield batch
        finally:
            self.release()

    def _at(self, after: ClusterTime) -> ImageFolder:
        """The state brought to ``after``: back by what can be undone, then forward by what the oplog holds."""
        self.state.undo_until(int(after))
        position = self.state.position
        if position is None or position < SEED_BATCHES:
            raise ImageStateError(
                f"the images in {self._directory} begin later than {after}",
                hint="Begin the stream later, or with a new directory",
            )
        folder = ImageFolder(self.state, self._scope, self._profile, kernel=self._kernel)
        for batch in self._source.read(ClusterTime(position), after, batch_bytes_max=_BATCH_BYTES):
            if batch.raw:
                folder.fold(batch, self._source.entries)
        return folder

    def release(self) -> None:
        """Let go of the state: another stream may use it. May be called again."""
        state, self._state = self._state, None
        if state is not None:
            state.close()

    def pre_images(self, keys: Sequence[PreImageKey]) -> list[bytes | None]:
        """The documents before operations of the batch that was read last."""
        return [self._images.get(PreImageKey(*key)) for key in keys]
