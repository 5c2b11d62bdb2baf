"""``encrypt`` and ``encryptMetadata`` of a ``$jsonSchema``: values that a client encrypted, seen from outside.

An encrypted value is binary data of subtype 6: a byte for the kind of encryption, 16 for the key, one for the type that
was encrypted, and the ciphertext.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast

from tailrace.core.expression.language.registry import parse_failure
from tailrace.core.expression.match.types import ALIASES
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

_SUBTYPE: Final = 6
_TYPE_AT: Final = 17
_ALGORITHMS: Final = {"AEAD_AES_256_CBC_HMAC_SHA_512-Deterministic", "AEAD_AES_256_CBC_HMAC_SHA_512-Random"}


def check_beside(fields: Mapping[str, Value]) -> None:
    """What may not stand together in one schema, and ``encryptMetadata``, which tests nothing."""
    if "encrypt" in fields and "encryptMetadata" in fields:
        raise parse_failure(9, "Cannot specify both $jsonSchema keywords 'encrypt' and 'encryptMetadata'")
    for beside in ("type", "bsonType"):
        if "encrypt" in fields and beside in fields:
            raise parse_failure(9, f"$jsonSchema keyword 'encrypt' cannot be used in conjunction with '{beside}'")
    metadata = fields.get("encryptMetadata")
    if metadata is not None:
        if metadata == v.EMPTY_OBJECT:
            raise parse_failure(9, "$jsonSchema keyword 'encryptMetadata' cannot be an empty object")
        _options("encryptMetadata", metadata, ("algorithm", "keyId"))


def parse(value: Value) -> frozenset[int] | None:
    """The types that may have been encrypted; ``None`` for any."""
    given = _options("encrypt", value, ("algorithm", "keyId", "bsonType"))
    wanted = given.get("bsonType")
    if wanted is None:
        return None
    items = v.elements_of(wanted) if wanted[0] == v.ARRAY else [wanted]
    found: set[int] = set()
    for item in items:
        if item[0] != v.STRING:
            raise parse_failure(14, "$jsonSchema keyword 'bsonType' must be either a string or an array of strings")
        types = ALIASES.get(v.text_of(item))
        if types is None:
            raise parse_failure(2, f"Unknown type name alias: {v.text_of(item)}")
        found |= types
    return frozenset(found)


def _options(keyword: str, value: Value, allowed: tuple[str, ...]) -> dict[str, Value]:
    if value[0] != v.OBJECT:
        raise parse_failure(14, f"$jsonSchema keyword '{keyword}' must be an object")
    given = {name.decode("utf-8", "replace"): (kind, data) for name, kind, data in v.fields_of(value[1])}
    for name in given:
        if name not in allowed:
            raise parse_failure(40415, f"BSON field '{keyword}.{name}' is an unknown field.")
    algorithm = given.get("algorithm")
    if algorithm is not None and (algorithm[0] != v.STRING or v.text_of(algorithm) not in _ALGORITHMS):
        code = 2 if algorithm[0] == v.STRING else 14
        raise parse_failure(code, f"'{keyword}.algorithm' is not the name of an algorithm")
    if "keyId" in given:
        _check_key(given["keyId"])
    return given


def _check_key(key: Value) -> None:
    if key[0] == v.STRING:
        if key[1][4:5] != b"/":
            raise parse_failure(51065, "JSONPointer must start with a '/'")
        return
    if key[0] != v.ARRAY:
        raise parse_failure(51085, f"Expected either string or array of UUID for keyId, found {v.type_name(key)}")
    for item in v.elements_of(key):
        if item[0] != v.BINARY:
            raise parse_failure(51088, f"'keyId' array elements must have type BinData, found {v.type_name(item)}")


def test_of(argument: object) -> Callable[[Value], bool]:
    types = cast("frozenset[int] | None", argument)

    def test(found: Value) -> bool:
        kind, data = found
        if kind != v.BINARY or data[4] != _SUBTYPE:
            return False
        blob = data[5:]
        return types is None or (len(blob) > _TYPE_AT and blob[0] in (1, 2) and blob[_TYPE_AT] in types)

    return test
