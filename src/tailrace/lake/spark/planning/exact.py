"""The states of exact images as the driver's side sees them: where they begin, and whether they are a checkpoint's own.

Everything here happens between micro-batches: the driver begins a state, and from then on the task of each micro-batch
opens it, brings it to the micro-batch's start and reads on from there (``reading.exact_slice``). A directory has an id,
which is in the offsets. So neither a task on another machine nor a query whose directory was lost mistakes a new state,
in which no document is known, for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import profile_for
from tailrace.errors import TailraceError, UsageError, on_shard
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.read.images.directory import Mark, check_kind, is_new, refuse_network, shard_folder
from tailrace.read.images.source import ExactSource
from tailrace.read.source.live import LiveSource

#: Seconds to wait for a state that another process has open: a task that was given up, or the last run's.
WAIT_S = 60.0


class StateOf(NamedTuple):
    """An oplog that has a state. ``shard`` is its shard's name; a replica set has none."""

    shard: str | None
    source: LiveSource
    client: MongoClient[Any]


def state_source(options: ReadOptions, server_version: str, shard: str | None, source: LiveSource) -> ExactSource:
    """A source that computes images, over one that reads an oplog. Waits a while for a state that is in use."""
    folder = Path(options.images or "")
    return ExactSource(
        source,
        folder if shard is None else shard_folder(folder, shard, source.name),
        options.scope,
        profile_for(server_version),
        kernel=_is_worth_the_kernel,
        recover=options.archive is not None,
        of_shard=shard is not None,
        wait_s=WAIT_S,
    )


def _is_worth_the_kernel(size: int) -> bool:
    from tailrace.core.stream.kernel_choice import is_worth_it  # noqa: PLC0415  in the workers

    return is_worth_it(size)


class ExactStates:
    """The states in the directory that ``options`` name. Raises UsageError if it cannot be used."""

    def __init__(self, options: ReadOptions, server_version: str, *, sharded: bool) -> None:
        self._options = options
        self.server_version = server_version
        self._folder = Path(options.images or "")
        self._recovers = options.archive is not None
        self._has_begun = False
        refuse_network(self._folder)
        check_kind(self._folder, sharded=sharded)

    @property
    def are_lost(self) -> bool:
        """Whether there is no state, nor an archive of which one could be made."""
        return is_new(self._folder) and not self._recovers

    def seed(self, member: StateOf) -> ClusterTime:
        """Copy the documents of a member into its state if that is new. Returns a time that no state is ahead of."""
        return self._begin(member, None)

    def begin(self, member: StateOf, after: ClusterTime) -> None:
        """See that a member's state can be read from ``after`` on. A new one knows nothing at that time; with an
        archive it knows what the archive holds."""
        self._begin(member, after)

    def _begin(self, member: StateOf, after: ClusterTime | None) -> ClusterTime:
        try:
            state = state_source(self._options, self.server_version, member.shard, member.source)
            try:
                begun = state.begin(after, member.client)
                if after is not None:
                    state.take_back(after)
                return begun
            finally:
                state.release()
        except TailraceError as error:
            raise error if member.shard is None else on_shard(error, member.shard) from None

    def _make_again(self, after: ClusterTime, members: Callable[[], Sequence[StateOf]]) -> None:
        """Begin the states of a directory that was made again, if a crash came before that."""
        if self._recovers and not self._has_begun:
            for member in members():
                self.begin(member, after)
        self._has_begun = True

    def marked(self, offset: Offset) -> Offset:
        """A new stream's offset, with the directory's id."""
        return replace(offset, images=(Mark.read(self._folder) or Mark.make(self._folder)).id)

    def checked(self, offset: Offset, members: Callable[[], Sequence[StateOf]]) -> Offset:
        """An offset of a checkpoint. A directory that was lost is made again from the archive. Raises UsageError if
        there is no archive, or if the directory is not the checkpoint's."""
        mark = Mark.read(self._folder)
        if mark is None and self._recovers and is_new(self._folder):
            mark = Mark.make(self._folder, replaces=offset.images)
            self._has_begun = False  # it may have been made again before, and lost again
        if mark is not None and offset.images in (mark.id, *mark.replaces):
            self._make_again(offset.cluster_time, members)
            return replace(offset, images=mark.id)
        raise UsageError(
            f"the images in {self._folder} are not those of this checkpoint: "
            + ("there are none" if mark is None else "they belong to another stream"),
            hint="Put the checkpoint's own directory back, or begin with a new checkpointLocation and a new "
            "directory. With the option 'archive' a lost directory is rebuilt",
        )
