"""The typed columns of a table: declared or inferred, and what happens to a value that does not fit.

They exist only for queries: ``_bson`` holds every document byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import bson
import pyarrow as pa
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS

from tailrace.errors import SinkError, UsageError
from tailrace.lake.tables import nested
from tailrace.lake.tables.column_values import FarDateError, MisfitError, scalar_maker, type_of
from tailrace.lake.tables.names import free_name
from tailrace.lake.tables.nested import InnerMisfitError

Policy = Literal["evolve", "widen", "quarantine", "fail"]
POLICIES: Final[tuple[Policy, ...]] = ("evolve", "widen", "quarantine", "fail")

#: A table with more columns than this is of no use to its readers; further fields are in ``_json`` and ``_bson`` only.
COLUMNS_MAX: Final = 500
#: How many names of these fields are kept, to answer what has no column.
CUT_MAX: Final = 500

CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_MS, unicode_decode_error_handler="replace"
)


class DocumentMisfitError(SinkError):
    """A document does not fit its table, and the policy is ``fail``."""


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

    @property
    def leaves(self) -> int:
        """How many scalars its type holds; 0 where it is one itself."""
        return nested.leaves_of(nested.parsed(self.type)) if nested.is_nested(self.type) else 0


@dataclass(frozen=True)
class TableSchema:
    """The columns of one table, and how they change with the documents (``docs/how-to/tables.md``). ``cut``: fields
    that have no column, because the table has as many as it may have. ``nested``: columns that are inferred from
    objects and arrays hold these, not text."""

    columns: tuple[Column, ...] = ()
    inferred: bool = True
    policy: Policy = "evolve"
    cut: tuple[str, ...] = ()
    nested: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for columns that are not ``Column``s: a mapping is what ``declared`` takes."""
        if isinstance(self.columns, Mapping) or not all(isinstance(one, Column) for one in self.columns):
            raise UsageError(
                "columns must be a sequence of Column: TableSchema does not take names and types",
                hint="Declare them: TableSchema.declared({'total': 'decimal(18,2)'})",
            )

    @classmethod
    def declared(cls, columns: Mapping[str, str], policy: Policy = "quarantine") -> TableSchema:
        """Columns as the user names them: ``{"total": "decimal(18,2)", "customer.name": "string"}``. A name in
        backquotes is one field whose name holds dots."""
        found: list[Column] = []
        for given, type_ in columns.items():
            kept = nested.declared_type(type_)
            path = (given[1:-1],) if len(given) > 2 and given[0] == given[-1] == "`" else tuple(given.split("."))
            found.append(Column(free_name("_".join(path), [one.name for one in found]), path, kept))
        return cls(tuple(found), inferred=False, policy=policy)

    @property
    def declaration(self) -> str:
        """The columns as a text that tells declarations apart; empty where they are inferred, without nested ones."""
        if self.inferred:
            return "nested" if self.nested else ""
        return json.dumps([[column.path, column.type] for column in self.columns])

    @property
    def widens(self) -> bool:
        """Whether columns become wider. A date that no column can hold is then NULL, and widens no column."""
        return self.policy in ("evolve", "widen")

    @property
    def grows(self) -> bool:
        """Whether the objects in columns get the fields that documents bring."""
        return self.nested and self.inferred and self.policy == "evolve"

    def with_columns(self, columns: Iterable[Column], cut: Iterable[str] = ()) -> TableSchema:
        """The same rules with other columns."""
        return replace(self, columns=tuple(columns), cut=tuple(cut))


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


def convert(schema: TableSchema, documents: Sequence[bytes]) -> Converted:
    """The documents' typed columns, by the schema's policy. Raises SinkError with the policy ``fail``, and
    TooManyValuesError for documents that are too many to be made together."""
    decoded = Decoded(documents)
    rows = [decoded[number] for number in range(len(documents))]
    misfits: dict[int, str] = {}
    if schema.columns or schema.inferred:
        misfits = {number: why for number in range(len(rows)) if (why := decoded.why(number)) is not None}
    columns, cut, retyped = list(schema.columns), list(schema.cut), False
    if schema.inferred and (schema.policy == "evolve" or not columns):
        infer(columns, cut, rows, schema)
    arrays: list[pa.Array] = []
    for place, column in enumerate(columns):
        found, bad = fill(column, rows, far_is_null=schema.widens, grows=schema.grows)
        if bad and schema.widens:
            room = nested.LEAVES_MAX - sum(one.leaves for one in columns) + column.leaves
            columns[place] = _widened(column, rows, room, grows=schema.grows)
            retyped = retyped or (place < len(schema.columns) and not _extends(columns[place], column))
            found, bad = fill(columns[place], rows, far_is_null=True, grows=schema.grows)
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


def arrow_type(type_: str) -> pa.DataType:
    """The Arrow type of a column's type."""
    return nested.nested_arrow(nested.parsed(type_))


