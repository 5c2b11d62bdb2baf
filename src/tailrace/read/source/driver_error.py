"""Our errors as PyMongo's: ``except OperationFailure`` catches a ServerError that comes out of ``watch()``.

The core may not import a driver, so its errors become PyMongo's where they leave a client: an error keeps its identity,
its traceback and its cause, and gets a class that derives from both its own and the one that PyMongo raises in that
place. ``except tailrace.ServerError`` and ``except pymongo.errors.OperationFailure`` both catch it, and its text is the
same as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import errors as pymongo_errors

from tailrace.core import raw_bson
from tailrace.errors import InternalError, SinkError, SourceError, TailraceError, UsageError

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: What PyMongo raises for a reply with this code; for any other it is OperationFailure.
_OF_CODE: Final[dict[int, type[pymongo_errors.PyMongoError]]] = {
    43: pymongo_errors.CursorNotFound,
    50: pymongo_errors.ExecutionTimeout,
}

_made: Final[dict[tuple[type[TailraceError], type[Exception]], type[TailraceError]]] = {}


class _Both:
    """First among the bases, so that PyMongo's read-only properties do not hide what our error holds."""

    code: int | None = None
    labels: frozenset[str] = frozenset()
    hint: str | None = None
    message: str = ""
    code_name: str | None = None
    #: The server's reply, or what it would have been.
    details: Any = None
    ours: type[TailraceError]
    theirs: type[Exception]

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuilt, (self.ours, self.theirs, self.message, dict(vars(self))))


def _rebuilt(ours: type[TailraceError], theirs: type[Exception], message: str, state: dict[str, Any]) -> TailraceError:
    both = _class_of(ours, theirs)
    error = both.__new__(both, message)
    vars(error).update(state)
    return error


def _class_of(ours: type[TailraceError], theirs: type[Exception]) -> type[TailraceError]:
    found = _made.get((ours, theirs))
    if found is None:
        found = _made.setdefault((ours, theirs), _make(ours, theirs))
    return found


def _make(ours: type[TailraceError], theirs: type[Exception]) -> type[TailraceError]:
    members = {"ours": ours, "theirs": theirs, "__module__": ours.__module__, "__qualname__": ours.__qualname__}
    members |= {"__doc__": ours.__doc__, "code_name": TailraceError.code_name}
    made: type[TailraceError] = type(ours.__name__, (_Both, ours, theirs), members)
    return made


def as_driver_error(error: TailraceError, cause: Exception | type[Exception] | None = None) -> TailraceError:
    """``error`` itself, which is an exception of ``cause``'s class too from now on.

    What the cause knows besides its text (the server's reply) is then known of ``error`` as well. Without a ``cause``
    the class is the one that PyMongo raises in such a case.
    """
    if isinstance(error, (_Both, pymongo_errors.PyMongoError)):
        return error
    known: Mapping[str, Any] = vars(cause) if isinstance(cause, Exception) else {}
    kind = type(cause) if isinstance(cause, Exception) else cause
    theirs = _kind_of(error) if kind is None else kind
    if theirs is None:
        return error
    state = {**known, **vars(error)}
    if issubclass(theirs, pymongo_errors.PyMongoError):
        state["_message"] = error.message
        state["_error_labels"] = set(error.labels) | set(known.get("_error_labels", ()))
        state["details"] = _decoded(getattr(cause, "details", None)) if known else None
        if state["details"] is None and issubclass(theirs, pymongo_errors.OperationFailure):
            state["details"] = _reply(error)
        for name in ("code", "details"):
            state[f"_OperationFailure__{name}"] = state[name]
        state.setdefault("_OperationFailure__max_wire_version", None)
        state.setdefault("_OperationFailure__base_backoff_ms", None)
        state.setdefault("errors", [])
    error.__class__ = _class_of(type(error), theirs)
    vars(error).update(state)
    return error


def _kind_of(error: TailraceError) -> type[Exception] | None:
    """What PyMongo raises where the error has no cause of PyMongo's: by the code, or by who acts next."""
    if isinstance(error, (InternalError, SinkError)):
        return None
    if error.code is not None:
        return _OF_CODE.get(error.code, pymongo_errors.OperationFailure)
    if isinstance(error, SourceError):
        return pymongo_errors.ConnectionFailure
    return pymongo_errors.InvalidOperation if isinstance(error, UsageError) else pymongo_errors.PyMongoError


def _decoded(details: Any) -> Any:
    """A reply as a dictionary, which programs print and compare; our reads ask for raw documents."""
    return bson.decode(raw_bson.bytes_of(details)) if isinstance(details, RawBSONDocument) else details


def _reply(error: TailraceError) -> dict[str, Any]:
    """The reply of a server that fails so."""
    reply: dict[str, Any] = {"ok": 0.0, "errmsg": error.message, "code": error.code, "codeName": error.code_name}
    return {**reply, "errorLabels": sorted(error.labels)} if error.labels else reply


@contextmanager
def driver_errors() -> Iterator[None]:
    """The border: inside, our errors are ours; outside, they are PyMongo's too."""
    try:
        yield
    except TailraceError as error:
        as_driver_error(error)
        raise


def at_the_border(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function`` whose errors of ours are PyMongo's too."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except TailraceError as error:
            as_driver_error(error)
            raise

    return called
