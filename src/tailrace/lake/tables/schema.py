"""The typed columns of a table: declared or inferred, and what happens to a value that does not fit.

They exist only for queries: ``_bson`` holds every document byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final, Literal, cast

import bson
import pyarrow as pa
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId

from tailrace.errors import SinkError, UsageError
from tailrace.lake.tables.names import OURS

Policy = Literal["evolve", "widen", "quarantine", "fail"]
POLICIES: Final[tuple[Policy, ...]] = ("evolve", "widen", "quarantine", "fail")

#: A table with more columns than this is of no use to its readers; further fields are in ``_json`` and ``_bson`` only.
COLUMNS_MAX: Final = 500
#: The names of so many of these fields are kept, for whoever asks what has no column.
CUT_MAX: Final = 500

CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, unicode_decode_error_handler="replace"
)
_RELAXED: Final = json_util.RELAXED_JSON_OPTIONS
_ODD: Final = re.compile(r"[\s,;{}()=.`\x00-\x1f\"]")
_DECIMAL: Final = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_INT32, _INT64, _EXACT = 2**31, 2**63, 2**53
DAY_MS: Final = 86_400_000
#: The years 1 to 9999: the dates that every reader of Delta knows. One date of another year makes a whole column
#: unreadable for programs that make Python's dates of it.
FIRST_DAY, LAST_DAY = -719_162, 2_932_896
#: Times of day begin two days later: PySpark makes them local with Python's ``fromtimestamp``, which looks a day back.
FIRST_MS, LAST_MS = (FIRST_DAY + 2) * DAY_MS, (LAST_DAY + 1) * DAY_MS - 1


class DocumentMisfitError(SinkError):
    """A document does not fit its table, and the policy is ``fail``."""


class MisfitError(ValueError):
    """A value that its column cannot hold."""


class FarDateError(MisfitError):
    """A date that the readers of a column fail on."""


@dataclass(frozen=True, slots=True)
class Column:
    """A typed column. ``path``: the field's name, or those of the objects on the way to it. ``was``: the type that it
    had before it became wider."""

    name: str
    path: tuple[str, ...]
    type: str
    was: str = ""

    @property
    def arrow(self) -> pa.DataType:
        """The type of its Arrow column."""
        return arrow_type(self.type)


@dataclass(frozen=True)
class TableSchema:
    """The columns of one table, and how they change with the documents (``docs/how-to/tables.md``). ``cut``: fields
    that have no column, because the table has as many as it may have."""

    columns: tuple[Column, ...] = ()
    inferred: bool = True
    policy: Policy = "evolve"
    cut: tuple[str, ...] = ()

    @classmethod
    def declared(cls, columns: Mapping[str, str], policy: Policy = "quarantine") -> TableSchema:
        """Columns as the user names them: ``{"total": "decimal(18,2)", "customer.name": "string"}``. A name in
        backquotes is one field whose name holds dots."""
        found: list[Column] = []
        for given, type_ in columns.items():
            arrow_type(type_)
            path = (given[1:-1],) if len(given) > 2 and given[0] == given[-1] == "`" else tuple(given.split("."))
            found.append(Column(free_name("_".join(path), [one.name for one in found]), path, type_.replace(" ", "")))
        return cls(tuple(found), inferred=False, policy=policy)

    @property
    def declaration(self) -> str:
        """The columns as a text that tells declarations apart; empty where they are inferred."""
        return "" if self.inferred else json.dumps([[column.path, column.type] for column in self.columns])

    @property
    def widens(self) -> bool:
        """Whether columns become wider. A date that no column can hold is NULL then: it costs nobody a column."""
        return self.policy in ("evolve", "widen")

    def with_columns(self, columns: Iterable[Column], cut: Iterable[str] = ()) -> TableSchema:
        """The same rules with other columns."""
        return TableSchema(tuple(columns), self.inferred, self.policy, tuple(cut))


@dataclass
class Converted:
    """Documents as columns, with all rows, and those that do not fit (row number -> reason)."""

    schema: TableSchema
    arrays: list[pa.Array]
    misfits: dict[int, str] = field(default_factory=dict)
    #: A column has another type than before, so rows that were written before have to be rewritten.
    retyped: bool = False


class Decoded:
    """Documents as Python objects, each decoded when it is first asked for; ``None`` where the codec cannot."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._documents = documents
        self._rows: dict[int, dict[str, Any] | None] = {}
        self._errors: dict[int, str] = {}

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        if number not in self._rows:
            self._rows[number] = self._decode(number)
        return self._rows[number]

    def why(self, number: int) -> str | None:
        """Why a document cannot be decoded; ``None`` if it can."""
        _ = self[number]
        return self._errors.get(number)

    def _decode(self, number: int) -> dict[str, Any] | None:
        try:
            return bson.decode(self._documents[number], CODEC)
        except Exception as error:  # noqa: BLE001  whatever the codec says of bytes that the server has taken
            self._errors[number] = f"the document cannot be decoded: {error}"
            return None


