"""A listener's stream: opened at a position, pulled from, opened again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import bson
from bson.codec_options import DEFAULT_CODEC_OPTIONS, CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace import raw_bson
from tailrace.client.change_stream import ChangeStream
from tailrace.client.client import client_of, operation_time
from tailrace.client.patience import try_next_patiently
from tailrace.consumer.lease import LeaseStore
from tailrace.consumer.rules.need import CloseStream, FindStart, Need, OpenStream, PullChange, Pulled, TakeSnapshot
from tailrace.consumer.rules.position import StreamPosition
from tailrace.consumer.snapshots import Copying, oldest_time, take_snapshot
from tailrace.errors import InternalError, InvalidResumeToken, UsageError

#: How long one look at a quiet stream waits: a listener that is stopped ends after that at the latest.
_AWAIT_MS: Final = 500
_POSITIONS: Final = {"resume_after", "start_after", "start_at_operation_time"}


class Watched(Protocol):
    """What a listener watches: a client, a database or a collection of ``tailrace.connect()``."""

    @property
    def codec_options(self) -> CodecOptions[Any]:
        """How events are decoded."""

    def watch(self, pipeline: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> ChangeStream:
        """A change stream."""


class Watching:
    """Performs what ``rules.listener`` needs of a stream. ``options`` are those of ``watch()``."""

    def __init__(self, watchable: Any, store: LeaseStore, **options: Any) -> None:
        if not callable(getattr(watchable, "watch", None)):
            raise UsageError(
                f"a listener watches a client, a database or a collection, not {type(watchable).__name__}",
                hint='For example tailrace.connect(uri)["shop"]["orders"]',
            )
        if _POSITIONS & options.keys():
            raise UsageError(
                f"{min(_POSITIONS & options.keys())} cannot be given: a listener keeps its position itself",
                hint='Choose start="oldest" or "now" for the first time',
            )
        self._watchable = watchable
        self._store = store
        self._options = {"max_await_time_ms": _AWAIT_MS, **options}
        self._stream: ChangeStream | None = None
        self._copy: Copying | None = None

    @property
    def codec_options(self) -> CodecOptions[Any]:
        """How handlers see events."""
        chosen: CodecOptions[Any] = getattr(self._watchable, "codec_options", DEFAULT_CODEC_OPTIONS)
        return chosen

    def perform(self, need: Need) -> Any:
        """The answer to a need of the stream."""
        match need:
            case PullChange():
                return self._pull(need.wait)
            case OpenStream():
                return self._open(need.position)
            case CloseStream():
                return self._close()
            case FindStart():
                return self._find_start(need)
            case TakeSnapshot():
                # A lane's own. Asked of the class: a collection has an attribute of every name.
                take = getattr(type(self._watchable), "take_snapshot", take_snapshot)
                return take(self._watchable, need.position)
            case _:
                raise InternalError(f"nobody answers {type(need).__name__}")

    def _open(self, position: StreamPosition) -> None:
        self._close()
        if position.snapshot is not None:
            self._copy = Copying(self._watchable, position, self._options)
            return
        try:
            self._stream = self._watchable.watch(
                document_class=RawBSONDocument, **self._options, **position.watch_arguments()
            )
        except InvalidResumeToken as error:
            raise InvalidResumeToken(
                f"the committed position does not fit what is watched: {error.message}",
                code=error.code,
                hint="Was the lease used for another collection or pipeline? Use a resource of its own",
            ) from error

    def _pull(self, wait: bool) -> Pulled:
        if self._copy is not None:
            pulled = self._copy.pull()
            if pulled.event is None and pulled.position is not None:
                self._open(pulled.position)
            return pulled
        stream = self._stream
        if stream is None:
            raise InternalError("there is no stream to pull from")
        if not wait and not stream.has_next:
            return Pulled(None, None)
        event = try_next_patiently(stream)
        if event is None:
            return Pulled(None, stream.resume_token, alive=stream.alive)
        token, kind = _token_and_operation(event)
        size = len(event.raw) if isinstance(event, RawBSONDocument) else 0
        return Pulled(event, token, kind == "invalidate", size=size, alone=kind in ("invalidate", "barrier"))

    def _close(self) -> None:
        stream, self._stream, self._copy = self._stream, None, None
        if stream is not None:
            stream.close()

    def _find_start(self, need: FindStart) -> Timestamp:
        client = client_of(self._watchable)
        if client is None:
            raise UsageError(f"cannot tell where the {need.start} entry of {type(self._watchable).__name__} is")
        if need.start == "now":
            # One tick later begins what was not there yet.
            return operation_time(client).tick().to_timestamp()
        return oldest_time(client)


def _token_and_operation(event: Any) -> tuple[Mapping[str, Any], str]:
    """Those of an event, or of what a lane is given at a barrier. In a raw event they are at the beginning: decoding
    all fields would take three times as long."""
    if not isinstance(event, RawBSONDocument):
        return event["_id"], event["operationType"]
    raw = bytes(event.raw)
    token: Mapping[str, Any] | None = None
    for element in raw_bson.elements(raw):
        if element.name == b"_id":
            token = bson.decode(raw_bson.value(raw, element))
        elif element.name == b"operationType" and token is not None:
            return token, raw_bson.value(raw, element)[4:-1].decode()
    return event["_id"], event["operationType"]  # a user's stages have put them elsewhere
