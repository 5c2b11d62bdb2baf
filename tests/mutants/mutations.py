"""What is changed in a module, one change at a time, and under which name a change is known.

A **mutant** is a module with one expression or statement altered: a comparison, a boundary, a number, the name of a
field, a condition turned round, a call left out. Its name consists of the function and the text before and after. It
has no line number, so it stays the same when lines are added above.

Some things are not altered, since nothing that a program computes depends on them, or since no test can or should fix
them: annotations and aliases of types, docstrings, imports and decorators; sentences (a text with a space in it, and
formatted texts), whose wording may change; and what ``invariant`` and ``assert`` say, which holds as long as everything
else is right.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from tests.tidy.parsing import parse

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
#: A name shows as much of the statement around a change as fits.
_SHOWN_MAX: Final = 160

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_FUNCTIONS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_BOOLEANS: Final[dict[type[ast.boolop], type[ast.boolop]]] = {ast.And: ast.Or, ast.Or: ast.And}
#: Calls in which nothing is altered.
_UNTOUCHED_CALLS: Final = ("invariant", "cast", "TypeVar")


@dataclass(frozen=True)
class Mutant:
    """One change of a module, found again by ``name``."""

    module: str
    function: str
    """Qualified; the class, or nothing, where the change stands outside of functions."""
    before: str
    after: str
    nth: int
    """Of those in this function whose texts are the same."""
    line: int
    statement: int
    """The line of the statement around it, by which the tests that reach it are found."""
    is_inside: bool
    """Of a function's body: then it can be planted in a process that has imported everything."""
    parent: ast.AST = field(compare=False, repr=False)
    child: str = field(compare=False, repr=False)
    index: int | None = field(compare=False, repr=False)
    new: Any = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        nth = f" #{self.nth}" if self.nth > 1 else ""
        return f"{self.module}:{self.function}: {self.before} -> {self.after}{nth}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The tree that the mutant was found in, with the change in it."""
        old = _get(self.parent, self.child, self.index)
        _put(self.parent, self.child, self.index, self.new)
        try:
            yield
        finally:
            _put(self.parent, self.child, self.index, old)


@dataclass(frozen=True)
class MutatedModule:
    """A module with all of its mutants."""

    module: str
    path: Path
    tree: ast.Module
    mutants: list[Mutant]


def mutated_module(module: str, path: Path) -> MutatedModule:
    tree = parse(path.read_text())
    found = _Finder(module)
    found.visit(tree)
    return MutatedModule(module, path, tree, found.named())


def _get(parent: ast.AST, child: str, index: int | None) -> Any:
    value = getattr(parent, child)
    return value if index is None else value[index]


def _put(parent: ast.AST, child: str, index: int | None, new: Any) -> None:
    if index is None:
        setattr(parent, child, new)
    else:
        getattr(parent, child)[index] = new


@dataclass
class _Change:
    function: str
    top: list[ast.AST]
    """The changed node's ancestors inside its statement, the outermost first."""
    node: ast.AST
    statement: ast.AST
    parent: ast.AST
    child: str
    index: int | None
    new: Any
    is_inside: bool


class _Finder:
    """Walks a tree and collects the changes; the texts are made at the end."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.changes: list[_Change] = []
        self._scope: list[str] = []
        self._functions = 0
        self._statement: ast.stmt | None = None
        self._above: list[ast.AST] = []

    def named(self) -> list[Mutant]:
        """The mutants, numbered where two have the same texts."""
        seen: Counter[tuple[str, str, str]] = Counter()
        mutants = []
        for one in self.changes:
            before, after = _texts(one)
            if before == after:
                continue
            seen[one.function, before, after] += 1
            nth = seen[one.function, before, after]
            line = getattr(one.node, "lineno", getattr(one.statement, "lineno", 0))
            place = (line, getattr(one.statement, "lineno", 0))
            target = (one.parent, one.child, one.index, one.new)
            mutants.append(Mutant(self.module, one.function, before, after, nth, *place, one.is_inside, *target))
        return mutants

    def visit(self, tree: ast.Module) -> None:
        self._body(tree, "body")

    def _body(self, parent: ast.AST, name: str) -> None:
        for index, statement in enumerate(getattr(parent, name)):
            self._visit_statement(statement, parent, name, index)

    def _visit_statement(self, statement: ast.stmt, parent: ast.AST, name: str, index: int) -> None:
        outer = self._statement, self._above
        self._statement, self._above = statement, []
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._definition(statement)
        elif not _is_untouched(statement):
            if (new := _left_out(statement)) is not None:
                self._add(statement, parent, name, index, new)
            self._parts(statement)
        self._statement, self._above = outer

    def _definition(self, node: _Function | ast.ClassDef) -> None:
        if not isinstance(node, ast.ClassDef):
            for child in ("defaults", "kw_defaults"):
                for index, default in enumerate(getattr(node.args, child)):
                    if default is not None:
                        self._expression(default, node.args, child, index)
        inside = 0 if isinstance(node, ast.ClassDef) else 1
        self._scope.append(node.name)
        self._functions += inside
        self._body(node, "body")
        self._functions -= inside
        self._scope.pop()

    def _parts(self, node: ast.AST) -> None:
        """Visit what is below a statement, a handler, a case or an expression."""
        for child, value in ast.iter_fields(node):
            if child in ("annotation", "keywords") and isinstance(node, ast.AnnAssign):
                continue
            for index, part in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(part, ast.stmt):
                    self._visit_statement(part, node, child, index or 0)
                elif isinstance(part, ast.expr):
                    self._expression(part, node, child, index)
                elif isinstance(part, ast.AST):
                    self._parts(part)

    def _expression(self, node: ast.expr, parent: ast.AST, child: str, index: int | None) -> None:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _called(node) in _UNTOUCHED_CALLS):
            return
        for new in _replacements(node, parent, child):
            if not self._functions and isinstance(new, ast.Constant) and new.value is None:
                continue  # a constant that is missing fails at once
            self._add(node, parent, child, index, new)
        self._above.append(node)
        self._parts(node)
        self._above.pop()

    def _add(self, node: ast.AST, parent: ast.AST, child: str, index: int | None, new: ast.AST) -> None:
        assert self._statement is not None
        ast.copy_location(new, node)
        ast.fix_missing_locations(new)
        function = ".".join(self._scope)
        place = (parent, child, index, new, self._functions > 0)
        self.changes.append(_Change(function, [*self._above], node, self._statement, *place))


def _is_untouched(statement: ast.stmt) -> bool:
    """A docstring, an import, an assertion, a list of public names, what only type checkers see."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and _called(value) in _UNTOUCHED_CALLS)
    if isinstance(statement, ast.AnnAssign):
        return isinstance(statement.annotation, ast.Name) and statement.annotation.id == "TypeAlias"
    if isinstance(statement, ast.Assign):
        if isinstance(statement.value, ast.Subscript) and _is_type(statement.targets[0]):
            return True
        return any(isinstance(one, ast.Name) and one.id in ("__all__", "__slots__") for one in statement.targets)
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal)


