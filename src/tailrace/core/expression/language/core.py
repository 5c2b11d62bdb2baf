"""Aggregation expressions: from BSON to closures.

``parse_operand`` turns a value of the pipeline's BSON into an ``Expression``: a closure over a *frame*, the list of
variables (slot 0 holds the document, the others what ``$let``, ``$map`` and their like bind). Slots are given out while
parsing, so a look-up at run time is one list index. The parsed form stays readable on the object: ``kind``, ``name``,
``args`` and ``value``; the pushdown reads these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import call
from typing import Final

from tailrace.core.expression.language import registry
from tailrace.core.expression.language.expression import (
    NOT_LOOKED_UP,
    ROOT_SLOT,
    Bindings,
    Evaluate,
    Expression,
    Frame,
    constant,
)
from tailrace.core.expression.language.version import Version, knows
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import Order
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import TailraceError, UsageError


def fold(expression: Expression, bindings: Bindings) -> Expression:
    """Evaluate an operator of constants once. An error of it belongs to the opening of the stream, as on the server,
    but after all errors of parsing."""
    if not bindings.folding:
        return expression
    try:
        return constant(expression.evaluate([None] * bindings.compilation.slots))
    except TailraceError as error:
        bindings.fail_later(error.code, error.message)
        return expression


# ── parsing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_operand(value: Value, bindings: Bindings) -> Expression:
    """An expression from any value: a "$" string is a path, a document an operator or an object, else a constant."""
    kind, data = value
    if kind == v.STRING:
        if data[4:5] == b"$":
            return parse_path(data[4:-1], bindings)
        return constant(value)
    if kind == v.OBJECT:
        return parse_object(data, bindings)
    if kind == v.ARRAY:
        return _array([parse_operand(item, bindings) for item in v.elements_of(value)])
    return constant(value)


def _array(items: list[Expression]) -> Expression:
    if all(item.constant for item in items):
        return constant(v.array_of([item.value for item in items]))
    closures = [item.evaluate for item in items]
    return Expression(lambda frame: v.array_of(evaluate(frame) for evaluate in closures), "array", args=tuple(items))


def parse_object(data: bytes, bindings: Bindings) -> Expression:
    """A document as an expression: ``{$operator: ...}`` alone, or an object literal of expressions."""
    fields = v.fields_of(data)
    if fields and fields[0][0][:1] == b"$":
        if len(fields) != 1:
            raise registry.parse_failure(
                15983,
                "an object representing an expression must have exactly one field, "
                f"but this one has {len(fields)} and begins with '{_shown(fields[0][0])}'",
            )
        name, kind, operand = fields[0]
        return parse_operator(_shown(name), (kind, operand), bindings)
    return _object(fields, bindings)


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def parse_operator(name: str, operand: Value, bindings: Bindings) -> Expression:
    operator = registry.operator_of(name, bindings.version)
    bindings.enter(name)
    if operator is None:
        refusal = registry.refused_expression(name, bindings.version)
        if refusal is not None:
            if refusal.check is not None:
                refusal.check(operand, bindings)
            raise registry.unsupported(name, refusal.reason)
        raise registry.parse_failure(168, f"Unrecognized expression '{name}'")
    expression = operator.parse(operand, bindings)
    bindings.leave()
    return expression


def _object(fields: Sequence[tuple[bytes, int, bytes]], bindings: Bindings) -> Expression:
    names: list[bytes] = []
    items: list[Expression] = []
    for name, kind, data in fields:
        if name in names:
            raise registry.parse_failure(16406, f"duplicate field name specified in object literal: {_shown(name)}")
        check_field_name(name)
        bindings.enter(_shown(name))
        names.append(name)
        items.append(parse_operand((kind, data), bindings))
        bindings.leave()
    return object_literal(names, items, places=bindings.compilation.places)


def object_literal(names: list[bytes], items: list[Expression], *, places: bool) -> Expression:
    """An object of expressions; a field whose expression is missing is left out."""
    pairs = [(name, item.evaluate) for name, item in zip(names, items, strict=True)]

    def evaluate(frame: Frame) -> Maybe:
        if places:
            return v.object_with_places((name, item(frame)) for name, item in pairs)
        return v.object_of((name, value) for name, item in pairs if (value := item(frame)) is not None)

    if all(item.constant for item in items):
        return constant(evaluate([]))
    return Expression(evaluate, "object", args=tuple(items), names=tuple(names))


#: The fields of a DBRef: field names although they begin with a dollar.
DBREF_NAMES: Final = frozenset({b"$ref", b"$id", b"$db"})


def check_field_name(name: bytes) -> None:
    """The server's rules for one field name of a path."""
    if not name:
        raise registry.parse_failure(15998, "FieldPath field names may not be empty strings.")
    if name[:1] == b"$" and name not in DBREF_NAMES:
        raise registry.parse_failure(
            16410, "FieldPath field names may not start with '$'. Consider using $getField or $setField."
        )
    if b"\x00" in name:
        raise registry.parse_failure(16411, "FieldPath field names may not contain '\\0'.")
    if b"." in name:
        raise registry.parse_failure(
            16412, "FieldPath field names may not contain '.'. Consider using $getField or $setField."
        )


