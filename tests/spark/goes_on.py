"""A Spark session for one of our commands, which would end it, while others go on using it."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


class GoesOn:
    """A session that goes on when it is stopped."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def stop(self) -> None:
        pass
