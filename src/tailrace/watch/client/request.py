"""What ``watch()`` was asked for, in one value for both engines."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.timestamp import Timestamp
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.collation import Collation
from pymongo.errors import ConfigurationError, InvalidOperation
from pymongo.synchronous.client_session import ClientSession

from tailrace.core.oplog.namespace import Scope
from tailrace.errors import ServerError
from tailrace.watch.client.arguments import refused
from tailrace.watch.client.resume import waits_too_long

#: The parameters that are options of the ``$changeStream`` stage, and the server's names for them.
STAGE_NAMES: Final[dict[str, str]] = {
    "full_document": "fullDocument",
    "full_document_before_change": "fullDocumentBeforeChange",
    "resume_after": "resumeAfter",
    "start_after": "startAfter",
    "start_at_operation_time": "startAtOperationTime",
    "show_expanded_events": "showExpandedEvents",
}

#: The value of ``start``, and the field of resume tokens from the middle of a copy. Such a token has no other field: a
#: server would ignore this one and so skip the rest of the copy.
SNAPSHOT: Final = "snapshot"
_STARTS: Final = ("resume_after", "start_after", "start_at_operation_time")

_TYPE_MISMATCH: Final = 14
#: A command holds no larger whole number.
_INT64_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """The parameters of a ``watch()``; ``None`` is "not said" and is left to the server's default."""

    scope: Scope
    codec_options: CodecOptions[Any]
    pipeline: Sequence[Mapping[str, Any]] = ()
    full_document: str | None = None
    full_document_before_change: str | None = None
    resume_after: Mapping[str, Any] | None = None
    start_after: Mapping[str, Any] | None = None
    start_at_operation_time: Timestamp | None = None
    show_expanded_events: bool | None = None
    #: "snapshot": the existing documents come first.
    start: str | None = None
    #: How many documents a second, at most, are copied.
    snapshot_documents_per_second: float | None = None
    max_await_time_ms: int | None = None
    #: How long each call on the stream may take, in place of the client's ``timeoutMS``; 0: as long as it takes.
    timeout_ms: int | None = None
    batch_size: int | None = None
    collation: Collation | Mapping[str, Any] | None = None
    comment: Any = None
    #: A ClientSession or an AsyncClientSession.
    session: Any = None
    options: Mapping[str, Any] | None = None
    #: Which members to read from, as PyMongo says it; ``None``: as the client does.
    read_preference: Any = None
    #: PyMongo's client, database or collection whose ``watch`` was called, and its client.
    target: Any = None
    client: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.pipeline, (list, tuple)):
            raise refused(f"the pipeline must be a list of stages, not {type(self.pipeline).__name__}", TypeError)
        if self.full_document is not None and not isinstance(self.full_document, str):
            raise refused(f"full_document must be a string, not {type(self.full_document).__name__}", TypeError)
        size: Any = self.batch_size
        if isinstance(size, str) and size.isdecimal():
            object.__setattr__(self, "batch_size", int(size))  # PyMongo takes it so too
        for name in ("max_await_time_ms", "batch_size", "timeout_ms"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                kind = ValueError if name == "batch_size" and isinstance(value, str) else TypeError
                raise refused(f"{name} must be a whole number, 0 or more, not {value!r}", kind)
            if value < 0:
                raise refused(f"{name} must be a whole number, 0 or more, not {value!r}", ValueError)
            if value > _INT64_MAX:
                raise refused(f"{name} must be {_INT64_MAX} or less", OverflowError)
        if waits_too_long(self.max_await_time_ms, self.timeout_ms):
            raise refused(
                f"max_await_time_ms ({self.max_await_time_ms}) must be less than timeout_ms ({self.timeout_ms})",
                ConfigurationError,
                "A single wait must be shorter than the time that a call may take",
            )
        if self.options is not None and not isinstance(self.options, Mapping):
            raise refused(f"the options must be a mapping, not {type(self.options).__name__}", TypeError)
        if self.collation is not None and not isinstance(self.collation, (Collation, Mapping)):
            raise refused(f"the collation must be a mapping, not {type(self.collation).__name__}", TypeError)
        self._check_start()
        self._check_session()
        if self.comment is not None:
            self.encoded({"comment": self.comment}, "the comment")

    def _check_start(self) -> None:
        pace: Any = self.snapshot_documents_per_second
        if pace is not None and (
            isinstance(pace, bool) or not isinstance(pace, (int, float)) or not 0 < pace < float("inf")
        ):
            raise refused(f"snapshot_documents_per_second must be a number larger than 0, not {pace!r}", ValueError)
        if self.start is None:
            return
        if self.start != SNAPSHOT:
            raise refused(
                f"there is no start {self.start!r}", ValueError, f"Give {SNAPSHOT!r}, or leave it out to start now"
            )
        others = self.starts()
        if others:
            raise refused(
                f"start={SNAPSHOT!r} and {others[0]} do not go together",
                ConfigurationError,
                "The resume token holds how far the copy had come: leave out start to go on",
            )

    def starts(self) -> list[str]:
        """What was said about where to begin: the names of the parameters, or of the options that stand for them."""
        given = [name for name in _STARTS if getattr(self, name) is not None]
        return given + [STAGE_NAMES[name] for name in _STARTS if STAGE_NAMES[name] in (self.options or {})]

    def resumed(self, token: Mapping[str, Any], *, has_given: bool) -> WatchRequest:
        """The request of a driver that resumes the stream at ``token`` (rule 28). ``has_given``: it has given an
        event."""
        after = bool(self.said().get("startAfter")) and not has_given
        beginnings = {STAGE_NAMES[name] for name in _STARTS}
        options = {name: value for name, value in (self.options or {}).items() if name not in beginnings}
        return replace(
            self,
            resume_after=None if after else token,
            start_after=token if after else None,
            start_at_operation_time=None,
            options=options or None,
        )

    def _check_session(self) -> None:
        """Raises as PyMongo does where the session cannot be used with the client."""
        session = self.session
        if session is None:
            return
        if not isinstance(session, (ClientSession, AsyncClientSession)):
            raise refused(f"the session must be a ClientSession, not {type(session).__name__}", ValueError)
        if self.client is not None and session.client is not self.client:
            raise refused("a session can only be used with the client that started it", InvalidOperation)
        if session.has_ended:
            raise refused("the session has ended", InvalidOperation)

    def said(self) -> dict[str, Any]:
        """What was said, under the server's names. As with PyMongo, expanded events that are not wanted are not
        mentioned: servers before 6.0 do not know the option."""
        said = {name: getattr(self, parameter) for parameter, name in STAGE_NAMES.items()}
        said["showExpandedEvents"] = self.show_expanded_events or None
        return {name: value for name, value in said.items() if value is not None} | dict(self.options or {})

    def stage(self) -> bytes:
        """The document inside ``$changeStream``."""
        return self.encoded(self.said(), "an option of the change stream")

    def collation_document(self) -> bytes | None:
        """The BSON of the collation, ``None`` where none was said."""
        if self.collation is None:
            return None
        given = self.collation.document if isinstance(self.collation, Collation) else self.collation
        return self.encoded(given, "the collation")

    def stages(self) -> list[bytes]:
        """The user's stages. Raises the server's error where one is no document."""
        for stage in self.pipeline:
            if not isinstance(stage, Container):  # PyMongo looks into it first
                raise refused(f"a stage of the pipeline must be a mapping, not {type(stage).__name__}", TypeError)
            if not isinstance(stage, Mapping):
                raise ServerError("Each element of the 'pipeline' array must be an object", code=_TYPE_MISMATCH)
        return [self.encoded(stage, "a stage of the pipeline") for stage in self.pipeline]

    def encoded(self, document: Mapping[str, Any], what: str) -> bytes:
        """BSON by the codec options; UsageError where a value has none."""
        try:
            return bson.encode(document, codec_options=self.codec_options)
        except (BSONError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise refused(f"{what} cannot be written as BSON: {error}", type(error)) from None


def watch_codec_options(
    of_target: CodecOptions[Any], chosen: CodecOptions[Any] | None, document_class: type[Any] | None
) -> CodecOptions[Any]:
    """How a stream's events are decoded: as its target says, unless ``watch`` gets other options."""
    options = chosen or of_target
    if not isinstance(options, CodecOptions):
        raise refused(f"codec_options must be CodecOptions, not {type(options).__name__}", TypeError)
    if document_class is None:
        return options
    try:
        return options.with_options(document_class=document_class)
    except (TypeError, ValueError) as error:
        raise refused(str(error), type(error)) from None


def depends_on_version(request: WatchRequest) -> bool:
    """Whether servers of different versions may refuse the request with different codes."""
    return request.full_document is not None or bool(request.show_expanded_events)