def arrow_type(type_: str) -> pa.DataType:
    """The Arrow type of a declared type. Raises UsageError for an unknown type."""
    found = _ARROW.get(type_)
    if found is not None:
        return found
    match = _DECIMAL.fullmatch(type_)
    if match is None or not 1 <= int(match[1]) <= 38 or int(match[2]) > int(match[1]):
        raise UsageError(f"'{type_}' is not a column type", hint=f"Types: {', '.join(_ARROW)}, decimal(p,s)")
    return pa.decimal128(int(match[1]), int(match[2]))


def free_name(wanted: str, taken: Sequence[str]) -> str:
    """A column's name for a field: characters that Delta's readers refuse become ``_``; if another column has the name,
    or one that differs only in case, a number is added."""
    name = _ODD.sub("_", wanted) or "_"
    used = {one.lower() for one in (*OURS, *taken)}
    number, found = 2, name
    while found.lower() in used:
        found, number = f"{name}_{number}", number + 1
    return found


def convert(schema: TableSchema, documents: Sequence[bytes]) -> Converted:
    """The documents' typed columns, by the schema's policy. Raises SinkError with the policy ``fail``."""
    decoded = Decoded(documents)
    rows = [decoded[number] for number in range(len(documents))]
    misfits: dict[int, str] = {}
    if schema.columns or schema.inferred:
        misfits = {number: why for number in range(len(rows)) if (why := decoded.why(number)) is not None}
    columns, cut, retyped = list(schema.columns), list(schema.cut), False
    if schema.inferred and (schema.policy == "evolve" or not columns):
        infer(columns, cut, rows)
    arrays: list[pa.Array] = []
    for place, column in enumerate(columns):
        found, bad = fill(column, rows, far_is_null=schema.widens)
        if bad and schema.widens:
            columns[place] = _widened(column, rows)
            retyped = True
            found, bad = fill(columns[place], rows, far_is_null=True)
        for number, why in bad.items():
            misfits.setdefault(number, why)
        arrays.append(typed_array(found, columns[place].arrow))
    if misfits and schema.policy == "fail":
        number, why = next(iter(sorted(misfits.items())))
        identifier = (rows[number] or {}).get("_id")
        raise DocumentMisfitError(
            f"a document does not fit its table's columns: {why} (_id {str(identifier)[:80]})",
            hint="Change the document, the declared columns, or the policy onMismatch: widen, evolve or quarantine",
        )
    if schema.widens:
        misfits = {}
    return Converted(schema.with_columns(columns, cut), arrays, misfits, retyped)


def infer(columns: list[Column], cut: list[str], rows: Sequence[dict[str, Any] | None]) -> None:
    """Add a column for each top-level field of the documents that has none. ``cut`` gets the names of those for which
    the table has no room."""
    known = {column.path for column in columns} | {(name,) for name in cut}
    names = [column.name for column in columns]
    for row in rows:
        if row is None:
            continue
        for name, value in row.items():
            if value is None or (name,) in known:
                continue
            known.add((name,))
            if len(columns) >= COLUMNS_MAX:
                if len(cut) < CUT_MAX:
                    cut.append(name)
                continue
            columns.append(Column(free_name(name, names), (name,), type_of(value)))
            names.append(columns[-1].name)


def type_of(value: Any) -> str:
    """The column type for a value. A value without a counterpart outside BSON is text in Extended JSON."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "long"
    if isinstance(value, bytes):
        return "binary"
    return _INFERRED.get(type(value), "json")


def _widened(column: Column, rows: Sequence[dict[str, Any] | None]) -> Column:
    """The column with the narrowest type that holds its previous values and these."""
    candidates = {"int": ("long", "double"), "long": ("double",), "date": ("timestamp",)}.get(column.type, ())
    for type_ in (*candidates, "json"):
        wider = replace(column, type=type_, was=column.was or column.type)
        if not fill(wider, rows, far_is_null=True)[1]:
            break
    return wider


def fill(
    column: Column, rows: Sequence[dict[str, Any] | None], *, far_is_null: bool = False
) -> tuple[list[Any], dict[int, str]]:
    """The values of a column, and the rows with a value that does not fit (row number -> reason). ``far_is_null``: a
    date that its readers would fail on fits, as NULL."""
    make = _maker(column.type)
    bad: dict[int, str] = {}
    found: list[Any] = []
    name = column.path[0] if len(column.path) == 1 else None
    for number, row in enumerate(rows):
        value = None if row is None else row.get(name) if name is not None else value_at(row, column.path)
        if value is not None:
            try:
                value = make(value)
            except (MisfitError, ArithmeticError, ValueError, OverflowError) as error:
                if far_is_null and isinstance(error, FarDateError):
                    found.append(None)
                    continue
                bad[number] = f"'{'.'.join(column.path)}' is {_shown(value)}, and its column is {column.type}"
                value = None
        found.append(value)
    return found, bad


def typed_array(values: list[Any], type_: pa.DataType) -> pa.Array:
    """The values that ``fill`` has found, as an Arrow array."""
    if pa.types.is_timestamp(type_):
        return pa.array(values, pa.int64()).cast(type_)
    if pa.types.is_date32(type_):
        return pa.array(values, pa.int32()).cast(type_)
    return pa.array(values, type_)


def value_at(row: Any, path: tuple[str, ...]) -> Any:
    """The value of a document's field at a path; ``None`` if there is none."""
    for name in path:
        if not isinstance(row, dict):
            return None
        row = row.get(name)
    return row