def split_path(path: bytes) -> tuple[bytes, ...]:
    """The field names of a dotted path, checked."""
    if not path:
        raise registry.parse_failure(40352, "FieldPath cannot be constructed with empty string")
    if path[-1:] == b".":
        raise registry.parse_failure(40353, "FieldPath must not end with a '.'.")
    names = tuple(path.split(b"."))
    check_length(len(names))
    for name in names:
        check_field_name(name)
    return names


def check_length(names: int) -> None:
    if names > MAX_PATH_LENGTH:
        raise registry.parse_failure(15, f"FieldPath is too long: {names} names, at most {MAX_PATH_LENGTH}")


MAX_PATH_LENGTH: Final = 200


def parse_path(text: bytes, bindings: Bindings) -> Expression:
    """A path such as ``$a.b`` or ``$$variable.a.b``."""
    if text == b"$":
        raise registry.parse_failure(16872, "'$' by itself is not a valid FieldPath")
    if text[1:2] != b"$":
        names = split_path(text[1:])
        check_length(len(names) + 1)  # CURRENT is one of them
        return field_path("CURRENT", names, bindings)
    variable = text[2:].partition(b".")[0]
    name = _shown(variable)
    check_variable_read(name, bindings)
    names = split_path(text[2:])[1:]
    return field_path(name, names, bindings)


def check_variable_read(name: str, bindings: Bindings) -> None:
    """The server's rules for the name of a variable that is read."""
    _check_variable(name, "a variable name", 16869, bindings)


def check_variable_write(name: str, bindings: Bindings) -> None:
    """User variables begin with a lower-case letter; of the others only CURRENT may be bound again."""
    if name != "CURRENT":
        _check_variable(name, "a user variable name", 16866, bindings)


def _check_variable(name: str, what: str, code: int, bindings: Bindings) -> None:
    """``code``: the first of 4.4's three codes; later servers have one."""
    empty, start, inner = (9, 9, 9) if bindings.knows("5.0") else (code, code + 1, code + 2)
    if not name:
        raise registry.parse_failure(empty, "empty variable names are not allowed")
    first = name[0]
    if first.isascii() and not (first.islower() if "user" in what else first.isalpha()):
        raise registry.parse_failure(start, f"'{name}' starts with an invalid character for {what}")
    for letter in name[1:]:
        if letter.isascii() and not letter.isalnum() and letter != "_":
            raise registry.parse_failure(
                inner, f"'{name}' contains an invalid character for a variable name: '{letter}'"
            )


def field_path(variable: str, names: tuple[bytes, ...], bindings: Bindings) -> Expression:
    """The closure that follows ``names`` from a variable."""
    slot = bindings.bound.get(variable)
    if slot is None:
        if variable not in bindings.constants:
            if knows(bindings.version, _BUILT_IN.get(variable, "99.0")):
                return _not_available(variable, bindings)
            raise registry.parse_failure(17276, f"Use of undefined variable: {variable}")
        base = bindings.constants[variable]
        return constant(follow(base, names, 0))
    shown = "ROOT" if slot == ROOT_SLOT else variable
    evaluate = _path_closure(slot, names) if slot != ROOT_SLOT or not names else _root_path(names, bindings)
    if bindings.compilation.after_places:
        return Expression(lambda frame: _without_gaps(evaluate(frame)), "field", name=shown, path=names)
    return Expression(evaluate, "field", name=shown, path=names)


