"""The progress of a copy, as ``tailrace run`` tells it."""

from __future__ import annotations

import json
from typing import Any

from tailrace.cli.copy_progress import CopyWatch


def offset(*collections: tuple[int, int, str | None]) -> str:
    copies: list[dict[str, Any]] = [
        {"documents": documents, "estimate": estimate, "outcome": outcome}
        for documents, estimate, outcome in collections
    ]
    return json.dumps({"snapshot": {"state": {"collections": copies}}})


def test_it_is_told_when_it_grows_with_the_time_that_is_left() -> None:
    now = 0.0
    watch = CopyWatch(lambda: now)
    told = [str(watch.look(offset((0, 400, None), (0, 100, None))))]
    now = 10.0
    told.append(str(watch.look(offset((200, 400, None), (0, 100, None)))))
    told.append(str(watch.look(offset((200, 400, None), (0, 100, None)))))
    told.append(str(watch.look(offset((390, 400, "copied"), (0, 100, None)))))
    assert told == [
        "copied 0 of about 500 documents",
        "copied 200 of about 500 documents, about 15 s left",
        "None",
        "copied 390 of about 490 documents, about 3 s left",
    ]


def test_a_stream_that_copies_nothing_has_no_such_progress() -> None:
    watch = CopyWatch()
    for other in ("{}", "no JSON", json.dumps({"clusterTime": {"t": 1, "i": 1}}), None):
        assert watch.look(other) is None
