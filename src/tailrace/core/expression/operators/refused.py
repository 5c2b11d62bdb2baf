"""Operators that exist and are not evaluated here: what their parsers refuse, and the rest by name."""

from __future__ import annotations

from typing import Final

from tailrace.core.expression.language.expression import Bindings, Expression
from tailrace.core.expression.language.registry import NOT_SUPPORTED, parse_failure, refuse, register
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value


def _function(operand: Value, bindings: Bindings) -> None:
    if operand[0] != v.OBJECT:
        raise parse_failure(31260, f"$function requires an object as an argument, found: {v.type_name(operand)}")
    if v.field(operand[1], b"body") is None:
        raise parse_failure(31261, "The body function must be specified.")


def _rand(operand: Value, bindings: Bindings) -> None:
    if operand[0] not in (v.OBJECT, v.ARRAY):
        raise parse_failure(10065, "invalid parameter: expected an object ($rand)")
    if v.fields_of(operand[1]):
        raise parse_failure(3040501, "$rand does not currently accept arguments")


#: What a query may have left beside a document; of it the server says when the stream is opened that it is not there.
_OF_QUERIES: Final = {b"textScore", b"geoNearDistance", b"geoNearPoint"}
#: What an event has where the server keeps its oplog entry, and elsewhere not.
_OF_THE_ENTRY: Final = {b"sortKey", b"recordId", b"randVal", b"indexKey"}
#: What no event carries: missing, on the server too.
_NEVER_THERE: Final = frozenset(
    {
        b"searchScore",
        b"searchHighlights",
        b"searchScoreDetails",
        b"searchSequenceToken",
        b"timeseriesBucketMinTime",
        b"timeseriesBucketMaxTime",
        b"vectorSearchScore",
    }
)


def _meta(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.STRING:
        raise parse_failure(17307, "$meta only supports string arguments")
    wanted = v.bytes_of(operand)
    if wanted in _OF_QUERIES:
        raise parse_failure(40218, f"query requires {wanted.decode()} metadata, but it is not available")
    if wanted in _OF_THE_ENTRY:
        raise parse_failure(NOT_SUPPORTED, f"$meta is not supported with {wanted.decode()!r}: it is the server's own")
    if wanted not in _NEVER_THERE:
        raise parse_failure(17308, f"Unsupported argument to $meta: {wanted.decode('utf-8', 'replace')}")
    return Expression(lambda frame: None, "operator", name="$meta")


refuse("$function", "expression", "JavaScript is not run here", check=_function)
refuse("$rand", "expression", "it is random", check=_rand)
register(
    "$meta",
    "variable",
    "2.6",
    _meta,
    note="events carry none: missing; `sortKey`, `recordId`, `randVal`, `indexKey` are refused",
)
