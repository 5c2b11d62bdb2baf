"""What follows failures of a cluster's reads: the drivers' rules, kept by a stream that reads many members at a time.

The shards' readers try again on their own, so that nothing is missed and the other shards are still read. This module
decides what a failure means for the caller. The first one in a row counts as that of a getMore, after which the stream
is resumed silently. As with a mongos, that attempt lasts until no member of the shard could be selected for as long as
the client waits for one (``serverSelectionTimeoutMS``). That failure, and each later one, is reported to the caller
(rules 24 to 26).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import bson
from pymongo import MongoClient
from pymongo.errors import OperationFailure, ServerSelectionTimeoutError

from tailrace.errors import ServerError, on_shard
from tailrace.read.source.shard_reader import ShardReader
from tailrace.watch.client.commands import StreamCommands
from tailrace.watch.client.failure import failure_of_read
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.resume import Next, ResumeProcess, SaidStart


class ShardFailures:
    """Belongs to one stream.

    ``client``    reported to listeners as the client that the commands were sent to
    ``commands``  notified of the commands that a mongos's stream would have been sent; ``None`` if nobody listens
    """

    def __init__(self, client: MongoClient[Any], request: WatchRequest, commands: StreamCommands | None) -> None:
        said = (request.resume_after, request.start_after, request.start_at_operation_time)
        self._process = ResumeProcess(SaidStart(*said))
        self._client = client
        self._commands = commands
        #: By shard: how many failures in a row the stream knows of.
        self._heard: dict[str, int] = {}
        #: Whether a call failed because the stream could not be resumed; the next one tries again.
        self._reopens = False
        #: The last error that has left the stream open.
        self.kept: BaseException | None = None
        #: When the caller's last look began and ended, by the monotonic clock.
        self._looked_from = self._looked_until = 0.0

    def opened(self, token: bytes) -> None:
        """The stream was opened; ``token`` is its resume token."""
        self._process.opened(is_empty=True, batch_token=None, operation_time=None)
        self._tell_aggregate(self._process.start_options())
        if self._commands is not None:
            self._commands.answered(bson.decode(token), [])

    def looks(self, token: bytes, *, has_given: bool) -> None:
        """A look begins."""
        if self._commands is None:
            return
        if self._reopens:
            self._reopens = False
            self._tell_aggregate(self._start_options(token, has_given=has_given))
        self._commands.get_more(token)

    def check(self, readers: Iterable[ShardReader], token: bytes, *, has_given: bool) -> None:
        """Raises the error of a resume that has failed; its shard is named, and the stream stays open."""
        for reader in readers:
            killed, reader.killed = reader.killed, None
            if killed is not None:
                self._end(killed, reader.name)
            error, count = reader.failed, reader.failed_in_a_row
            if error is None:
                self._heard.pop(reader.name, None)
                continue
            heard = self._heard.get(reader.name, 0)
            if count <= heard:
                continue
            self._heard[reader.name] = count
            follows = self._process.failed(failure_of_read(error, "aggregate" if heard else "getMore"))
            if heard and not isinstance(error, ServerSelectionTimeoutError):
                continue  # the attempt goes on
            if self._commands is not None:
                self._commands.failed(error)
            if follows is Next.RAISE and reader.failed_as is not None:
                self._reopens = True
                self.kept = on_shard(reader.failed_as, reader.name)
                raise self.kept
            self._tell_aggregate(self._start_options(token, has_given=has_given))

    @contextmanager
    def looking(self, readers: list[ShardReader]) -> Iterator[None]:
        """The caller waits inside this block. A read that was killed while nobody waited is opened again without an
        error. A pause between two waits counts as waiting if it is shorter than the wait before it."""
        begun = time.monotonic()
        if begun - self._looked_until >= self._looked_until - self._looked_from:
            for reader in readers:
                reader.killed = None
        try:
            yield
        finally:
            self._looked_from, self._looked_until = begun, time.monotonic()

    def _end(self, error: OperationFailure, shard: str) -> NoReturn:
        """Rule 25: the stream ends with the error that ended the shard's cursor, as at a mongos."""
        if self._commands is not None:
            self._commands.failed(error)
        message = str((error.details or {}).get("errmsg") or error)
        raise on_shard(ServerError(message, code=error.code), shard) from None

    def _start_options(self, token: bytes, *, has_given: bool) -> Mapping[str, Any]:
        """Rule 28."""
        known = bson.decode(token)
        self._process.found_nothing(known)
        if has_given:
            self._process.gives(known, is_last=True, batch_token=known)
        return self._process.start_options()

    def _tell_aggregate(self, start: Mapping[str, Any]) -> None:
        if self._commands is not None:
            self._commands.aggregate(self._client.primary or ("", None), start)
