"""What the language holds: every operator and stage by name, with its group, since when, and what is refused and why.

The table is filled by the modules that implement the operators; ``docs/reference/expressions.md`` is made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from tailrace.errors import ServerError, UsageError
from tailrace.expression.language.expression import Bindings, Expression
from tailrace.expression.values.value import Value

Parser: TypeAlias = Callable[[Value, Bindings], Expression]


@dataclass(frozen=True, slots=True)
class Operator:
    """One aggregation operator: its group in the reference, the server version that brought it, how it is parsed."""

    name: str
    group: str
    since: str
    parse: Parser
    note: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of the reference for what has no parser of its own here (query operators, stages, variables)."""

    name: str
    group: str
    since: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is refused when the stream is opened: the server's code where the server refuses it too."""

    name: str
    group: str
    code: int
    reason: str
    #: Raises what the server's parser raises for a malformed argument: that comes first.
    check: Callable[[Value, Bindings], None] | None = None


OPERATORS: Final[dict[str, Operator]] = {}
LISTED: Final[list[Listed]] = []
REFUSED: Final[dict[str, Refusal]] = {}

#: The server's code for a command that exists but is not supported here.
NOT_SUPPORTED: Final = 115


def register(name: str, group: str, since: str, parse: Parser, *, note: str = "") -> None:
    OPERATORS[name] = Operator(name, group, since, parse, note)


def listed(group: str, since: str, *names: str, note: str = "") -> None:
    """Rows of the reference for ``names``."""
    LISTED.extend(Listed(name, group, since, note) for name in names)


def refuse(
    name: str,
    group: str,
    reason: str,
    *,
    code: int = NOT_SUPPORTED,
    check: Callable[[Value, Bindings], None] | None = None,
) -> None:
    """Refuse an operator by name: its use raises ``code`` at compile time, after what ``check`` raises."""
    REFUSED[name] = Refusal(name, group, code, reason, check)


def refused_expression(name: str) -> Refusal | None:
    """The refusal of an aggregation operator. A query operator has none here: to the server it is an unknown
    expression."""
    refusal = REFUSED.get(name)
    return refusal if refusal is not None and refusal.group == "expression" else None


def parse_failure(code: int, message: str) -> UsageError:
    """An error of the pipeline's text. The place in the pipeline is added where the stage is compiled."""
    return UsageError(message, code=code)


def failure(code: int, message: str) -> ServerError:
    """An error of evaluation on one event. The stage is added where the pipeline runs."""
    return ServerError(message, code=code)


def not_exact(what: str) -> ServerError:
    """What the server computes with an arithmetic that is not reproduced here is refused rather than approximated."""
    return ServerError(f"{what} is not supported: the server's result cannot be reproduced exactly", code=NOT_SUPPORTED)
