"""One Spark session for all Spark tests: starting one costs more than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tailrace.spark import local_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = local_session("tailrace-tests", cores=2, fast_start=True)
    session.sparkContext.setLogLevel("OFF")  # streams that are meant to fail would print their stacks
    yield session
    session.stop()