def _shown(value: Any) -> str:
    if isinstance(value, DatetimeMS):
        return f"date {int(value)} ms"
    kind = {"dict": "object", "list": "array", "str": "string", "float": "double", "Int64": "long"}
    return f"{kind.get(type(value).__name__, type(value).__name__)} {str(value)[:60]}"


# --- values ----------------------------------------------------------------------------------------------------------


def _maker(type_: str) -> Callable[[Any], Any]:
    found = _MAKERS.get(type_)
    if found is not None:
        return found
    match = _DECIMAL.fullmatch(type_)
    assert match is not None
    return lambda value: _decimal(value, int(match[1]), int(match[2]))


def _string(value: Any) -> str:
    if isinstance(value, (str, Decimal128, ObjectId)):
        return str(value).encode("utf-8", "replace").decode()
    raise MisfitError


def _bounded_integer(value: Any, bound: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and -bound <= value < bound:
        return int(value)
    raise MisfitError


def _double(value: Any) -> float:
    if isinstance(value, float):
        return value
    return float(_bounded_integer(value, _EXACT))


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise MisfitError


def is_far(value: Any, type_: str) -> bool:
    """Whether a value is a date that a column of that type, ``date`` or ``timestamp``, does not show."""
    first = FIRST_MS if type_ == "timestamp" else FIRST_DAY * DAY_MS
    return isinstance(value, DatetimeMS) and not first <= int(value) <= LAST_MS


def _milliseconds(value: Any, type_: str) -> int:
    if not isinstance(value, DatetimeMS):
        raise MisfitError
    if is_far(value, type_):
        raise FarDateError
    return int(value)


def _timestamp(value: Any) -> int:
    """Microseconds."""
    return _milliseconds(value, "timestamp") * 1000


def _date(value: Any) -> int:
    """Days."""
    return _milliseconds(value, "date") // DAY_MS


def _binary(value: Any) -> bytes:
    if isinstance(value, bytes):
        return bytes(value)
    raise MisfitError


def _object_id(value: Any) -> str:
    if isinstance(value, ObjectId):
        return str(value)
    raise MisfitError


def _decimal(value: Any, precision: int, scale: int) -> Decimal:
    number = value.to_decimal() if isinstance(value, Decimal128) else Decimal(_bounded_integer(value, _INT64))
    if not number.is_finite():
        raise MisfitError
    sign, digits, exponent = number.as_tuple()
    # Not normalize(): it rounds to the 28 digits of Python's context.
    text = "".join(map(str, digits)).lstrip("0")
    kept = text.rstrip("0")
    places = -(cast("int", exponent) + len(text) - len(kept)) if kept else 0
    if places > scale or len(kept) - places > precision - scale:
        raise MisfitError
    return Decimal((sign, tuple(map(int, kept)), -places))


def _json(value: Any) -> str:
    text: str = json_util.dumps(value, json_options=_RELAXED)
    return text.encode("utf-8", "replace").decode()


_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "string": _string,
    "int": lambda value: _bounded_integer(value, _INT32),
    "long": lambda value: _bounded_integer(value, _INT64),
    "double": _double,
    "boolean": _boolean,
    "timestamp": _timestamp,
    "date": _date,
    "binary": _binary,
    "objectid": _object_id,
    "json": _json,
}
_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
    "binary": pa.binary(),
    "objectid": pa.string(),
    "json": pa.string(),
}
_INFERRED: Final[dict[type, str]] = {
    float: "double",
    str: "string",
    DatetimeMS: "timestamp",
    ObjectId: "objectid",
    Decimal128: "string",
}
