"""Threads whose end is noticed, and those of the commands that do their work in one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from bson.errors import InvalidBSON

from tailrace.base.threads import CheckedThread, told
from tailrace.cli import run_archive, run_tables
from tailrace.cli.main import main
from tailrace.errors import InternalError, SourceError, TailraceError
from tailrace.read.archive.recorder import ArchivePolicy, Recorder


def broken() -> None:
    raise InvalidBSON("'utf-8' codec can't decode byte 0xff")


def test_what_ends_a_thread_is_told_and_raised() -> None:
    heard: list[TailraceError] = []
    thread = CheckedThread(broken, "tailrace-test", failed=heard.append)
    thread.start()
    with pytest.raises(InternalError, match="InvalidBSON in tailrace-test: 'utf-8' codec") as raised:
        thread.check()
    assert heard == [raised.value]
    assert isinstance(raised.value.__cause__, InvalidBSON)
    whole = CheckedThread(lambda: None, "tailrace-test")
    whole.start()
    whole.check()


def test_where_nobody_waits_the_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        thread = CheckedThread(broken, "tailrace-test")
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            told(pool.submit(broken), "a read could not be closed")
    assert [record.getMessage() for record in caplog.records] == [
        "the thread tailrace-test has failed: InvalidBSON in tailrace-test: 'utf-8' codec can't decode byte 0xff",
        "a read could not be closed: InvalidBSON: 'utf-8' codec can't decode byte 0xff",
    ]


class Writer:
    """In place of ``TablesWriter``: it ends with an error."""

    error: BaseException

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def run(self) -> None:
        raise self.error

    run_to_present = run

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(SourceError("gone"), SourceError), (InvalidBSON("odd"), InternalError), (SystemExit(3), InternalError)],
)
def test_whatever_ends_the_tables_of_a_run_ends_the_run(
    once: bool, error: BaseException, kind: type[TailraceError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only errors of our own classes were passed on, and no other had been tried: the run went on without its tables,
    and ended with exit status 0."""
    monkeypatch.setattr("tailrace.lake.tables.writer.TablesWriter", Writer)
    monkeypatch.setattr(Writer, "error", error, raising=False)
    stop = threading.Event()
    settings: Any = object()
    with pytest.raises(kind), run_tables.tabling("mongodb://h", settings, stop, once=once):
        assert stop.wait(60)


def test_whatever_ends_the_archive_of_a_run_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_archive, "open_client", lambda uri: type("Client", (), {"close": lambda self: None})())
    monkeypatch.setattr(run_archive.Cluster, "discover", lambda *_: None)
    monkeypatch.setattr(run_archive.Recorder, "run", lambda self: broken())
    stop = threading.Event()
    settings: Any = type("Settings", (), {"images": True, "keep_seconds": None, "keep_bytes": None, "path": Path("a")})
    with (
        pytest.raises(InternalError, match="InvalidBSON in tailrace-archive"),
        run_archive.archiving("mongodb://h", settings, stop, once=False),
    ):
        assert stop.wait(60)


def test_whatever_ends_one_oplogs_writer_ends_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread counted as finished: ``tailrace archive --once`` ended with exit status 0."""
    client: Any = object()
    recorder = Recorder(client, None, tmp_path, ArchivePolicy(once=True))

    def begin(self: Recorder) -> Any:
        self._start("rs0", client, None, None)

    monkeypatch.setattr(Recorder, "_begin", begin)
    monkeypatch.setattr(Recorder, "_note_version", lambda self, description: description)
    monkeypatch.setattr("tailrace.read.archive.recorder.MongodSource", lambda client: client)
    monkeypatch.setattr("tailrace.read.archive.recorder.OplogWriter", FailingOplogWriter)
    with pytest.raises(InternalError, match="InvalidBSON in tailrace-archive-rs0"):
        recorder.run()


class FailingOplogWriter:
    reads_images = False
    written = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def run(self) -> None:
        broken()

    def stop(self) -> None:
        pass


def forgotten(work: Callable[[], None]) -> int:
    thread = threading.Thread(target=work, name="forgotten")
    thread.start()
    thread.join()
    return 0


def fail_in_ours() -> None:
    from tailrace.core import raw_bson

    raw_bson.read_int32(b"", 0)


def test_a_thread_that_dies_unseen_decides_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last resort: a traceback on standard error was the only sign of it."""
    monkeypatch.setattr("tailrace.cli.watch.run", lambda args: forgotten(fail_in_ours))
    assert main(["watch", "mongodb://host"]) == 1
    said = capsys.readouterr().err
    assert "the thread forgotten was ended by error: " in said
    assert "This is a bug in tailrace" in said
    assert "Traceback" not in said
    # The failure of another library's thread is reported, but what it was for is not ours to judge.
    monkeypatch.setattr("tailrace.cli.watch.run", lambda args: forgotten(broken))
    assert main(["watch", "mongodb://host"]) == 0
    assert "the thread forgotten was ended by InvalidBSON" in capsys.readouterr().err
