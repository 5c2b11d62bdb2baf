"""What a view shows: the collections and views of its database that its definition names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

_ANY_VALUE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="surrogateescape"
)


def collections_shown(options: bytes) -> frozenset[str]:
    """The names that the options of a view give: what it is on, and what its stages join. A name in the place of
    another database's is not among them: no view may read there."""
    fields = bson.decode(options, _ANY_VALUE)
    return frozenset([str(fields.get("viewOn", "")), *_joined(fields.get("pipeline", ()))])


def _joined(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inside in value.items():
            if name in ("$lookup", "$graphLookup") and isinstance(inside, Mapping):
                yield from _named(inside.get("from"))
            elif name == "$unionWith":
                yield from _named(inside.get("coll") if isinstance(inside, Mapping) else inside)
            yield from _joined(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _joined(inside)


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
