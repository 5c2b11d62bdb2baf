"""SplitLargeEvent: ``$changeStreamSplitLargeEvent``, and the size limit without it (semantics 6.2, 7)."""

from __future__ import annotations

from typing import Final, Self

from tailrace.core import raw_bson
from tailrace.core.event.bson_text import spaced_document_text
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken, encode_event_token
from tailrace.core.raw_bson import INT32, OBJECT, Element, encode_document, encode_element, encode_int32
from tailrace.core.stage.check_resumability import ResumeStatus, compare_with_token
from tailrace.core.stage.setup import RouterSetup, RouterStage
from tailrace.errors import ChangeStreamFatal, ServerError, at_event

#: A reply's document may be this large: 16 MiB and 16 KiB (BSONObjMaxInternalSize of mongod 6.0).
EVENT_BYTES_MAX: Final = 16_793_600
#: An event is split when it and its token together exceed this: room is left for the reply around it.
SPLIT_BYTES_MAX: Final = EVENT_BYTES_MAX - 8_192
#: Below this sum of its documents an event cannot reach the limit; its bytes need not be made to know.
SURELY_SMALL_BYTES: Final = 12_000_000


def approximate_bytes(event: ChangeEvent) -> int:
    """About how large an event is: the sum of the documents that it has, without its small parts."""
    if event.replaced_by is not None:
        return len(event.replaced_by)
    return sum(
        len(part)
        for part in (
            event.full_document,
            event.full_document_before_change,
            event.update_description,
            event.document_key,
            event.operation_description,
            event.state_before_change,
        )
        if part is not None
    )


def is_surely_small(event: ChangeEvent) -> bool:
    """Whether the event is certainly within the limits, judged by its parts."""
    return approximate_bytes(event) < SURELY_SMALL_BYTES


class CheckEventSize(RouterStage):
    """Without the split stage an event over 16 MB ends the stream: ``ServerError`` 10334 at that event."""

    @classmethod
    def is_needed(cls, setup: RouterSetup) -> bool:
        return not setup.user.split_large_event

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            if not is_surely_small(event):
                document = event.to_bson()
                if len(document) > EVENT_BYTES_MAX:
                    first = next(raw_bson.elements(document))
                    error = ServerError(
                        f"BSONObj size: {len(document)} (0x{len(document):X}) is invalid. Size must be between 0 and "
                        f"{EVENT_BYTES_MAX}(16MB) First element: {_first_element_text(document, first)}",
                        code=10334,
                        hint="Add $changeStreamSplitLargeEvent as the last stage of the pipeline",
                    )
                    raise at_event(error, event)
            out.append(event)


class SplitLargeEvent(RouterStage):
    """Gives an event that is too large as fragments, each with a token of its own.

    After a resume from a fragment, only the fragments after it. Raises 280 where the event resumed from is not split,
    or not into that many fragments.
    """

    @classmethod
    def is_needed(cls, setup: RouterSetup) -> bool:
        return setup.user.split_large_event

    @classmethod
    def of(cls, setup: RouterSetup) -> Self:
        return cls(setup.plan.start_token)

    def __init__(self, resumed_from: ResumeToken | None) -> None:
        self._resumed_from = (
            resumed_from if resumed_from is not None and resumed_from.fragment_num is not None else None
        )

    def process(self, events: list[ChangeEvent], out: list[ChangeEvent]) -> None:
        for event in events:
            skip = self._fragments_to_skip(event)
            if is_surely_small(event) or len(event.to_bson()) + len(event.token_bson) <= SPLIT_BYTES_MAX:
                if skip:
                    raise ChangeStreamFatal(
                        "Attempted to resume from a split event fragment, but the event in the resumed stream was not "
                        "large enough to be split"
                    )
                out.append(event)
                continue
            fragments = split_event(event)
            if skip >= len(fragments) + (1 if skip else 0):
                raise ChangeStreamFatal(
                    "Attempted to resume from a split event, but the resumed stream produced a different split. Ensure "
                    "that the pipeline used to resume is the same as the original"
                )
            out.extend(fragments[skip:])

    def _fragments_to_skip(self, event: ChangeEvent) -> int:
        token = self._resumed_from
        if token is None or token.fragment_num is None:
            return 0
        self._resumed_from = None
        return token.fragment_num + 1 if compare_with_token(event, token) is ResumeStatus.FOUND else 0


def split_event(event: ChangeEvent) -> list[ChangeEvent]:
    """The fragments of an event: its fields, smallest first, packed greedily.

    Raises ``ServerError`` 7182500 where a single field does not fit into a fragment.
    """
    document = event.to_bson()
    room = SPLIT_BYTES_MAX - len(event.token_bson)
    fields = [element for element in raw_bson.elements(document) if element.name != b"_id"]
    fields.sort(key=lambda element: (element.end - element.start, element.name))
    if not fields:
        raise ServerError("an event too large to send has no field but its _id", code=7182502)
    groups: list[list[Element]] = []
    size = 0
    for element in fields:
        element_size = element.end - element.start
        if not groups or size + element_size > room:
            groups.append([])
            size = len(_fragment(event.token_bson, 0, 0, b""))
        if not groups[-1] and size + element_size > room:
            raise ServerError(
                f"Splitting change event failed: fragment size {size + element_size} is greater than maximum "
                f"allowed fragment size {room}",
                code=7182500,
            )
        groups[-1].append(element)
        size += element_size
    token = event.token
    fragments: list[ChangeEvent] = []
    for number, group in enumerate(groups):
        fragment = ChangeEvent(event.operation_type, event.cluster_time, _fragment_token(token, number))
        body = b"".join(document[element.start : element.end] for element in group)
        fragment.replaced_by = _fragment(fragment.token_bson, number + 1, len(groups), body)
        fragment.namespace = event.namespace
        fragment.wall_time_ms = event.wall_time_ms
        fragments.append(fragment)
    return fragments


def _fragment(token_bson: bytes, number: int, of: int, body: bytes) -> bytes:
    split = encode_document(
        encode_element(INT32, b"fragment", encode_int32(number)), encode_element(INT32, b"of", encode_int32(of))
    )
    return encode_document(
        encode_element(OBJECT, b"_id", token_bson), encode_element(OBJECT, b"splitEvent", split), body
    )


def _fragment_token(token: ResumeToken, number: int) -> bytes:
    return encode_event_token(
        token.cluster_time,
        version=token.version,
        txn_op_index=token.txn_op_index,
        from_invalidate=token.from_invalidate,
        uuid=token.uuid,
        identifier=token.event_identifier,
        fragment_num=number,
    )


def _first_element_text(document: bytes, element: Element) -> str:
    if element.type != OBJECT:
        return element.name.decode("utf-8", "replace")
    return f"{element.name.decode('utf-8', 'replace')}: {spaced_document_text(raw_bson.value(document, element))}"