def _left_out(statement: ast.stmt) -> ast.stmt | None:
    """What takes the statement's place if it is left out, or if it continues its loop instead of ending it or the
    reverse."""
    if isinstance(statement, ast.Raise) or (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call | ast.Yield | ast.YieldFrom | ast.Await)
    ):
        return ast.Pass()
    if isinstance(statement, ast.Continue):
        return ast.Break()
    if isinstance(statement, ast.Break):
        return ast.Continue()
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _OPERATORS:
        return ast.AugAssign(statement.target, _OPERATORS[type(statement.op)](), statement.value)
    if isinstance(statement, ast.Delete):
        return ast.Pass()
    return None


def _replacements(node: ast.expr, parent: ast.AST, child: str) -> Iterator[ast.expr]:
    """What an expression is replaced by, one after the other."""
    yield from _of_a_place(node, parent, child)
    match node:
        case ast.Compare(left, ops, comparators):
            for place, one in enumerate(ops):
                changed = [*ops[:place], _COMPARISONS[type(one)](), *ops[place + 1 :]]
                yield ast.Compare(left, changed, comparators)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(_BOOLEANS[type(op)](), values)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS and not (_is_untold(left) or _is_untold(right)):
            yield ast.BinOp(left, _OPERATORS[type(op)](), right)
        case ast.UnaryOp(ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Constant(value):
            yield from _other_constant(value)
        case ast.Call(ast.Name(id=name), args, keywords) if name in _FUNCTIONS:
            yield ast.Call(ast.Name(_FUNCTIONS[name], ast.Load()), args, keywords)


def _of_a_place(node: ast.expr, parent: ast.AST, child: str) -> Iterator[ast.expr]:
    """For a condition its negation; for a value that is returned or assigned, None."""
    if child in ("test", "ifs", "guard"):
        if not isinstance(node, ast.Compare | ast.UnaryOp):
            yield ast.UnaryOp(ast.Not(), node)
    elif isinstance(parent, ast.Return):
        if not isinstance(node, ast.Constant):
            yield ast.Constant(None)
    elif child == "value" and isinstance(parent, ast.Assign | ast.AnnAssign) and not isinstance(node, ast.Constant):
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        if not any(isinstance(target, ast.Tuple) for target in targets):
            yield ast.Constant(None)


def _other_constant(value: object) -> Iterator[ast.expr]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
    elif isinstance(value, str) and " " not in value:
        yield ast.Constant(value + "XX")
    elif isinstance(value, bytes):
        yield ast.Constant(value + b"XX")


def _is_untold(node: ast.expr) -> bool:
    """A text or a type, for which the replaced operator would not be defined."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) or node.value is None
    return isinstance(node, ast.JoinedStr) or _is_type(node)


def _is_type(node: ast.expr) -> bool:
    """Whether its name is that of a class or of an alias of one."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name[:1].isupper() and not name.isupper()


def _called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _texts(change: _Change) -> tuple[str, str]:
    """The widest part of the statement around a change that is not too long to read, before and after it."""
    statement = change.statement
    simple = not hasattr(statement, "body") and not isinstance(statement, ast.Match)
    candidates = ([statement] if simple or change.node is statement else []) + change.top + [change.node]
    for node in candidates:
        if node is change.node:
            break
        before = ast.unparse(node)
        if len(before) <= _SHOWN_MAX:
            old = _get(change.parent, change.child, change.index)
            _put(change.parent, change.child, change.index, change.new)
            after = ast.unparse(node)
            _put(change.parent, change.child, change.index, old)
            return before, after
    return _short(ast.unparse(change.node)), _short(ast.unparse(change.new))


def _short(text: str) -> str:
    """The two ends of a text that is still too long, such as a change of a whole table."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX // 2]}...{text[-_SHOWN_MAX // 2 :]}"