#: Variables of other commands, which the server knows everywhere and has nowhere in a stream, and those of a session:
#: each with the version that brought it.
_BUILT_IN: Final = {"IS_MR": "5.0", "JS_SCOPE": "5.0", "SEARCH_META": "5.0", "USER_ROLES": "7.0"}


def _not_available(variable: str, bindings: Bindings) -> Expression:
    """Two of them fail when they are read, the third as soon as everything is parsed. The roles are the server's."""
    if variable == "USER_ROLES":
        raise registry.unsupported("$$USER_ROLES", "only the server knows the roles of the user")
    if variable == "SEARCH_META" and not bindings.knows("6.0"):
        return constant(None)
    if variable == "SEARCH_META":
        message = "Can't access $$SEARCH_META without a $search stage earlier in the pipeline"
        bindings.compilation.failures.append(UsageError(message, code=6347903))

    def evaluate(frame: Frame) -> Maybe:
        raise registry.failure(51144, f"Builtin variable '$${variable}' is not available")

    return Expression(evaluate, "operator", name=f"$${variable}")


def _without_gaps(value: Maybe) -> Maybe:
    """Refuse an array out of which a stage before took elements: the server still counts them, here they are gone."""
    suspect = value is not None and value[0] == v.ARRAY and v.GONE in value[1]
    if value is not None and suspect and any(item is None for _, item in v.places_of(value[1])):
        raise registry.failure(
            registry.NOT_SUPPORTED,
            "an array out of which an earlier projection took elements is not supported here",
        )
    return value


def _path_closure(slot: int, names: tuple[bytes, ...]) -> Evaluate:
    if not names:
        return lambda frame: frame[slot]
    if len(names) > 1:
        return lambda frame: follow(frame[slot], names, 0)
    lookup, first = v.field, names[0]

    def evaluate(frame: Frame) -> Maybe:
        value = frame[slot]
        if value is not None and value[0] == v.OBJECT:
            return lookup(value[1], first)
        return follow(value, names, 0)

    return evaluate


def _root_path(names: tuple[bytes, ...], bindings: Bindings) -> Evaluate:
    """The look-up of a path from the document's root: once for each document, however often it is asked for."""
    lookup, first = v.field, names[0]
    slot = bindings.compilation.path_slot(names)

    def evaluate(frame: Frame) -> Maybe:
        value = frame[slot]
        if value is NOT_LOOKED_UP:
            value = frame[slot] = lookup(frame[0][1], first)  # type: ignore[index]
        return value

    if len(names) == 1:
        return evaluate
    above = _root_path(names[:1], bindings)

    def evaluate_below(frame: Frame) -> Maybe:
        value = frame[slot]
        if value is NOT_LOOKED_UP:
            value = frame[slot] = follow(above(frame), names, 1)
        return value

    return evaluate_below


def follow(value: Maybe, names: tuple[bytes, ...], index: int) -> Maybe:
    """The value at ``names[index:]``. An array gives the array of what its documents hold there; no index is a name."""
    last = len(names)
    while index < last:
        if value is None:
            return None
        kind, data = value
        if kind == v.OBJECT:
            value = v.field(data, names[index])
            index += 1
        elif kind == v.ARRAY:
            return v.array_of(_followed_each(data, names, index))
        else:
            return None
    return value


def _followed_each(array: bytes, names: tuple[bytes, ...], index: int) -> list[Maybe]:
    """What the documents of an array hold at ``names[index:]``."""
    found: list[Maybe]
    documents = [item for _, kind, item in v.fields_of(array) if kind == v.OBJECT]
    if index == len(names) - 1:
        lookup, name = v.field, names[index]
        found = [lookup(item, name) for item in documents]
    else:
        found = [follow((v.OBJECT, item), names, index) for item in documents]
    return [value for value in found if value is not None]


