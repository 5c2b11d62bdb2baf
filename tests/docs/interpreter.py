"""A process that runs the Python and SQL of pages: requests and answers are lines of JSON on standard input and output.

One for the whole run, so that all pages share one Spark session and none changes the tests' own process. A block that
loops over a stream or waits for a query runs until it has printed something, and is then interrupted as by Ctrl-C.

    python -m tests.docs.interpreter SOCKET

At the socket it is asked for ``tailrace run``, which it carries out in that session (``session_server.py``).
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.docs.session_server import carry_out_next, listening

#: What a block contains that does not end by itself.
ENDLESS = ("for event in ", "awaitTermination()")
_AFTER_OUTPUT_S = 0.7
_LIMIT_S = 300.0
#: How long a block may take to end after an interrupt; on a busy machine a query takes long to stop.
_ENDS_WITHIN_S = 90.0


def _query_has_worked(names: dict[str, Any]) -> bool:
    query = names.get("query")
    return query is not None and any(progress["numInputRows"] for progress in query.recentProgress)


def _interrupt(code: str, names: dict[str, Any], out: StringIO, done: threading.Event, lost: list[str]) -> None:
    endless = any(words in code for words in ENDLESS)
    began, seen = time.monotonic(), None
    while not done.wait(0.1):
        now = time.monotonic()
        if endless and seen is None and (out.getvalue() or ("awaitTermination" in code and _query_has_worked(names))):
            seen = now
        if now - began > _LIMIT_S or (seen is not None and now - seen > _AFTER_OUTPUT_S):
            os.kill(os.getpid(), signal.SIGINT)
            break
    while not done.wait(_ENDS_WITHIN_S):
        # A lost interrupt should be reported as a fault, instead of leaving a page to hang for 15 minutes.
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            lost.append(stacks.read())
        os.kill(os.getpid(), signal.SIGINT)


def run_python(code: str, names: dict[str, Any], where: str) -> str:
    """What the block prints."""
    out, done, lost = StringIO(), threading.Event(), list[str]()
    threading.Thread(target=_interrupt, args=(code, names, out, done, lost), daemon=True).start()
    try:
        with redirect_stdout(out):
            exec(compile(code, where, "exec"), names)
    except KeyboardInterrupt:
        if not any(words in code for words in ENDLESS):
            raise TimeoutError(f"not done after {_LIMIT_S} s, and it printed:\n{out.getvalue()}") from None
    finally:
        done.set()
        _stop_queries(names)
    if lost:
        raise AssertionError(f"it went on for {_ENDS_WITHIN_S:.0f} s after an interrupt, here:\n{lost[0]}")
    return out.getvalue()


def _stop_queries(names: dict[str, Any]) -> None:
    """Stop what the page has started. The page's own session is asked: once a wait was interrupted, PySpark talks to
    another thread of Java, which knows of no active session. Queries went on after their page had ended, and one of
    them disturbed the ``tailrace run`` of the next page."""
    if "pyspark" not in sys.modules:
        return
    from pyspark.sql import SparkSession

    for session in [value for value in names.values() if isinstance(value, SparkSession)]:
        for query in session.streams.active:
            query.stop()
        assert not session.streams.active, "a query goes on"


def run_sql(code: str) -> str:
    """The rows of each statement, by DuckDB. A column that is NULL in every row is a query that does not work."""
    import duckdb

    shown = []
    for statement in filter(None, (part.strip() for part in code.split(";"))):
        result = duckdb.sql(statement)
        rows = result.fetchall()
        if not rows:
            raise AssertionError(f"no rows: {statement}")
        for index, column in enumerate(result.columns):
            if all(row[index] is None for row in rows):
                raise AssertionError(f"{column} is NULL in every one of {len(rows)} rows: {statement}")
        shown.append(f"{len(rows)} rows")
    return "\n".join(shown)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the JVM prints must not come between the answers
    namespaces: dict[str, dict[str, Any]] = {}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server = listening(Path(sys.argv[1]))
    while True:
        # A request comes when the one before it has its answer: nothing waits in the buffer of the standard input.
        ready, _, _ = select.select([sys.stdin, server], [], [])
        if server in ready:
            carry_out_next(server)
            continue
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        os.chdir(request["directory"])
        os.environ.update(request["environment"])
        answer = {"error": "", "output": ""}
        try:
            if request["language"] == "sql":
                answer["output"] = run_sql(request["code"])
            else:
                names = namespaces.setdefault(request["page"], {"__name__": "__main__"})
                answer["output"] = run_python(request["code"], names, request["where"])
        except BaseException:  # noqa: BLE001  whatever a page does is the answer
            answer["error"] = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
