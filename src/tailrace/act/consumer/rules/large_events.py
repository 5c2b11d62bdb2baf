"""Events that a stream gives in fragments, or cannot give at all, such as those over 16 MB.

A listener's handler is given an event whole: half of one cannot be acted on, nor may the position stand between the
halves. What a stream cannot give goes to the error policy with the event as far as it is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.errors import ServerError, TailraceError

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="backslashreplace"
)
SPLIT_STAGE: Final = "$changeStreamSplitLargeEvent"
#: The server's order. A split event has the smallest field first.
_ORDER: Final = {
    name: place
    for place, name in enumerate(
        (
            b"operationType",
            b"clusterTime",
            b"collectionUUID",
            b"wallTime",
            b"fullDocument",
            b"ns",
            b"to",
            b"documentKey",
            b"lsid",
            b"txnNumber",
            b"operationDescription",
            b"updateDescription",
            b"fullDocumentBeforeChange",
        )
    )
}


def splits(pipeline: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether a pipeline has the stage that splits large events."""
    return any(SPLIT_STAGE in stage for stage in pipeline or ())


class Fragments:
    """Puts the events of one stream together again that ``$changeStreamSplitLargeEvent`` has split."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether fragments of an event are here, and not yet all of them."""
        return bool(self._parts)

    def add(self, event: bytes) -> bytes | None:
        """The event as it was before it was split, with the token that it had then; ``None`` while fragments of it are
        to come. One that was not split is given back. So is a fragment whose first ones are not here: an earlier
        version has committed the place between them."""
        number, of = _fragment(event)
        if not number or number != len(self._parts) + 1:
            self._parts.clear()
            return event
        self._parts.append(event)
        if number < of:
            return None
        parts, self._parts = self._parts, []
        return _joined(parts)


def _fragment(event: bytes) -> tuple[int, int]:
    element = raw_bson.find(event, b"splitEvent")
    if element is None or element.type != raw_bson.OBJECT:
        return 0, 0
    split = bson.decode(raw_bson.value(event, element))
    return int(split.get("fragment", 0)), int(split.get("of", 0))


def _joined(parts: list[bytes]) -> bytes:
    fields: list[tuple[int, bytes]] = []
    token = b""
    for part in parts:
        for element in raw_bson.elements(part):
            if element.name == b"_id":
                token = raw_bson.value(part, element)
            elif element.name != b"splitEvent":
                fields.append((_ORDER.get(element.name, len(_ORDER)), part[element.start : element.end]))
    fields.sort(key=lambda one: one[0])
    whole = ResumeToken.parse(token).parts
    identity = raw_bson.encode_element(
        raw_bson.OBJECT,
        b"_id",
        ResumeToken(
            whole.cluster_time,
            version=whole.version,
            txn_op_index=whole.txn_op_index,
            from_invalidate=whole.from_invalidate,
            uuid=whole.uuid,
            event_identifier=whole.event_identifier,
        ).to_bson(),
    )
    return raw_bson.encode_document(identity, *(field for _, field in fields))


class Refused(NamedTuple):
    """An event that a stream cannot give: its token, its BSON before the user's stages, and why."""

    token: Mapping[str, Any]
    event: bytes
    error: TailraceError


def refused_event(error: TailraceError) -> Refused | None:
    """The event that ``error`` is about, where the stream knows it. One whose ``_id`` the user's stages have changed
    does not count: they would change every other one, too."""
    if not isinstance(error, ServerError) or not isinstance(error.event, ChangeEvent):
        return None
    return Refused(bson.decode(error.event.token_bson), QuarantinedEvent.of(error.event, error).event, error)


def as_raw(event: bytes) -> RawBSONDocument:
    """An event as listeners hold it. Its top-level strings need not be UTF-8: a user's stages can put any there."""
    return RawBSONDocument(event, _RAW)


def token_of(event: bytes) -> Mapping[str, Any]:
    """The resume token of an event."""
    element = raw_bson.find(event, b"_id")
    assert element is not None
    return bson.decode(raw_bson.value(event, element))


def operation_and_token(event: bytes) -> tuple[Mapping[str, Any], str]:
    """Token and ``operationType`` of an event. In most they are at the beginning, and decoding all fields would take
    three times as long. A user's stages can have taken the operation away: it is empty then, but for an invalidate,
    which its token names."""
    token: Mapping[str, Any] | None = None
    for element in raw_bson.elements(event):
        if element.name == b"_id":
            token = bson.decode(raw_bson.value(event, element))
        elif element.name == b"operationType" and token is not None:
            if element.type != raw_bson.STRING:
                break
            return token, raw_bson.value(event, element)[4:-1].decode()
    if token is None:
        token = bson.decode(event)["_id"]
    found = raw_bson.find(event, b"operationType")
    if found is not None and found.type == raw_bson.STRING:
        return token, raw_bson.value(event, found)[4:-1].decode()
    return token, "invalidate" if ResumeToken.parse(token).from_invalidate else ""