def infer(columns: list[Column], cut: list[str], rows: Sequence[dict[str, Any] | None], schema: TableSchema) -> None:
    """Add a column for each top-level field of the documents that has none, by the rules of ``schema``. ``cut`` gets
    the names of those for which the table has no room."""
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
            columns.append(Column(free_name(name, names), (name,), _inferred(value, schema, columns)))
            names.append(columns[-1].name)


def _inferred(value: Any, schema: TableSchema, columns: Sequence[Column]) -> str:
    """The type of a new column next to others."""
    if not schema.nested:
        return type_of(value)
    found = nested.inferred_type(value)
    new = nested.text_of(found if schema.widens else nested.settled(found))
    room = nested.LEAVES_MAX - sum(one.leaves for one in columns)
    return "json" if nested.is_nested(new) and nested.is_too_large(found, room) else new


def _widened(column: Column, rows: Sequence[dict[str, Any] | None], room: int, *, grows: bool) -> Column:
    """The column with the narrowest type that holds its previous values and these. ``room``: how many leaves it may
    have."""
    if nested.is_nested(column.type):
        return _widened_nested(column, [value_at(row, column.path) for row in rows], room, grows=grows)
    for type_ in (*nested.WIDER.get(column.type, ()), "json"):
        wider = replace(column, type=type_, was=column.was or column.type)
        if not fill(wider, rows, far_is_null=True)[1]:
            break
    return wider


def _widened_nested(column: Column, values: Sequence[Any], room: int, *, grows: bool) -> Column:
    before = type_ = nested.parsed(column.type)
    while True:
        last = type_
        for value in values:
            type_ = nested.wider(type_, value, grows=grows)
        count = nested.values_counter(nested.text_of(type_))
        if any(value is not None and count(value) > nested.VALUES_MAX for value in values):
            type_ = nested.JSON_LEAF
            break
        # What became wider for one value may not hold an earlier one: a long number after a double.
        make = nested.nested_maker(nested.text_of(type_), far_is_null=True, grows=grows)
        if type_ == last or not any(value is not None and _misfits(make, value) for value in values):
            break
    if nested.is_too_large(type_, room):
        type_ = nested.JSON_LEAF
    was = column.was if nested.extends(type_, before) else column.was or column.type
    return replace(column, type=nested.text_of(type_), was=was)


def _misfits(make: Callable[[Any], Any], value: Any) -> bool:
    try:
        make(value)
    except InnerMisfitError:
        return True
    return False


def _extends(new: Column, old: Column) -> bool:
    """Whether rows that were written with the old column can be read with the new one."""
    return nested.extends(nested.parsed(new.type), nested.parsed(old.type))


def fill(
    column: Column, rows: Sequence[dict[str, Any] | None], *, far_is_null: bool = False, grows: bool = False
) -> tuple[list[Any], dict[int, str]]:
    """The values of a column, and the rows with a value that does not fit (row number -> reason). ``far_is_null``: a
    date that its readers would fail on fits, as NULL. ``grows``: see ``nested_maker``."""
    if len(column.path) == 1:
        name = column.path[0]
        values = [None if row is None else row.get(name) for row in rows]
    else:
        values = [value_at(row, column.path) for row in rows]
    return fill_values(column, values, far_is_null=far_is_null, grows=grows)


def fill_values(
    column: Column, values: Sequence[Any], *, far_is_null: bool = False, grows: bool = False
) -> tuple[list[Any], dict[int, str]]:
    """The same of the values at the column's path. Raises TooManyValuesError for more than one of them."""
    bad: dict[int, str] = {}
    if nested.is_nested(column.type):
        make = nested.nested_maker(column.type, far_is_null=far_is_null, grows=grows)
        bad = _too_large(column, values)
    else:
        make = scalar_maker(column.type)
    found: list[Any] = []
    for number, value in enumerate(values):
        made = None
        if value is not None and number not in bad:
            try:
                made = make(value)
            except InnerMisfitError as error:
                where = ".".join(column.path) + "".join(reversed(error.steps))
                bad[number] = f"'{where}' is {_shown(error.value)}, and its column is {error.type}"
            except (MisfitError, ArithmeticError, ValueError, OverflowError) as error:
                if not (far_is_null and isinstance(error, FarDateError)):
                    bad[number] = f"'{'.'.join(column.path)}' is {_shown(value)}, and its column is {column.type}"
        found.append(made)
    return found, bad


def _too_large(column: Column, values: Sequence[Any]) -> dict[int, str]:
    """The rows whose values take too much room in a column that holds others. Raises TooManyValuesError if all
    others together do."""
    found: dict[int, str] = {}
    count, total = nested.values_counter(column.type), 0
    for number, value in enumerate(values):
        size = 0 if value is None else count(value)
        if size > nested.VALUES_MAX:
            most = f"at most {nested.VALUES_MAX:,} of a document fit"
            found[number] = f"'{'.'.join(column.path)}' has {size:,} values, counting those that are NULL; {most}"
        else:
            total += size
    if total > nested.VALUES_MAX:
        raise nested.TooManyValuesError
    return found


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