# ── operators with evaluated arguments ───────────────────────────────────────────────────────────────────────────────


def parse_arguments(operand: Value, bindings: Bindings) -> list[Expression]:
    """An operator's arguments: the elements of an array, or the one value that stands there."""
    if operand[0] == v.ARRAY:
        return [parse_operand(item, bindings) for item in v.elements_of(operand)]
    return [parse_operand(operand, bindings)]


def check_arity(name: str, given: int, low: int, high: int | None) -> None:
    if low == high and given != low:
        raise registry.parse_failure(16020, f"Expression {name} takes exactly {low} arguments. {given} were passed in.")
    if given < low or (high is not None and given > high):
        raise registry.parse_failure(
            28667,
            f"Expression {name} takes at least {low} arguments, and at most {high}, but {given} were passed in.",
        )


def operator_of(name: str, args: Sequence[Expression], evaluate: Evaluate, bindings: Bindings) -> Expression:
    """An operator over ``args``; folded when all of them are constant."""
    expression = Expression(evaluate, "operator", name=name, args=tuple(args))
    return fold(expression, bindings) if all(argument.constant for argument in args) else expression


def runtime_operator(name: str, args: Sequence[Expression], evaluate: Evaluate) -> Expression:
    """An operator that the server leaves to the run time even where all of it is constant."""
    return Expression(evaluate, "operator", name=name, args=tuple(args))


def unary(name: str, group: str, since: str, function: Callable[[Maybe], Maybe], *, note: str = "") -> None:
    """Register an operator of exactly one argument."""

    def parse(operand: Value, bindings: Bindings) -> Expression:
        args = parse_arguments(operand, bindings)
        check_arity(name, len(args), 1, 1)
        inner = args[0].evaluate
        return operator_of(name, args, lambda frame: function(inner(frame)), bindings)

    registry.register(name, group, since, parse, note=note)


def binary(
    name: str,
    group: str,
    since: str,
    function: Callable[[Maybe, Maybe], Maybe],
    *,
    right_first: bool = False,
    note: str = "",
) -> None:
    """Register an operator of exactly two arguments. Which is evaluated first shows when both fail."""
    ordered_binary(name, group, since, lambda order: function, right_first=right_first, note=note)


def ordered_binary(
    name: str,
    group: str,
    since: str,
    make: Callable[[Order], Callable[[Maybe, Maybe], Maybe]],
    *,
    right_first: bool = False,
    note: str = "",
) -> None:
    """Register an operator of exactly two arguments that compares values: ``make`` gives it for an order."""

    def parse(operand: Value, bindings: Bindings) -> Expression:
        args = parse_arguments(operand, bindings)
        check_arity(name, len(args), 2, 2)
        function = make(bindings.order)
        left, right = args[0].evaluate, args[1].evaluate
        if right_first:

            def backwards(frame: Frame) -> Maybe:
                second = right(frame)
                return function(left(frame), second)

            return operator_of(name, args, backwards, bindings)
        return operator_of(name, args, lambda frame: function(left(frame), right(frame)), bindings)

    registry.register(name, group, since, parse, note=note)


def variadic(
    name: str,
    group: str,
    since: str,
    function: Callable[[Iterable[Maybe]], Maybe],
    *,
    low: int = 0,
    high: int | None = None,
    associative: bool = False,
    commutative: bool = False,
    note: str = "",
    two: Callable[[Value, Value], Value] | None = None,
    left_since: str | None = None,
) -> None:
    """Register an operator of ``low`` to ``high`` arguments.

    ``function`` gets them one after another and may stop early, as the server does at the first null. The server
    merges an ``associative`` operator with the same operator inside it and evaluates its constants beforehand,
    neighbours alone unless it is ``commutative``; that order shows in rounding and in errors. ``two`` does the same
    more quickly for two numbers that are no decimals. From ``left_since`` on the server keeps the order: it merges
    constants at the beginning alone, and opens the first argument alone.
    """
    _variadic(
        name,
        (group, since, note),
        lambda bindings: function,
        arity=(low, high),
        associative=associative,
        commutative=lambda order: commutative,
        two=two,
        left_since=left_since,
    )


