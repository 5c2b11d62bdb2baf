"""Whether an entry with an operation and a namespace could pass a query of the oplog, so that a reader of the archive
can leave row groups out. Where these two do not decide it, it could."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError

_CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_AUTO)
_FIELDS: Final = {"op": 0, "ns": 1}


def passing(oplog_filter: bytes | None) -> Callable[[str, str], bool] | None:
    """Says about an operation and a namespace whether such an entry may pass; ``None`` where all may."""
    if oplog_filter is None:
        return None
    try:
        query = bson.decode(oplog_filter, codec_options=_CODEC)
    except (BSONError, ValueError, OverflowError, RecursionError):
        return None  # values of a user's that Python does not have

    @lru_cache(maxsize=65536)
    def passes(operation: str, namespace: str) -> bool:
        return _may(query, (operation, namespace))

    return passes


def _may(query: Mapping[str, Any], entry: tuple[str, str]) -> bool:
    """Whether the query may pass. A part that is not known may."""
    for name, condition in query.items():
        if name == "$and":
            passes = all(_may(part, entry) for part in condition)
        elif name == "$or":
            passes = any(_may(part, entry) for part in condition)
        elif name in _FIELDS:
            passes = _may_value(entry[_FIELDS[name]], condition)
        else:
            passes = True
        if not passes:
            return False
    return True


def _may_value(value: str, condition: Any) -> bool:
    if isinstance(condition, str):
        return value == condition
    if isinstance(condition, bson.Regex):
        return _may_match(value, condition.pattern, condition.flags)
    if not isinstance(condition, Mapping) or not all(name.startswith("$") for name in condition):
        return True
    for name, argument in condition.items():
        if name == "$eq" and isinstance(argument, str):
            passes = value == argument
        elif name == "$ne" and isinstance(argument, str):
            passes = value != argument
        elif name == "$in":
            passes = any(_may_value(value, one) for one in argument)
        elif name == "$nin" and all(isinstance(one, str) for one in argument):
            passes = value not in argument
        elif name == "$regex" and "$options" not in condition:
            passes = _may_value(value, argument) if isinstance(argument, bson.Regex) else _may_match(value, argument, 0)
        else:
            passes = True
        if not passes:
            return False
    return True


def _may_match(value: str, pattern: Any, flags: int) -> bool:
    """Patterns of ours mean the same to Python as to the server; one that Python cannot read may match."""
    try:
        return re.search(pattern, value, flags) is not None
    except (re.error, TypeError):
        return True
