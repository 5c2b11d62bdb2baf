"""Reading the fields of a command as mongod 6.0 does, with its codes and messages (measured on 6.0.27)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_EVEN
from types import MappingProxyType
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.decimal128 import Decimal128
from bson.errors import BSONError

from tailrace.core import raw_bson
from tailrace.core.expression.language.version import USUAL, Version, knows
from tailrace.core.raw_bson import BOOL, DECIMAL128, DOUBLE, INT32, INT64, NULL, OBJECT, STRING, Element
from tailrace.errors import UsageError

_INT64_MAX: Final = (1 << 63) - 1
_INT32_MAX: Final = (1 << 31) - 1
_NUMBERS: Final = (INT32, INT64, DOUBLE, DECIMAL128)
_ANY_DATE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, unicode_decode_error_handler="replace"
)

#: Fields that any command may carry. They are of the connection, its session or its API version: not a stream's matter.
GENERIC_FIELDS: Final = frozenset(
    {
        b"$audit",
        b"$client",
        b"$clusterTime",
        b"$configServerState",
        b"$configTime",
        b"$db",
        b"$oplogQueryData",
        b"$queryOptions",
        b"$readPreference",
        b"$replData",
        b"$topologyTime",
        b"allowImplicitCollectionCreation",
        b"apiDeprecationErrors",
        b"apiStrict",
        b"apiVersion",
        b"autocommit",
        b"clientOperationKey",
        b"comment",
        b"coordinator",
        b"databaseVersion",
        b"help",
        b"lsid",
        b"maxTimeMSOpOnly",
        b"readConcern",
        b"serialization_context",
        b"shardVersion",
        b"startTransaction",
        b"stmtId",
        b"tracking_info",
        b"txnNumber",
        b"writeConcern",
    }
)


def check_bson(command: bytes) -> None:
    """Raise ``UsageError`` 22 unless the whole command is sound BSON; everything else may then trust its lengths."""
    try:
        bson.decode(command, _ANY_DATE)
    except (BSONError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"the command is not sound BSON: {error}", code=22) from None


class Fields:
    """The fields of a command document (or of one inside it) by name. ``name`` is what messages call it, ``version``
    that of the server whose messages they are."""

    def __init__(
        self,
        name: str,
        document: bytes,
        known: frozenset[bytes],
        version: Version = USUAL,
        checks: Mapping[bytes, Callable[[Fields], object]] = MappingProxyType({}),
    ) -> None:
        """Raises ``UsageError`` 40415 for a field that is not ``known``. ``checks`` are made of fields as they come:
        of two that are wrong, the server speaks of the first."""
        self.name = name
        self.document = document
        self.version = version
        self._by_name: dict[bytes, Element] = {}
        for element in raw_bson.elements(document):
            if element.name not in known:
                text = element.name.decode("utf-8", "replace")
                raise UsageError(f"BSON field '{name}.{text}' is an unknown field.", code=40415)
            self._by_name[element.name] = element
            check = checks.get(element.name)
            if check is not None:
                check(self)

    def get(self, name: bytes) -> Element | None:
        """The field, or ``None`` where it is absent; null counts as present."""
        return self._by_name.get(name)

    def given(self, name: bytes) -> Element | None:
        """The field, or ``None`` where it is absent or null."""
        element = self._by_name.get(name)
        return None if element is None or element.type == NULL else element

    def value(self, element: Element) -> bytes:
        return raw_bson.value(self.document, element)

    def decoded(self, element: Element) -> Any:
        """The value in Python's terms."""
        return decoded(self.document, element)

    def required(self, name: bytes) -> Element:
        element = self.given(name)
        if element is None:
            raise UsageError(f"BSON field '{self.name}.{name.decode()}' is missing but a required field", code=40414)
        return element

    def boolean(self, name: bytes) -> bool:
        """False where absent. 14 for any other type, null too."""
        element = self.get(name)
        if element is None:
            return False
        if element.type != BOOL:
            found = raw_bson.type_name(element.type)
            raise UsageError(f"Field '{name.decode()}' should be a boolean value, but found: {found}", code=14)
        return self.value(element) == b"\x01"

    def said(self, name: bytes) -> bool | None:
        """As ``boolean``; ``None`` where absent."""
        return None if self.get(name) is None else self.boolean(name)

    def text(self, element: Element) -> str:
        """A string's value. 14 for any other type."""
        if element.type != STRING:
            raise self.wrong_type(element, "type 'string'")
        return raw_bson.read_string(self.document, element.value_start).decode("utf-8", "replace")

    def object(self, name: bytes) -> bytes | None:
        """An embedded document, or ``None`` where absent or null."""
        element = self.given(name)
        if element is None:
            return None
        if element.type != OBJECT:
            raise self.wrong_type(element, "type 'object'")
        return self.value(element)

    def long(self, element: Element) -> int:
        """An int64 and nothing that merely could be one: cursor ids."""
        if element.type != INT64:
            raise self.wrong_type(element, "type 'long'")
        return raw_bson.read_int64(self.document, element.value_start)

    def not_negative(self, name: bytes) -> int | None:
        """A number of any type, made whole, or ``None`` where absent or null. 51024 below zero."""
        element = self.given(name)
        if element is None:
            return None
        if element.type not in _NUMBERS:
            raise self.wrong_type(element, "types '[long, int, decimal, double']")
        number = as_int64(self.decoded(element))
        if number < 0:
            raise UsageError(f"BSON field '{name.decode()}' value must be >= 0, actual value '{number}'", code=51024)
        return number

    def time_limit(self, name: bytes = b"maxTimeMS") -> int | None:
        """A getMore's maxTimeMS, milliseconds; ``None`` where absent."""
        element = self.get(name)
        if element is None:
            return None
        _refuse_null_limit(element)
        if element.type not in _NUMBERS:
            raise self.wrong_type(element, "types '[long, int, decimal, double']")
        given = self.decoded(element)
        number = as_int64(given)
        if not 0 <= number <= _INT32_MAX:
            allowed = f" [0, {_INT32_MAX}]" if knows(self.version, "7.0") else ""
            raise UsageError(f"{number} value for maxTimeMS is out of range{allowed}", code=2)
        if isinstance(given, float) and number != given:  # a decimal is rounded instead
            raise UsageError("maxTimeMS has non-integral value", code=2)
        return number

    def check_time_limit(self) -> None:
        """An aggregate's maxTimeMS bounds nothing here, and is checked more closely than a getMore's."""
        element = self.get(b"maxTimeMS")
        if element is not None:
            _refuse_null_limit(element)
            self.not_negative(b"maxTimeMS")
            self.time_limit()

    def wrong_type(self, element: Element, expected: str) -> UsageError:
        type_name = raw_bson.type_name(element.type)
        text = element.name.decode("utf-8", "replace")
        return UsageError(
            f"BSON field '{self.name}.{text}' is the wrong type '{type_name}', expected {expected}", code=14
        )


def decoded(document: bytes, element: Element) -> Any:
    """An element's value in Python's terms."""
    cut = raw_bson.encode_document(document[element.start : element.end])
    return next(iter(bson.decode(cut, _ANY_DATE).values()))


def _refuse_null_limit(element: Element) -> None:
    if element.type == NULL:
        raise UsageError("maxTimeMS must be a number", code=2)


def as_int64(number: Any) -> int:
    """A double cut towards zero, a decimal rounded (halves to the even number), to 64 bits; NaN is 0."""
    if isinstance(number, Decimal128):
        number = number.to_decimal()
        if number.is_nan():
            return 0
        if not number.is_finite():
            return _INT64_MAX if number > 0 else -_INT64_MAX - 1
        number = number.to_integral_value(ROUND_HALF_EVEN)
    elif isinstance(number, float):
        if math.isnan(number):
            return 0
        if math.isinf(number):
            return _INT64_MAX if number > 0 else -_INT64_MAX - 1
    return max(-_INT64_MAX - 1, min(int(number), _INT64_MAX))
