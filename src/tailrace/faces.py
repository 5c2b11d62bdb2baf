"""What users import stays where it is while the rooms behind it move: a face names what is public, and loads each name
from its room when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(face: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` (PEP 562). ``homes``: for each public name of ``face``, the module that has it."""

    def public(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {face!r} has no attribute {name!r}")

    return public
