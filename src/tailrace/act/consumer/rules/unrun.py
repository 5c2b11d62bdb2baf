"""Work that a callable has returned instead of doing it. If it were taken for done, it would be lost."""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

from tailrace.act.consumer.rules.errors import HandlerNotRun
from tailrace.errors import UsageError

_AWAIT_HINT: Final = "AsyncListener, or tailrace listen with async def, awaits handlers; a Listener calls them"
_GENERATOR_HINT: Final = "Let it do its work and return: a function with yield does nothing when it is called"


def refuse_unrun(given: object, what: str) -> None:
    """Raises HandlerNotRun where ``given``, which ``what`` has returned, is work that is still to be done."""
    if given is None or isinstance(given, (int, str)):
        return
    kind = _kind(given)
    if kind is None:
        return
    if inspect.iscoroutine(given) or inspect.isgenerator(given):
        given.close()  # else Python warns of it
    raise HandlerNotRun(
        f"{what} returned {kind}: that has not run, and the change does not count as handled",
        hint=_GENERATOR_HINT if "generator" in kind else _AWAIT_HINT,
    )


def _kind(given: object) -> str | None:
    if inspect.isasyncgen(given):
        return "an asynchronous generator"
    if inspect.iscoroutine(given):
        return "a coroutine"
    if inspect.isgenerator(given):
        return "a generator"
    if inspect.isawaitable(given):
        return "something to be awaited"
    return "a future" if callable(getattr(type(given), "add_done_callback", None)) else None


def is_coroutine_function(called: Any) -> bool:
    """Whether calling it gives a coroutine, as far as can be seen without calling it."""
    return inspect.iscoroutinefunction(_function(called))


def check_runs(called: Any, what: str, *, awaited: bool = False) -> None:
    """Raises UsageError if it can be seen that calling ``called`` does not do its work: it is a generator function or,
    unless it is ``awaited``, a coroutine function."""
    function = _function(called)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{what} is a generator, and would never run", hint=_GENERATOR_HINT)
    if not awaited and inspect.iscoroutinefunction(function):
        raise UsageError(f"{what} is async def, and would never run", hint=_AWAIT_HINT)


def _function(called: Any) -> Any:
    while isinstance(called, partial):
        called = called.func
    if isinstance(called, (FunctionType, MethodType)) or inspect.isroutine(called):
        return called
    return type(called).__call__
