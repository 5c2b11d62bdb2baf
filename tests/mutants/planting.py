"""Planting a mutant into a process: into functions that are there already, or into a module before it is imported."""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias, cast

from tests.mutants.mutations import Mutant, MutatedModule
from tests.tidy.parsing import parse

#: A function of a file, by its qualified name and first line.
Key: TypeAlias = tuple[str, int]
_PROBE: Final = "_reached_by_a_test"


class NotPlantableError(Exception):
    """No living function, or one of another shape: the module has to be imported anew."""


def living_functions() -> dict[str, dict[Key, list[FunctionType]]]:
    """The functions of this process, by the file that they are from."""
    gc.unfreeze()
    found: dict[str, dict[Key, list[FunctionType]]] = defaultdict(lambda: defaultdict(list))
    for one in gc.get_objects():
        if type(one) is FunctionType:  # isinstance() asks what a weak reference stands for, which may be gone
            code = one.__code__
            found[code.co_filename][code.co_qualname, code.co_firstlineno].append(one)
    return found


def plant(module: MutatedModule, mutant: Mutant, living: dict[Key, list[FunctionType]]) -> None:
    """Give the living functions of the module the code that they have in the mutant."""
    as_it_is = {(code.co_qualname, code.co_firstlineno): code for code in _codes(_compiled(module.tree, module.path))}
    with mutant.planted():
        code = _compiled(module.tree, module.path)
    if _exchange(code, living, as_it_is) == 0:
        raise NotPlantableError(mutant.name)
    for cached in _caches():
        cached.cache_clear()


def probe(module: MutatedModule, living: dict[Key, list[FunctionType]], reached: Callable[[int], None]) -> None:
    """Make the living functions of the module report the line of each statement that they reach."""
    tree = _Probes().visit(parse(module.path.read_text()))
    ast.fix_missing_locations(tree)
    imported = sys.modules.get(f"tailrace.{module.module}")
    if imported is not None:
        vars(imported)[_PROBE] = reached
        _exchange(_compiled(tree, module.path), living, {})


def restore(living: dict[Key, list[FunctionType]], path: Path) -> None:
    """Take the probes out."""
    _exchange(_compiled(parse(path.read_text()), path), living, {})


def _compiled(tree: ast.Module, path: Path) -> CodeType:
    return cast(CodeType, compile(tree, str(path), "exec", dont_inherit=True))


def _exchange(module: CodeType, living: dict[Key, list[FunctionType]], as_it_is: dict[Key, CodeType]) -> int:
    """How many functions now have code other than what the module's text gives them."""
    changed = 0
    for code in _codes(module):
        key = (code.co_qualname, code.co_firstlineno)
        for function in living.get(key, ()) if code != as_it_is.get(key) else ():
            try:
                function.__code__ = code
            except ValueError as error:  # the function asks for other names of those around it
                raise NotPlantableError(str(error)) from None
            changed += 1
    return changed


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _caches() -> Iterator[Any]:
    """Clear the caches of Tailrace's functions: they hold what the unchanged functions made."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tailrace."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and hasattr(value, "__wrapped__"):
                    yield value


class _Probes(ast.NodeTransformer):
    """A call before each statement of a function."""

    def __init__(self) -> None:
        self._functions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, self._functions = self._functions, 0
        self.generic_visit(node)
        self._functions = outer
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self._functions:
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, None)
                if isinstance(body, list):
                    setattr(node, name, [probed for statement in body for probed in (_call(statement), statement)])
        return node


def _call(statement: ast.stmt) -> ast.stmt:
    call = ast.Call(ast.Name(_PROBE, ast.Load()), [ast.Constant(statement.lineno)], [])
    return ast.copy_location(ast.Expr(call), statement)


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module as a mutant of it."""

    def __init__(self, module: MutatedModule, mutant: Mutant) -> None:
        self._name = f"tailrace.{module.module}"
        self._path = str(module.path)
        with mutant.planted():
            self._code = _compiled(module.tree, module.path)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, vars(module))
