"""A listener's stream of whole events, which an event that cannot be given does not end for good.

A stream ends with an error at an event that is too large, whose image is missing, or at which one of the user's stages
fails. A stream that is resumed after that event meets it once more (from 6.0 on the user's stages come before the
search for the resume token), and so does one whose pipeline no longer gives the event that it is resumed from (280).

So what the stream cannot give is reported as a ``Refused``, and where a stream cannot begin at a place, the events are
read without the user's stages, which are applied here, until it can begin at the time of an event. The server's own
stream does not say which event it has failed at: that is found in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import bson
from bson.raw_bson import RawBSONDocument
from pymongo.collation import Collation as DriversCollation

from tailrace.act.consumer.rules.large_events import (
    SPLIT_STAGE,
    Fragments,
    Refused,
    as_raw,
    refused_event,
    splits,
    token_of,
)
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core import raw_bson
from tailrace.core.expression.stages.pipeline import CompiledPipeline
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.stage.user_stages import check_id
from tailrace.errors import ChangeStreamFatal, ServerError, SourceError, TailraceError
from tailrace.read.source.failure import TRANSIENT_CODES
from tailrace.watch.client.change_stream import ChangeStream
from tailrace.watch.client.client import compiled_as_watched
from tailrace.watch.client.patience import try_next_patiently

_IMAGES: Final = ("full_document", "full_document_before_change")


class WholeEventStream:
    """The part of a ChangeStream that listeners and lanes use: events are raw and whole, ``Refused`` stands for one
    that cannot be given, and ends the stream. Raises at once what ``watch()`` raises, unless that is about an event.

    ``options``   those of ``watch()``, without a start
    ``position``  where it begins
    """

    def __init__(self, watchable: Any, options: Mapping[str, Any], position: StreamPosition) -> None:
        self._watchable = watchable
        self._options = dict(options)
        self._pipeline = list(options.get("pipeline") or ())
        self._splits = splits(self._pipeline)
        #: Everything up to here was given, or is left out by the user's stages.
        self._place = position
        self._last: bytes | None = None
        #: The stream with the user's stages.
        self._stream: ChangeStream | None = None
        #: Without the user's stages, which are applied here.
        self._plain: ChangeStream | None = None
        self._stages: CompiledPipeline | None = None
        #: The error for which they are, and whether no other stream is tried before its event is found.
        self._failure: TailraceError | None = None
        self._searches = False
        self._refused: Refused | None = None
        self._alive = True
        self._fragments = Fragments()
        try:
            self._open(position.watch_arguments())
        except TailraceError as error:
            self._judge(error)

    def __enter__(self) -> WholeEventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """False after an invalidation, a ``Refused`` or an error was given."""
        stream = self._stream or self._plain
        return self._alive and (stream is None or stream.alive)

    @property
    def has_next(self) -> bool:
        """Whether the next event, or a part of it, is here already."""
        return self._stream is not None and self._stream.has_next

    @property
    def resume_token(self) -> Mapping[str, Any] | None:
        """Up to where there is nothing more to give; ``None`` where that is not known, as between fragments."""
        if self._fragments.is_open:
            return None
        if self._stream is None:
            return self._begin.token
        self._place, self._last = StreamPosition(self._stream.resume_token, start_after=True), None
        return self._place.token

    @property
    def _begin(self) -> StreamPosition:
        """Where to go on."""
        if self._last is not None:
            self._place, self._last = StreamPosition(token_of(self._last), start_after=True), None
        return self._place

    def close(self) -> None:
        """End it and what it reads from."""
        self._alive = False
        for stream in (self._stream, self._plain):
            if stream is not None:
                stream.close()

    def try_next(self) -> RawBSONDocument | Refused | None:
        """The next event, whole; ``None`` while there is none. Raises what ends the stream and is not about an event,
        and what leaves the stream open: then the next call resumes it."""
        try:
            found = self._refused or (self._next() if self._failure is None else self._next_made_here())
        except TailraceError as error:
            stream = self._stream or self._plain
            if not self._alive or (stream is not None and stream.alive):
                raise
            found = self._judge(error)
        if isinstance(found, Refused):
            self.close()
        return found

    def _next(self) -> RawBSONDocument | None:
        assert self._stream is not None
        event = try_next_patiently(self._stream)
        whole = None if event is None else self._event_bytes(event)
        if whole is None:
            return None
        self._last, self._searches = whole, False
        return as_raw(whole)

    def _event_bytes(self, event: RawBSONDocument) -> bytes | None:
        return self._fragments.add(raw_bson.bytes_of(event)) if self._splits else raw_bson.bytes_of(event)

    def _open(self, where: Mapping[str, Any], **options: Any) -> None:
        self._fragments = Fragments()
        self._stream = self._watch({**self._options, **options}, where)

    def _watch(self, options: Mapping[str, Any], where: Mapping[str, Any]) -> ChangeStream:
        stream: ChangeStream = self._watchable.watch(**{**options, "document_class": RawBSONDocument}, **where)
        return stream

    # What a stream cannot give

    def _judge(self, error: TailraceError) -> Refused | None:
        """An error has ended the stream. Raises it where it is not about an event."""
        self._close_streams()
        if isinstance(error, ServerError) and error.code in TRANSIENT_CODES:
            self._alive = False
            raise SourceError(error.message, code=error.code, hint=error.hint) from error
        refused, begin = refused_event(error), self._begin
        if refused is not None and (begin.token is None or refused.token["_data"] > begin.token["_data"]):
            self._refused = refused
            return refused
        passed_over = isinstance(error, ChangeStreamFatal) and error.event is None and self._failure is None
        if not (isinstance(error, ServerError) or (passed_over and begin.token is not None)):
            self._alive = False
            raise error
        # A second stream that has given nothing: the event lies ahead.
        self._searches = self._failure is not None
        if self._stages is None:
            self._stages = self._compiled(error)
        self._failure = error
        return None

    def _compiled(self, error: TailraceError) -> CompiledPipeline:
        """The user's stages. Raises ``error`` where they cannot be applied here, or the server takes no such stream."""
        collation = self._options.get("collation")
        try:
            self._watch({**self._options, "batch_size": 1}, {}).close()  # it begins now, where there is no event
            if isinstance(collation, DriversCollation):
                collation = collation.document
            return compiled_as_watched(
                self._watchable,
                [bson.encode(stage) for stage in self._pipeline],
                collation=None if collation is None else bson.encode(collation),
                show_expanded_events=bool(self._options.get("show_expanded_events")),
            )
        except TailraceError:
            self._alive = False
            raise error from None

    def _close_streams(self) -> None:
        for stream in (self._stream, self._plain):
            if stream is not None:
                with suppress(TailraceError):
                    stream.close()
        self._stream = self._plain = None
        self._fragments = Fragments()

    def _next_made_here(self) -> RawBSONDocument | Refused | None:
        """The next event without the user's stages, with them applied; or a stream that has them, at its time."""
        if self._stream is not None:
            return self._next()
        event, error = self._next_plain()
        begin = self._begin
        if event is None:
            mark = self._plain.resume_token if self._plain is not None else None
            if mark is not None and _time_of(mark) > begin.cluster_time:
                self._place = StreamPosition(mark, start_after=True)
                self._return_to(self._place.watch_arguments())
            return None
        token = token_of(event)
        if not self._searches and _time_of(token) > begin.cluster_time:  # nothing of its time was given
            self._return_to({"start_at_operation_time": _time_of(token).to_timestamp()})
            return None
        self._last = event
        if error is not None:
            return Refused(token, event, error)
        return self._made(event, token)

    def _return_to(self, where: Mapping[str, Any]) -> None:
        """Read with the user's stages again. One event at a time: the server forgets those before one that it fails
        at."""
        self._close_streams()
        self._open(where, batch_size=1)

    def _made(self, event: bytes, token: Mapping[str, Any]) -> RawBSONDocument | Refused | None:
        assert self._stages is not None
        try:
            made = self._stages.apply(event)
            if made is not None and made is not event:
                check_id(bson.encode(token), made)
        except ServerError as error:
            failure = self._failure
            return Refused(token, event, failure if failure is not None and failure.code == error.code else error)
        return None if made is None else as_raw(made)

    def _next_plain(self) -> tuple[bytes | None, TailraceError | None]:
        """The next event without the user's stages; where its image or its size is what is wrong, without images, and
        the error."""
        options = {**self._options, "pipeline": [{SPLIT_STAGE: {}}] if self._splits else []}
        for batch in ({}, {"batch_size": 1}):
            try:
                if self._plain is None:
                    self._plain = self._watch({**options, **batch}, self._begin.watch_arguments())
                event = try_next_patiently(self._plain)
                return (None if event is None else self._event_bytes(event)), None
            except ServerError as error:
                if self._plain is not None and self._plain.alive:
                    raise
                self._close_streams()
                failure: TailraceError = error
            except ChangeStreamFatal as error:  # the place is none of this stream
                self._alive = False
                raise self._failure or error from None
        bare = {name: value for name, value in options.items() if name not in _IMAGES}
        try:
            with self._watch({**bare, "batch_size": 1}, self._begin.watch_arguments()) as stream:
                event = try_next_patiently(stream)
                return (None, None) if event is None else (raw_bson.bytes_of(event), failure)
        except (ServerError, ChangeStreamFatal):
            self._alive = False
            raise self._failure or failure from None


def _time_of(token: Mapping[str, Any]) -> ClusterTime:
    return ClusterTime(int(token["_data"][2:18], 16))
