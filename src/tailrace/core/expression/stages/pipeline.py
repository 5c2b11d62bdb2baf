"""The user's pipeline: compiled once, applied to the bytes of each event."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import bson

from tailrace.core.event.change_event import KeptPlaces
from tailrace.core.expression.language.core import check_variable_write, parse_operand
from tailrace.core.expression.language.expression import Bindings, Compilation
from tailrace.core.expression.language.registry import (
    NOT_SUPPORTED,
    check_buffer,
    failure,
    parse_failure,
    unmeasured,
    unsupported,
)
from tailrace.core.expression.language.version import USUAL, Version, buffer_limit, is_unmeasured, knows
from tailrace.core.expression.stages.compiled import STAGES, Stage
from tailrace.core.expression.stages.event_places import may_be_set, with_places
from tailrace.core.expression.stages.forbidden import (
    NOT_PERMITTED,
    REFUSED_OTHERWISE,
    STAGES_SINCE,
    check_refused,
    refused_name,
)
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.collation import Collation, order_of
from tailrace.core.expression.values.compare import SIMPLE, Order
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.core.raw_bson import document_end, explained
from tailrace.errors import InternalError, TailraceError, UsageError

SPLIT_STAGE: Final = "$changeStreamSplitLargeEvent"
INHIBIT_STAGE: Final = "$_internalInhibitOptimization"
#: How deep BSON may nest on the server. A stage stands one level deep in its command.
MAX_DEPTH: Final = 200
#: Python frames that a pipeline of this depth and its values need, whoever the caller is. Python's own limit is 1000.
_FRAMES: Final = 4000
_NESTING: Final = (b"\x03", b"\x04")


@dataclass(frozen=True, slots=True)
class CompiledPipeline:
    """A compiled pipeline. ``split_large_event``: it ended in ``$changeStreamSplitLargeEvent``, which is not a stage
    here. ``replaces_id`` is false when no stage can touch ``_id``, so that its guard (280) can be left out."""

    stages: tuple[Stage, ...]
    split_large_event: bool
    keeps_places: bool = False
    #: Set where a stage may set a field that the event has no value but a place for.
    sets_event_fields: bool = False
    show_expanded_events: bool = False
    event_places: KeptPlaces = "all"
    #: The bytes that an event may have in the making.
    buffer_limit: int = buffer_limit(USUAL)

    def apply(self, event: bytes) -> bytes | None:
        """The event after all stages, or ``None`` when a stage filters it out.

        Raises ``ServerError`` with the server's code, and the stage as hint, when an expression fails on this event.
        """
        document = self.apply_rest(self.with_places(event) if self.sets_event_fields else event, 0)
        if document is None:
            return None
        try:
            if self.keeps_places:
                document = v.stripped(document)
            if document is not event:
                check_event(document, self.buffer_limit)
        except Exception as error:
            if isinstance(error, TailraceError) and not isinstance(error, InternalError):
                raise
            raise explained([event], error) from error
        return document

    def with_places(self, event: bytes) -> bytes:
        """The event with the places of fields that a stage may set."""
        try:
            return with_places(event, expanded=self.show_expanded_events, places=self.event_places)
        except Exception as error:
            raise explained([event], error) from error

    def apply_rest(self, document: bytes, first: int) -> bytes | None:
        """What the stages from number ``first`` on make of a document, with the places that fields may have kept."""
        for place in range(first, len(self.stages)):
            stage = self.stages[place]
            try:
                result = stage.apply(document)
            except TailraceError as error:
                if isinstance(error, InternalError):
                    raise explained([document], error) from error
                if error.hint is None:
                    error.hint = f"At stage {place} of the pipeline, {stage.name}"
                raise
            except RecursionError:
                raise failure(15, f"exceeded the depth that can be evaluated at stage {place}, {stage.name}") from None
            except Exception as error:
                raise explained([document], error) from error
            if result is None:
                return None
            document = result
        return document

    @property
    def replaces_id(self) -> bool:
        return any(stage.name != "$match" for stage in self.stages)


def compile_stages(
    stages: Sequence[bytes],
    *,
    let: Mapping[str, Any] | bytes | None = None,
    now: int | None = None,
    cluster_time: int | None = None,
    collation: Collation | None = None,
    show_expanded_events: bool = False,
    event_places: KeptPlaces = "all",
    version: Version = USUAL,
) -> CompiledPipeline:
    """Compile the stages that follow ``$changeStream``; each is the BSON of one stage document.

    ``let`` are the command's variables, ``now`` milliseconds since 1970 for ``$$NOW``, ``cluster_time`` the 64 bits of
    ``$$CLUSTER_TIME``. Strings are compared in the order of ``collation``, by their bytes without one. Raises
    ``UsageError`` with the server's code and the place in the pipeline. ``show_expanded_events`` is the stream's
    option: such events have more fields, and a stage that sets one must find its place; ``event_places`` says which
    fields have one. ``version`` is that of the
    server whose language it is: what came later it does not know, and is refused as that server refuses it.
    """
    if sys.getrecursionlimit() < _FRAMES:
        sys.setrecursionlimit(_FRAMES)
    check_depths(stages)
    order = order_of(collation)
    constants = _constants(let, now, cluster_time, Bindings.of_document({"REMOVE": None}, order, version))
    compiler = Compiler(constants, list(stages), order, version, has_places=event_places != "none")
    compiled = [compiler.stage(place) for place in range(len(stages))]
    if compiler.not_permitted:
        raise compiler.not_permitted[0]
    if compiler.failures:
        raise compiler.failures[0]
    return CompiledPipeline(
        tuple(stage for stage in compiled if stage is not None),
        split_large_event=compiler.split is not None,
        keeps_places=compiler.keeps_places,
        sets_event_fields=compiler.sets_event_fields,
        show_expanded_events=show_expanded_events,
        event_places=event_places,
        buffer_limit=buffer_limit(version),
    )


class Compiler:
    """One compilation: stage after stage; errors of other kinds than parsing wait until all are parsed."""

    def __init__(
        self,
        constants: dict[str, Maybe],
        stages: list[bytes],
        order: Order = SIMPLE,
        version: Version = USUAL,
        *,
        has_places: bool = True,
    ) -> None:
        self.constants = constants
        self.stages = stages
        self.order = order
        self.version = version
        self.not_permitted: list[UsageError] = []
        self.failures: list[UsageError] = []
        self.split: int | None = None
        self.sets_event_fields = has_places and any(map(may_be_set, stages))
        self.keeps_places = self.sets_event_fields

    def stage(self, place: int) -> Stage | None:
        compilation = Compilation(
            places=self._places(place), after_places=self.keeps_places, order=self.order, version=self.version
        )
        self.keeps_places |= compilation.places
        bindings = Bindings(compilation, {"ROOT": 0, "CURRENT": 0}, self.constants)
        try:
            return self._parsed(self.stages[place], bindings, place)
        except TailraceError as error:
            raise self._placed(error, place, compilation) from None
        except RecursionError:
            message = f"exceeded the depth to which a pipeline may nest: {MAX_DEPTH}"
            raise UsageError(message, code=15, hint=f"At pipeline[{place}]") from None
        finally:
            self.failures += [
                UsageError(error.message, code=error.code, hint=f"At pipeline[{place}].{(error.hint or '')[3:]}")
                for error in compilation.failures
            ]

    def _places(self, place: int) -> bool:
        """Whether a field that this stage drops may be set again, by a later stage or by ``$setField``."""
        shaping = (b"$set\x00", b"$addFields\x00", b"$project\x00", b"$replace", b"$unset\x00")
        later = any(raw[5:].startswith(shaping) for raw in self.stages[place + 1 :])
        return later or b"$setField\x00" in self.stages[place]

    def _placed(self, error: TailraceError, place: int, compilation: Compilation) -> UsageError:
        at = ".".join((f"pipeline[{place}]", *compilation.place))
        return UsageError(error.message, code=error.code, hint=error.hint or f"At {at}")

    def _parsed(self, raw: bytes, bindings: Bindings, place: int) -> Stage | None:
        fields = v.fields_of(raw)
        if len(fields) != 1:
            raise parse_failure(40323, "A pipeline stage specification object must contain exactly one field.")
        name = fields[0][0].decode("utf-8", "replace")
        specification = (fields[0][1], fields[0][2])
        bindings.enter(name)
        check_name(name, self.version)
        if self.split is not None:
            error = parse_failure(7182802, f"{SPLIT_STAGE} must be the last stage in the pipeline")
            self.not_permitted.append(self._placed(error, self.split, bindings.compilation))
        parse = STAGES.get(name)
        if parse is not None:
            parsed, apply = parse(specification, bindings)
            return Stage(name, specification, parsed, apply, bindings.compilation)
        self._other(name, specification, bindings, place)
        return None

    def _other(self, name: str, specification: Value, bindings: Bindings, place: int) -> None:
        """Everything that is not one of our stages: the split, what is refused, what is unknown."""
        if name == SPLIT_STAGE:
            if specification[0] != v.OBJECT:
                raise parse_failure(7182899, f"{SPLIT_STAGE} must take a nested object")
            if specification != v.EMPTY_OBJECT:
                raise parse_failure(7182800, f"{SPLIT_STAGE} spec should be an empty object")
            self.split = place
        elif name in REFUSED_OTHERWISE:
            check_refused(name, specification, bindings)
            code, reason = REFUSED_OTHERWISE[name]
            raise parse_failure(code, f"{name} {reason}")
        elif name in NOT_PERMITTED:
            check_refused(name, specification, bindings)
            shown = refused_name(name, specification)
            if shown is None:
                raise parse_failure(NOT_SUPPORTED, f"{name} is not supported in a change stream")
            error = parse_failure(20, f"{shown} is not permitted in a $changeStream pipeline")
            self.not_permitted.append(self._placed(error, place, bindings.compilation))
        elif specification != v.EMPTY_OBJECT:  # the one that is left, which only keeps the server from optimizing
            raise parse_failure(9 if specification[0] == v.OBJECT else 14, f"{name} takes an empty object")


def check_name(name: str, version: Version) -> None:
    """Refuse a stage that a server of ``version`` does not know, which it does before it looks into any stage."""
    known = name in STAGES or name in REFUSED_OTHERWISE or name in NOT_PERMITTED or name in (SPLIT_STAGE, INHIBIT_STAGE)
    if known and knows(version, STAGES_SINCE.get(name, "3.6")):
        return
    if not known and is_unmeasured(version):
        raise unsupported(name, unmeasured(version))
    raise parse_failure(40324, f"Unrecognized pipeline stage name: '{name}'")


def check_depths(stages: Sequence[bytes]) -> None:
    """Refuse what nests deeper than the server takes: before anything is parsed, which would recurse into it."""
    for place, raw in enumerate(stages):
        try:
            document_end(raw)
            if deeper_than(raw, MAX_DEPTH - 1):
                raise parse_failure(15, f"exceeded maximum nested object depth: {MAX_DEPTH}")
        except TailraceError as error:
            raise UsageError(error.message, code=error.code, hint=error.hint or f"At pipeline[{place}]") from None


def check_event(document: bytes, limit: int) -> None:
    """What the server finds when it writes an event: that it nests too deep (15), or fits into no buffer (13548)."""
    check_buffer(len(document), limit)
    if sum(map(document.count, _NESTING)) >= MAX_DEPTH and deeper_than(document, MAX_DEPTH):
        raise failure(15, f"BSONObj exceeded maximum nested object depth: {MAX_DEPTH}")


def deeper_than(document: bytes, depth: int) -> bool:
    """Whether a document nests deeper, itself counted. It is read once; what is deeper than ``depth`` is not."""
    level = [document]
    for _ in range(depth):
        level = [data for each in level for _, kind, data in v.fields_of(each) if kind in (v.OBJECT, v.ARRAY)]
        if not level:
            return False
    return True


def _constants(
    let: Mapping[str, Any] | bytes | None, now: int | None, cluster_time: int | None, bindings: Bindings
) -> dict[str, Maybe]:
    """The constant variables: ``bindings`` holds them too, so that one of ``let`` sees those before it."""
    constants = bindings.constants
    if now is not None:
        constants["NOW"] = v.date(now)
    if cluster_time is not None:
        constants["CLUSTER_TIME"] = v.timestamp(cluster_time >> 32, cluster_time & 0xFFFFFFFF)
    if let is None:
        return constants
    for name, kind, data in v.fields_of(let if isinstance(let, bytes) else bson.encode(let)):
        shown = name.decode("utf-8", "replace")
        check_variable_write(shown, bindings)
        expression = parse_operand((kind, data), bindings)
        if not expression.constant:
            raise parse_failure(4890500, "Command let Expression does not evaluate to a constant")
        constants[shown] = expression.value
    return constants
