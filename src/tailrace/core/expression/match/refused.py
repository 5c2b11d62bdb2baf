"""Query operators that exist and are not evaluated here: what their parsers refuse, and the rest by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tailrace.core.expression.language.registry import NOT_SUPPORTED, parse_failure, refuse, unsupported
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

_BAD_VALUE: Final = 2

#: Operators of a whole document: below a field the server does not know them.
PATHLESS: Final = frozenset({"$where", "$text", "$sampleRate"})
#: Before 6.0 a server has no code of its own for these: 2.
NEAR_CODE: Final = 5626500
_NEAR: Final = ("$near", "$nearSphere", "$geoNear")
_WITHIN: Final = ("$geoWithin", "$geoIntersects", "$within")
_SHAPES: Final = {b"$geometry", b"$box", b"$center", b"$centerSphere", b"$polygon"}
_GEO_JSON: Final = {
    b"Point",
    b"LineString",
    b"Polygon",
    b"MultiPoint",
    b"MultiLineString",
    b"MultiPolygon",
    b"GeometryCollection",
}
#: Tests that the server makes of a ``$jsonSchema`` or an ``$expr`` and takes from a user too.
_INTERNAL: Final = (
    "ExprEq",
    "ExprGt",
    "ExprGte",
    "ExprLt",
    "ExprLte",
    "EqHash",
    "SchemaAllElemMatchFromIndex",
    "SchemaBinDataEncryptedType",
    "SchemaBinDataFLE2EncryptedType",
    "SchemaBinDataSubType",
    "SchemaEq",
    "SchemaFmod",
    "SchemaMatchArrayIndex",
    "SchemaMaxItems",
    "SchemaMaxLength",
    "SchemaMinItems",
    "SchemaMinLength",
    "SchemaObjectMatch",
    "SchemaType",
    "SchemaUniqueItems",
)


def check_pathless(name: str, value: Value, *, top_level: bool) -> None:
    """Raise what the server's parser of ``$text``, ``$where`` and ``$sampleRate`` raises for a malformed argument."""
    if not top_level and name != "$where":
        raise parse_failure(_BAD_VALUE, f"{name} can only be applied to the top-level document")
    if name == "$sampleRate":
        if value[0] not in v.NUMERIC:
            raise parse_failure(_BAD_VALUE, "argument to $sampleRate must be a numeric type")
        if not 0 <= v.number_of(value) <= 1:
            raise parse_failure(_BAD_VALUE, "numeric argument to $sampleRate must be in [0, 1]")
    if name == "$text":
        _check_text(value)


_TEXT_OPTIONS: Final = {
    b"$search": v.STRING,
    b"$language": v.STRING,
    b"$caseSensitive": v.BOOL,
    b"$diacriticSensitive": v.BOOL,
}


def refuse_paths(keyword: str, names: Iterable[bytes]) -> None:
    """Of the names of fields in a ``$jsonSchema``: one with a dot is a path to the server (measured on 4.4.2 to
    7.0.28), which JSON Schema does not know."""
    for name in names:
        if b"." in name:
            shown = name.decode("utf-8", "backslashreplace")
            raise unsupported(
                f"$jsonSchema keyword '{keyword}' with the name '{shown}'", "the server takes its dot for a path"
            )


def _check_text(value: Value) -> None:
    if value[0] != v.OBJECT:
        raise parse_failure(_BAD_VALUE, "$text expects an object")
    given = {name: kind for name, kind, _ in v.fields_of(value[1])}
    if b"$search" not in given:
        raise parse_failure(4, 'Missing expected field "$search"')
    for name, kind in _TEXT_OPTIONS.items():
        if given.get(name, kind) != kind:
            raise parse_failure(14, f'"{name.decode()}" had the wrong type')
    if not given.keys() <= _TEXT_OPTIONS.keys():
        raise parse_failure(_BAD_VALUE, "extra fields in $text")


def check_geometry(name: str, value: Value) -> None:
    """Raise what the server raises for an argument of ``$near``, ``$geoWithin`` and their kin that has no geometry."""
    if name not in _WITHIN and name not in _NEAR:
        return
    if value[0] not in (v.OBJECT, v.ARRAY):
        raise parse_failure(_BAD_VALUE, f"{name} needs an object or an array")
    if name in _NEAR:
        return
    fields = v.fields_of(value[1]) if value[0] == v.OBJECT else []
    if not fields:
        raise parse_failure(_BAD_VALUE, "geo query doesn't have any geometry")
    shape, kind, data = fields[0]
    known = {b"$geometry"} if name == "$geoIntersects" else _SHAPES
    if shape not in known or kind not in (v.OBJECT, v.ARRAY):
        raise parse_failure(_BAD_VALUE, f"unknown geo specifier: {shape.decode('utf-8', 'replace')}")
    if shape == b"$geometry":
        named = v.field(data, b"type")
        if named is None or named[0] != v.STRING or v.bytes_of(named) not in _GEO_JSON:
            raise parse_failure(_BAD_VALUE, "unknown GeoJSON type")


refuse("$where", "query", "is not allowed in this context", code=_BAD_VALUE)
refuse("$text", "query", "is only allowed as the first pipeline stage", code=17313)
refuse("$sampleRate", "query", "is not supported between 0 and 1: it is random", code=NOT_SUPPORTED)
for _name in _NEAR:
    refuse(_name, "query", "is not allowed in this context", code=NEAR_CODE)
for _name in _WITHIN:
    refuse(_name, "query", "is not supported: geometry is left to the server", code=NOT_SUPPORTED)
for _name in _INTERNAL:
    refuse(f"$_internal{_name}", "query", "is the server's own, not supported", code=NOT_SUPPORTED)
