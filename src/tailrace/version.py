"""Which version of Tailrace this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """The installed package's version; "0" where it is not installed, as with ``spark-submit --py-files``."""
    try:
        return installed_version("tailrace")
    except PackageNotFoundError:
        return "0"