def ordered_variadic(
    name: str,
    group: str,
    since: str,
    make: Callable[[Order], Callable[[Iterable[Maybe]], Maybe]],
    *,
    commutative: Callable[[Order], bool],
) -> None:
    """As ``variadic``, for an associative operator that compares values: ``make`` gives it for an order, and
    ``commutative`` says whether it is in that order."""
    _variadic(
        name,
        (group, since, ""),
        lambda bindings: make(bindings.order),
        arity=(0, None),
        associative=True,
        commutative=commutative,
    )


def versioned_variadic(
    name: str, group: str, since: str, make: Callable[[Version], Callable[[Iterable[Maybe]], Maybe]]
) -> None:
    """As ``variadic``, for an associative operator that ``make`` gives for a server's version."""
    _variadic(
        name,
        (group, since, ""),
        lambda bindings: make(bindings.version),
        arity=(0, None),
        associative=True,
        commutative=lambda order: False,
    )


def _variadic(
    name: str,
    listed: tuple[str, str, str],
    make: Callable[[Bindings], Callable[[Iterable[Maybe]], Maybe]],
    *,
    arity: tuple[int, int | None],
    associative: bool,
    commutative: Callable[[Order], bool],
    two: Callable[[Value, Value], Value] | None = None,
    left_since: str | None = None,
) -> None:
    group, since, note = listed

    def build(args: Sequence[Expression], bindings: Bindings) -> Expression:
        function = make(bindings)
        closures = [argument.evaluate for argument in args]
        if two is not None and len(args) == 2:
            return operator_of(name, args, _of_two(args, two, function), bindings)
        return operator_of(name, args, lambda frame: function(map(call, closures, repeat(frame))), bindings)

    def parse(operand: Value, bindings: Bindings) -> Expression:
        args = parse_arguments(operand, bindings)
        check_arity(name, len(args), *arity)
        if associative and bindings.folding and not all(argument.constant for argument in args):
            left = left_since is not None and bindings.knows(left_since)
            args = regroup(name, args, build, bindings, commutative=commutative(bindings.order) and not left, left=left)
        return build(args, bindings)

    registry.register(name, group, since, parse, note=note)


def _of_two(
    args: Sequence[Expression], quick: Callable[[Value, Value], Value], function: Callable[[Iterable[Maybe]], Maybe]
) -> Evaluate:
    """``quick`` for two plain numbers, else ``function``: it asks for the second only where the first is not null."""
    left, right = args[0].evaluate, args[1].evaluate
    plain = v.PLAIN_NUMBERS

    def evaluate(frame: Frame) -> Maybe:
        first = left(frame)
        if first is None or first[0] not in plain:
            return function(_then(first, right, frame))
        second = right(frame)
        if second is None or second[0] not in plain:
            return function((first, second))
        return quick(first, second)

    return evaluate


def _then(first: Maybe, right: Evaluate, frame: Frame) -> Iterator[Maybe]:
    yield first
    yield right(frame)


def regroup(
    name: str,
    args: Sequence[Expression],
    build: Callable[[Sequence[Expression], Bindings], Expression],
    bindings: Bindings,
    *,
    commutative: bool,
    least: int = 1,
    left: bool = False,
) -> list[Expression]:
    """The arguments with nested operators of the same name opened and constants merged, the commutative ones at the
    end. ``least``: a nested operator of fewer arguments stays whole. ``left``: only what stands at the beginning."""
    flat: list[Expression] = []
    for place, argument in enumerate(args):
        same = argument.kind == "operator" and argument.name == name and len(argument.args) >= least
        same = same and (place == 0 or not left)
        flat += argument.args if same else [argument]
    result: list[Expression] = []
    waiting: list[Expression] = []

    def settle() -> None:
        apart = len(waiting) < 2 or (left and result)
        result.extend(waiting if apart else [build(waiting, bindings)])
        waiting.clear()

    for argument in flat:
        if argument.constant:
            waiting.append(argument)
            continue
        if not commutative:
            settle()
        result.append(argument)
    settle()
    return result
