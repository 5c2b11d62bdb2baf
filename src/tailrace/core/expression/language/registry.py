"""What the language holds: every operator and stage by name, with its group and first version, and what is refused and
why.

The table is filled by the modules that implement the operators; ``docs/reference/expressions.md`` is made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from tailrace.core.expression.language.expression import Bindings, Expression
from tailrace.core.expression.language.version import Version, is_unmeasured, knows
from tailrace.core.expression.values.value import Value
from tailrace.errors import ServerError, UsageError

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
    #: The server version that brought it.
    since: str = "2.2"


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
    since: str = "2.2",
) -> None:
    """Refuse an operator by name: its use raises ``code`` at compile time, after what ``check`` raises."""
    REFUSED[name] = Refusal(name, group, code, reason, check, since)


def operator_of(name: str, version: Version) -> Operator | None:
    """The aggregation operator, where a server of ``version`` has it and it is evaluated here."""
    operator = OPERATORS.get(name)
    return operator if operator is not None and knows(version, operator.since) else None


def refused_expression(name: str, version: Version) -> Refusal | None:
    """The refusal of an aggregation operator that a server of ``version`` has, or may have. A query operator has none
    here: to the server it is an unknown expression."""
    refusal = REFUSED.get(name)
    if refusal is not None and refusal.group == "expression" and knows(version, refusal.since):
        return refusal
    if name in OPERATORS or refusal is not None or not is_unmeasured(version):
        return None
    return Refusal(name, "expression", NOT_SUPPORTED, unmeasured(version))


def unmeasured(version: Version) -> str:
    """Why a name that is not known here is refused, where the server may know it."""
    return f"what the language of MongoDB {'.'.join(map(str, version))} adds to that of 7.0 has not been measured"


def unsupported(what: str, reason: str) -> UsageError:
    """The refusal of what the server does and Tailrace does not."""
    return parse_failure(NOT_SUPPORTED, f'{what} is not supported: {reason} (engine="server" gives it)')


def parse_failure(code: int, message: str) -> UsageError:
    """An error of the pipeline's text. The place in the pipeline is added where the stage is compiled."""
    return UsageError(message, code=code)


def check_buffer(size: int, limit: int) -> None:
    """Raise what the server ends with that would write more bytes into one of its buffers than it holds."""
    if size > limit:
        raise failure(13548, f"BufBuilder attempted to grow() to {size} bytes, past the {limit >> 20}MB limit.")


def failure(code: int, message: str) -> ServerError:
    """An error of evaluation on one event. The stage is added where the pipeline runs."""
    return ServerError(message, code=code)


def not_exact(what: str) -> ServerError:
    """What the server computes with an arithmetic that is not reproduced here is refused rather than approximated."""
    return ServerError(f"{what} is not supported: the server's result cannot be reproduced exactly", code=NOT_SUPPORTED)
