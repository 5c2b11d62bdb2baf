"""What an expression is compiled to, and the variables that it can see while it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from tailrace.core.expression.language.version import USUAL, Version, knows
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import SIMPLE, Order
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import UsageError

Frame: TypeAlias = list[Maybe]
Evaluate: TypeAlias = Callable[[Frame], Maybe]
Items: TypeAlias = Callable[[Frame], list[Value] | None]

ROOT_SLOT: Final = 0
#: In a frame: the path of this slot was not followed yet. No value has this type.
NOT_LOOKED_UP: Final[Value] = (-1, b"")


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression.

    ``kind`` is "constant" (``value`` holds it), "field" (``name`` is the variable, ``path`` its fields), "operator"
    (``name`` with its ``args``), "object" (``names`` beside ``args``) or "array".
    """

    evaluate: Evaluate
    kind: str
    name: str = ""
    args: tuple[Expression, ...] = ()
    value: Maybe = None
    path: tuple[bytes, ...] = ()
    names: tuple[bytes, ...] = ()
    #: The elements of the array that this gives, ``None`` where it gives null: for who would only take it apart again.
    items: Items | None = None

    @property
    def constant(self) -> bool:
        return self.kind == "constant"


@dataclass(slots=True)
class Compilation:
    """What one compilation shares: the number of slots and where the parser stands (left as it is by an error)."""

    slots: int = 1
    #: Whether documents made here keep the places of fields that went, because something later may set them again.
    places: bool = False
    #: Whether a stage before this one may have left places behind.
    after_places: bool = False
    place: list[str] = field(default_factory=list)
    #: The order of values: the collation's.
    order: Order = SIMPLE
    #: The version of the server whose language this is.
    version: Version = USUAL
    #: Errors of constant parts. The server parses everything before it evaluates constants, so these come second.
    failures: list[UsageError] = field(default_factory=list)
    #: The slots of paths from the document's root. What was looked up once stays in the frame.
    paths: dict[tuple[bytes, ...], int] = field(default_factory=dict)
    _empty: Frame = field(default_factory=list)

    def path_slot(self, names: tuple[bytes, ...]) -> int:
        slot = self.paths.get(names)
        if slot is None:
            slot = self.paths[names] = self.new_slot()
        return slot

    def frame(self) -> Frame:
        """A frame without a document, in which nothing was looked up."""
        if len(self._empty) != self.slots:
            self._empty = [None] * self.slots
            for slot in self.paths.values():
                self._empty[slot] = NOT_LOOKED_UP
        return self._empty.copy()

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1


@dataclass(frozen=True, slots=True)
class Bindings:
    """The variables that an expression can see: bound ones by slot, constant ones by value."""

    compilation: Compilation
    bound: dict[str, int]
    constants: dict[str, Maybe]
    folding: bool = True

    @classmethod
    def of_document(cls, constants: dict[str, Maybe], order: Order = SIMPLE, version: Version = USUAL) -> Bindings:
        """The bindings of a stage: the document as ROOT and CURRENT, and constants such as NOW, REMOVE and ``let``."""
        return cls(Compilation(order=order, version=version), {"ROOT": ROOT_SLOT, "CURRENT": ROOT_SLOT}, constants)

    @property
    def order(self) -> Order:
        """The order in which this pipeline compares values."""
        return self.compilation.order

    @property
    def version(self) -> Version:
        """The version of the server whose language this is."""
        return self.compilation.version

    def knows(self, since: str) -> bool:
        """Whether this server has what came with the version ``since``."""
        return knows(self.compilation.version, since)

    @property
    def later_patterns(self) -> bool:
        """Whether regular expressions are read as PCRE2 reads them, which servers from 7.0 on have."""
        return self.knows("7.0")

    @property
    def element_places(self) -> bool:
        """Whether an element that a projection takes out of an array keeps its place, as it does before 7.0."""
        return self.compilation.places and not self.knows("7.0")

    def bind(self, *names: str) -> tuple[Bindings, list[int]]:
        """Bindings in which ``names`` are bound to new slots, and these slots."""
        slots = [self.compilation.new_slot() for _ in names]
        return replace(self, bound={**self.bound, **dict(zip(names, slots, strict=True))}), slots

    def unfolded(self) -> Bindings:
        """For the arguments of an operator that the server does not optimize: an error among them waits for the run."""
        return replace(self, folding=False)

    def frame(self, document: bytes) -> Frame:
        frame = self.compilation.frame()
        frame[ROOT_SLOT] = (v.OBJECT, document)
        return frame

    def enter(self, place: str) -> None:
        self.compilation.place.append(place)

    def leave(self) -> None:
        self.compilation.place.pop()

    def fail_later(self, code: int | None, message: str) -> None:
        """Note an error that the server finds only after everything is parsed."""
        place = ".".join(self.compilation.place)
        message = f"Failed to optimize pipeline :: caused by :: {message}"
        self.compilation.failures.append(UsageError(message, code=code, hint=f"At {place}"))


def constant(value: Maybe) -> Expression:
    return Expression(lambda frame: value, "constant", value=value)
