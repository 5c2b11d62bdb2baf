"""Documents of a sync's state as they are read: one that is not as this version writes it ends the sync.

Somebody may have edited, removed or restored some of them. A position of another type, a range of the copy that is gone
or an unknown phase must not be taken for something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tailrace.errors import SinkError

EDITED: Final = (
    "Another version of Tailrace has written it, or somebody has edited it. Restore the state and the documents of the "
    "target together, or drop the collections on the target, remove the sync's state, and begin it again"
)
NONE: Final = type(None)


@contextmanager
def undamaged(what: str) -> Iterator[None]:
    """Raise SinkError where the body does not find ``what`` as this version writes it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        how = str(error) if type(error) is ValueError else repr(error)
        raise SinkError(f"{what} on the target is damaged: {how}", hint=EDITED) from None


def typed(found: Mapping[str, Any], name: str, *types: type) -> Any:
    """A field that must be there, of one of these types. Raises KeyError, ValueError."""
    value = found[name]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"its {name} is of the type {type(value).__name__}")
    return value


def check_types(found: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    """Fields that may be there, each of one of its types. Raises ValueError."""
    for name in types.keys() & found.keys():
        typed(found, name, *types[name])
