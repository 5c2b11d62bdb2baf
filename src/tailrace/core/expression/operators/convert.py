"""Type conversion: ``$convert`` and its short forms."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from decimal import ROUND_DOWN, Decimal, InvalidOperation
from typing import Final

from tailrace.core.expression.language.core import operator_of, parse_arguments, parse_operand, unary
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import failure, parse_failure, register
from tailrace.core.expression.language.version import Version
from tailrace.core.expression.operators.calendar import iso_string
from tailrace.core.expression.operators.date_text import parse_date_text
from tailrace.core.expression.operators.text import number_text
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import TailraceError

_TYPE: Final = "type"
_FAILED: Final = 241

unary("$type", _TYPE, "3.4", lambda value: v.string(v.type_name(value)))
unary("$isNumber", _TYPE, "4.4", lambda value: v.boolean(value is not None and value[0] in v.NUMERIC))


def _failed(message: str) -> TailraceError:
    return failure(_FAILED, f"{message} in $convert with no onError value")


def convert(value: Value, to: int, version: Version) -> Value:
    """``value`` as the type ``to``, as a server of ``version`` makes it. Raises ``ServerError`` 241 where the server
    does."""
    if to == v.DATE and value[0] == v.STRING:
        return v.date(parse_date_text(v.text_of(value), version, code=_FAILED))
    conversion = _CONVERSIONS.get(to, {}).get(value[0])
    if conversion is None:
        target = v.TYPE_NAMES.get(to, "missing")
        raise _failed(f"Unsupported conversion from {v.type_name(value)} to {target}")
    return conversion(value)


def _same(value: Value) -> Value:
    return value


def _truncated(value: Value, low: int, high: int) -> int:
    number = v.number_of(value)
    if isinstance(number, int):
        whole = number
    else:
        if v.is_nan(number):
            raise _failed("Attempt to convert NaN value to integer type")
        if abs(number) == math.inf:
            raise _failed("Attempt to convert infinity value to integer type")
        if isinstance(number, float) and not low <= number <= high:
            raise _failed("Conversion would overflow target type")
        whole = int(number)
    if not low <= whole <= high:
        raise _failed("Conversion would overflow target type")
    return whole


def _to_int(value: Value) -> Value:
    return v.int32(_truncated(value, v.INT32_MIN, v.INT32_MAX))


def _to_long(value: Value) -> Value:
    return v.int64(_truncated(value, v.INT64_MIN, v.INT64_MAX))


#: Digits of a text beyond the 34th are left out, not rounded.
_CUT: Final = v.DECIMAL_CONTEXT.copy()
_CUT.rounding = ROUND_DOWN
#: Below it a decimal has fewer digits; the server takes no text that loses some there.
_LEAST_NORMAL: Final = Decimal("1E-6143")
_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")
_REAL: Final = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)")
_SPECIAL: Final = re.compile(rb"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)


def _not_a_number(text: bytes) -> TailraceError:
    return _failed(f"Failed to parse number '{text.decode('utf-8', 'replace')}'")


def _integer_text(value: Value, low: int, high: int) -> int:
    text = v.bytes_of(value)
    if not _INTEGER.fullmatch(text):
        raise _not_a_number(text)
    digits = text.lstrip(b"+-").lstrip(b"0")
    if len(digits) > 19:  # of which no long has more; and Python reads no more than 4300
        raise _not_a_number(text)
    number = -int(digits or b"0") if text.startswith(b"-") else int(digits or b"0")
    if not low <= number <= high:
        raise _not_a_number(text)
    return number


def _text_to_double(value: Value) -> Value:
    text = v.bytes_of(value)
    if _SPECIAL.fullmatch(text):
        return v.double(float(text))
    if not _REAL.fullmatch(text):
        raise _not_a_number(text)
    number = float(text)
    if math.isinf(number) or (abs(number) < sys.float_info.min and not _exactly(text, number)):
        raise _not_a_number(text)
    return v.double(number)


def _exactly(text: bytes, number: float) -> bool:
    """Whether a text says exactly the number: below the normal doubles the server takes no other."""
    if not re.search(rb"[1-9]", re.split(rb"[eE]", text)[0]):
        return True
    try:
        return Decimal(text.decode()) == Decimal(number)
    except InvalidOperation:
        return False


def _text_to_decimal(value: Value) -> Value:
    text = v.bytes_of(value)
    if _SPECIAL.fullmatch(text):
        return v.decimal(Decimal(text.decode()))
    if not _REAL.fullmatch(text):
        raise _not_a_number(text)
    try:
        number = Decimal(text.decode())
    except InvalidOperation:  # an exponent of more digits than there are
        raise _not_a_number(text) from None
    rounded = _CUT.create_decimal(number)
    if (number and number.adjusted() > _CUT.Emax) or (rounded != number and abs(rounded) < _LEAST_NORMAL):
        raise _not_a_number(text)
    return v.decimal(rounded)


def _text_to_id(value: Value) -> Value:
    text = v.bytes_of(value)
    if not re.fullmatch(rb"[0-9a-fA-F]{24}", text):
        raise _failed(f"Failed to parse objectId '{text.decode('utf-8', 'replace')}'")
    return (v.OBJECT_ID, bytes.fromhex(text.decode()))


def _number_to_date(value: Value) -> Value:
    return v.date(_truncated(value, v.INT64_MIN, v.INT64_MAX))


def id_milliseconds(value: Value) -> int:
    """The time in an object id: seconds, with a sign."""
    return int.from_bytes(value[1][:4], "big", signed=True) * 1000


def _bool_number(value: Value) -> int:
    return int(value[1] != b"\x00")


def _decimal_to_double(value: Value) -> Value:
    number = float(v.decimal_of(value))
    exact = v.decimal_of(value)
    if (math.isinf(number) and exact.is_finite()) or (exact != 0 and abs(number) < sys.float_info.min):
        raise _failed("Conversion would overflow target type")
    return v.double(number)


Conversion = Callable[[Value], Value]

_CONVERSIONS: Final[dict[int, dict[int, Conversion]]] = {
    v.INT32: {
        v.INT32: _same,
        v.INT64: _to_int,
        v.DOUBLE: _to_int,
        v.DECIMAL: _to_int,
        v.BOOL: lambda value: v.int32(_bool_number(value)),
        v.STRING: lambda value: v.int32(_integer_text(value, v.INT32_MIN, v.INT32_MAX)),
    },
    v.INT64: {
        v.INT32: _to_long,
        v.INT64: _same,
        v.DOUBLE: _to_long,
        v.DECIMAL: _to_long,
        v.BOOL: lambda value: v.int64(_bool_number(value)),
        v.DATE: lambda value: v.int64(v.integer_of(value)),
        v.STRING: lambda value: v.int64(_integer_text(value, v.INT64_MIN, v.INT64_MAX)),
    },
    v.DOUBLE: {
        v.INT32: lambda value: v.double(float(v.integer_of(value))),
        v.INT64: lambda value: v.double(float(v.integer_of(value))),
        v.DOUBLE: _same,
        v.DECIMAL: _decimal_to_double,
        v.BOOL: lambda value: v.double(float(_bool_number(value))),
        v.DATE: lambda value: v.double(float(v.integer_of(value))),
        v.STRING: _text_to_double,
    },
    v.DECIMAL: {
        v.INT32: lambda value: v.decimal(v.decimal_of(value)),
        v.INT64: lambda value: v.decimal(v.decimal_of(value)),
        v.DOUBLE: lambda value: v.decimal(v.decimal_of(value)),
        v.DECIMAL: _same,
        v.BOOL: lambda value: v.decimal(Decimal(_bool_number(value))),
        v.DATE: lambda value: v.decimal(Decimal(v.integer_of(value))),
        v.STRING: _text_to_decimal,
    },
    v.STRING: {
        v.INT32: lambda value: v.string(number_text(value)),
        v.INT64: lambda value: v.string(number_text(value)),
        v.DOUBLE: lambda value: v.string(number_text(value)),
        v.DECIMAL: lambda value: v.string(number_text(value)),
        v.BOOL: lambda value: v.string("true" if _bool_number(value) else "false"),
        v.DATE: lambda value: v.string(iso_string(v.integer_of(value))),
        v.OBJECT_ID: lambda value: v.string(value[1].hex()),
        v.STRING: _same,
    },
    v.DATE: {
        v.INT64: _number_to_date,
        v.DOUBLE: _number_to_date,
        v.DECIMAL: _number_to_date,
        v.DATE: _same,
        v.OBJECT_ID: lambda value: v.date(id_milliseconds(value)),
        v.TIMESTAMP: lambda value: v.date((v.unsigned_of(value) >> 32) * 1000),
    },
    v.OBJECT_ID: {v.OBJECT_ID: _same, v.STRING: _text_to_id},
    v.BOOL: {kind: (lambda value: v.boolean(v.truthy(value))) for kind in v.TYPE_NAMES if kind not in v.NULLISH},
}


def _short(name: str, to: int) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        args = parse_arguments(operand, bindings)
        if len(args) != 1:
            raise parse_failure(50723, f"{name} requires a single argument, got {len(args)}")
        read = args[0].evaluate

        def evaluate(frame: Frame) -> Maybe:
            value = read(frame)
            return v.NULL if value is None or value[0] in v.NULLISH else convert(value, to, bindings.version)

        return operator_of("$convert", args, evaluate, bindings)

    register(name, _TYPE, "4.0", parse)


for _name, _to in (
    ("$toBool", v.BOOL),
    ("$toDate", v.DATE),
    ("$toDecimal", v.DECIMAL),
    ("$toDouble", v.DOUBLE),
    ("$toInt", v.INT32),
    ("$toLong", v.INT64),
    ("$toObjectId", v.OBJECT_ID),
    ("$toString", v.STRING),
):
    _short(_name, _to)


def _convert(operand: Value, bindings: Bindings) -> Expression:
    if operand[0] != v.OBJECT:
        raise parse_failure(9, f"$convert expects an object of named arguments but found: {v.type_name(operand)}")
    given: dict[str, Expression] = {}
    for name, kind, data in v.fields_of(operand[1]):
        shown = name.decode("utf-8", "replace")
        if shown not in ("input", "to", "onError", "onNull"):
            raise parse_failure(9, f"$convert found an unknown argument: {shown}")
        given[shown] = parse_operand((kind, data), bindings)
    for shown in ("input", "to"):
        if shown not in given:
            raise parse_failure(9, f"Missing '{shown}' parameter to $convert")
    return operator_of("$convert", list(given.values()), _converting(given, bindings.version), bindings)


def _converting(given: dict[str, Expression], version: Version) -> Callable[[Frame], Maybe]:
    read, target = given["input"].evaluate, given["to"].evaluate
    on_error, on_null = given.get("onError"), given.get("onNull")

    def evaluate(frame: Frame) -> Maybe:
        to = target(frame)
        value = read(frame)
        wanted = None if to is None or to[0] in v.NULLISH else target_type(to)
        if value is None or value[0] in v.NULLISH:
            return v.NULL if on_null is None else on_null.evaluate(frame)
        if wanted is None:
            return v.NULL
        try:
            return convert(value, wanted, version)
        except TailraceError as error:
            if on_error is None or error.code != _FAILED:
                raise
            return on_error.evaluate(frame)

    return evaluate


def target_type(to: Value) -> int:
    """The type that the "to" of ``$convert`` names."""
    if to[0] == v.STRING:
        name = v.text_of(to)
        for kind, known in v.TYPE_NAMES.items():
            if known == name:
                return kind
        if name == "missing":
            return 0
        raise failure(2, f"Unknown type name: {name}")
    if to[0] not in v.NUMERIC:
        raise failure(9, f"$convert's 'to' argument must be a string or number, but is {v.type_name(to)}")
    number = v.number_of(to)
    if v.is_nan(number) or abs(number) == math.inf or number != int(number):
        raise failure(9, "In $convert, numeric 'to' argument is not an integer")
    code = 255 if number == -1 else int(number)
    if code != 0 and (code not in v.TYPE_NAMES or number == 255):
        raise failure(9, f"In $convert, numeric value for 'to' does not correspond to a BSON type: {number}")
    return code


register("$convert", _TYPE, "4.0", _convert)
