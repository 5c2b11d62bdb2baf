"""What a stream's own stages may cost, seen from their text alone. No I/O, and nothing is evaluated.

Stages are plain if each event costs them no more than a walk over its bytes for each field that they name: a ``$match``
that compares fields with values, a ``$project`` or ``$unset`` that names fields. All others may compute for as long as
they like, even before there is an event (constants are computed when a stream is opened).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.raw_bson import ARRAY, BOOL, DOUBLE, INT32, INT64, OBJECT, REGEX, STRING, Element
from tailrace.errors import TailraceError

#: Fields that plain stages may name together, and bytes of their text.
_FIELDS_MAX: Final = 64
_BYTES_MAX: Final = 1 << 14
_DEPTH_MAX: Final = 20
_COMPARISONS: Final = frozenset({b"$eq", b"$ne", b"$gt", b"$gte", b"$lt", b"$lte", b"$exists", b"$type", b"$size"})
_LISTS: Final = frozenset({b"$in", b"$nin", b"$all"})
_LOGICAL: Final = frozenset({b"$and", b"$or", b"$nor"})
_NUMBERS: Final = frozenset({INT32, INT64, DOUBLE, BOOL})
_SPLIT: Final = b"$changeStreamSplitLargeEvent"


@dataclass(frozen=True, slots=True)
class StageCost:
    """The stages of an aggregate that follow ``$changeStream``.

    ``fields``  how many fields they name; ``None``: they are not plain
    ``digest``  of the stages and of what they depend on, of 16 bytes. Where a stream begins is no part of it
    """

    fields: int | None
    digest: bytes

    @property
    def is_plain(self) -> bool:
        return self.fields is not None

    @property
    def weight(self) -> int:
        """By how much more than without stages a batch costs."""
        return 1 + (self.fields or 0) // 4


class _NotPlainError(Exception):
    pass


def cost_of(command: bytes) -> StageCost:
    """The cost of an aggregate's stages. A command that is not valid is plain: it costs no more than its error."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        depends = [each for name in (b"let", b"collation") if (each := raw_bson.find(command, name)) is not None]
        stages = _stages(command)[1:]
        for part in (*stages, *(command[each.start : each.end] for each in depends)):
            digest.update(part)
        fields = None
        if not depends and sum(map(len, stages)) <= _BYTES_MAX:
            counted = sum(map(_stage, stages))
            fields = counted if counted <= _FIELDS_MAX else None
    except _NotPlainError:
        fields = None
    except TailraceError:
        fields = 0
    return StageCost(fields, digest.digest())


def _stages(command: bytes) -> list[bytes]:
    pipeline = raw_bson.find(command, b"pipeline")
    if pipeline is None or pipeline.type != ARRAY:
        return []
    return [
        command[stage.value_start : stage.end]
        for stage in raw_bson.elements(command, pipeline.value_start)
        if stage.type == OBJECT
    ]


def _stage(stage: bytes) -> int:
    """How many fields a stage names."""
    for element in raw_bson.elements(stage):
        specification = raw_bson.value(stage, element)
        if element.name == b"$match" and element.type == OBJECT:
            return _match(specification, 0)
        if element.name == b"$project" and element.type == OBJECT:
            return _project(specification, 0)
        if element.name == b"$unset" and element.type in (STRING, ARRAY):
            return 1 if element.type == STRING else len(list(raw_bson.elements(specification)))
        if element.name == _SPLIT:
            return 0
        raise _NotPlainError
    return 0


def _match(query: bytes, depth: int) -> int:
    if depth > _DEPTH_MAX:
        raise _NotPlainError
    fields = 0
    for element in raw_bson.elements(query):
        value = raw_bson.value(query, element)
        if element.name in _LOGICAL and element.type == ARRAY:
            fields += sum(_match(raw_bson.value(value, each), depth + 1) for each in _documents(value))
        elif element.name == b"$comment":
            continue
        elif element.name[:1] == b"$" or element.type == REGEX or _has_index(element.name):
            raise _NotPlainError
        else:
            fields += _tests(element, value, depth)
    return fields


def _has_index(path: bytes) -> bool:
    """Whether a name of a path is a number. In arrays it is tried as an index and as a name: over nested arrays that
    doubles with each name (a server too takes 8 s for one event and a path of sixty, measured on 6.0.27)."""
    return b"." in path and any(name.isdigit() for name in path.split(b"."))


def _tests(element: Element, value: bytes, depth: int) -> int:
    """How often a field is read by what stands next to its name."""
    operators = list(raw_bson.elements(value)) if element.type == OBJECT else []
    if not operators or operators[0].name[:1] != b"$":
        return 1
    for operator in operators:
        inner = raw_bson.value(value, operator)
        if operator.name == b"$not" and operator.type == OBJECT and depth < _DEPTH_MAX:
            _tests(operator, inner, depth + 1)
        elif operator.name in _LISTS and operator.type == ARRAY:
            if any(each.type in (REGEX, OBJECT) for each in raw_bson.elements(inner)):
                raise _NotPlainError
        elif operator.name not in _COMPARISONS or operator.type == REGEX:
            raise _NotPlainError
    return len(operators)


def _documents(array: bytes) -> list[Element]:
    return [each for each in raw_bson.elements(array) if each.type == OBJECT]


def _project(specification: bytes, depth: int) -> int:
    fields = 0
    for element in raw_bson.elements(specification):
        if element.name[:1] == b"$" or depth > _DEPTH_MAX:
            raise _NotPlainError
        if element.type == OBJECT:
            fields += _project(raw_bson.value(specification, element), depth + 1)
        elif element.type in _NUMBERS:
            fields += 1
        else:
            raise _NotPlainError
    return fields
