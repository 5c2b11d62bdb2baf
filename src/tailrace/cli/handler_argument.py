"""Arguments that name a handler, and the collections that listeners keep their state in."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from tailrace.core.oplog.namespace import Scope
from tailrace.errors import UsageError

STORE: Final = "tailrace.leases"
LETTERS: Final = "tailrace.deadLetters"


def load_handler(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names, found from the current directory too. Raises UsageError."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} does not name a handler", hint="Write module:function, such as shop.orders:handle")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(f"the module {module_name!r} cannot be loaded: {error}") from error
        raise UsageError(
            f"there is no module {module_name!r}", hint="Python searches the current directory and PYTHONPATH"
        ) from None
    except Exception as error:
        raise UsageError(f"the module {module_name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"the module {module_name!r} has no function {attribute!r}")
    handler: Callable[..., Any] = found
    return handler


def store_namespace(text: str) -> tuple[str, str]:
    """Database and collection of ``db.coll``. Raises UsageError."""
    scope = Scope.parse(text)
    if scope.database is None or scope.collection is None:
        raise UsageError(f"{text!r} is not a collection", hint="Write it as database.collection")
    return scope.database, scope.collection
