"""MongoDB change events as a Spark data source: ``spark.readStream.format("tailrace")``.

Heavy imports happen when a name is used: Spark imports this package in each of its Python processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.spark.runtime.session import local_session, register

__all__ = ["local_session", "register"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tailrace.spark.runtime import session  # noqa: PLC0415

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
