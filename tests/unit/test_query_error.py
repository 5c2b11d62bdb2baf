"""What Spark says, in one sentence."""

from __future__ import annotations

import pytest

from tailrace.durable import LakeFullError
from tailrace.errors import ChangeStreamHistoryLost, InvalidResumeToken, SinkError, TailraceError, UsageError
from tailrace.spark.lake.failure import query_error

TRACE = """[STREAM_FAILED] Query [id = 1] terminated with exception: [PYTHON_EXCEPTION]
Traceback (most recent call last):
  File "sink.py", line 68, in write
    return message
{error}
 SQLSTATE: 38000
=== Streaming Query ===
"""


@pytest.mark.parametrize(
    "error",
    [
        ChangeStreamHistoryLost("the point is gone", hint="start anew"),
        InvalidResumeToken("bad token"),
        UsageError("the option 'x' is wrong"),
        LakeFullError("no room left to write /lake", hint="make room"),
    ],
)
def test_an_error_of_ours_is_found_inside_sparks_pages(error: TailraceError) -> None:
    kind = type(error)
    found = query_error(RuntimeError(TRACE.format(error=f"{kind.__module__}.{kind.__name__}: {error}")))
    assert str(found) == str(error)
    assert found.code == error.code
    assert isinstance(found, kind if kind.__module__ == "tailrace.errors" else SinkError)


def test_an_error_of_ours_is_kept_as_it_is() -> None:
    error = UsageError("no")
    assert query_error(error) is error


def test_a_full_disk_under_the_checkpoint_is_recognised() -> None:
    found = query_error(RuntimeError("java.io.IOException: No space left on device\n\tat java.base"))
    assert "no room left to write the checkpoint" in str(found)


def test_a_foreign_error_is_named_without_its_stack() -> None:
    found = query_error(RuntimeError(TRACE.format(error="pymongo.errors.OperationFailure: not allowed")))
    assert str(found) == "Spark stopped: OperationFailure: not allowed"
    assert str(query_error(RuntimeError("first line\n\tat second"))) == "Spark stopped: first line"
    assert str(query_error(RuntimeError())) == "Spark stopped: RuntimeError"
