"""Which stages of a user's pipeline can be used with masks: those that leave values under their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.raw_bson import ARRAY, BOOL, DECIMAL128, DOUBLE, INT32, INT64, OBJECT, STRING
from tailrace.errors import UsageError

_FLAGS: Final = frozenset({BOOL, INT32, INT64, DOUBLE, DECIMAL128})
#: Of these an event shows everything or nothing.
_WHOLE: Final = (b"documentKey.", b"ns.")
_HINT: Final = "$match, $unset and a $project that keeps or leaves out fields go together with masks"


def check_stages(stages: Iterable[bytes]) -> None:
    """Raises UsageError for a stage (BSON) that may move values to other names, where no rule of a mask looks."""
    for stage in stages:
        first = next(raw_bson.elements(stage), None)
        if first is None or first.name == b"$match":
            continue
        value = raw_bson.value(stage, first)
        if first.name == b"$project" and first.type == OBJECT:
            _check_fields(value, b"")
        elif first.name == b"$unset" and first.type in (STRING, ARRAY):
            names = [first] if first.type == STRING else list(raw_bson.elements(stage, first.value_start))
            for name in names:
                if name.type == STRING:
                    _check_path(raw_bson.read_string(stage, name.value_start))
        else:
            raise UsageError(
                f"the stage {first.name.decode('utf-8', 'replace')} may move values to names that no mask covers, "
                "and the stream is masked",
                hint=_HINT,
            )


def _check_fields(fields: bytes, before: bytes) -> None:
    for element in raw_bson.elements(fields):
        path = before + element.name
        _check_path(path)
        if element.type == OBJECT and not element.name.startswith(b"$"):
            _check_fields(raw_bson.value(fields, element), path + b".")
        elif element.type not in _FLAGS or element.name.startswith(b"$"):
            raise UsageError(
                f"the $project computes {path.decode('utf-8', 'replace')}, which no mask covers, and the stream is "
                "masked",
                hint=_HINT,
            )


def _check_path(path: bytes) -> None:
    if path.startswith(_WHOLE):
        raise UsageError(
            f"the pipeline takes {path.decode('utf-8', 'replace')} apart, and the masks are chosen by it",
            hint="Keep documentKey and ns as they are",
        )
