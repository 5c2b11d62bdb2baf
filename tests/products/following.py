"""Streams that a process writes down: event, and the token after it, in one file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import bson
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import RESUMABLE_LABEL, SinkError, SourceError
from tests.kills.children import EVENTS, NO_EVENT, pairs

_AWAIT_MS = 50
#: How often a read is repeated while the deployment has no primary.
_TRIES = 50
_T = TypeVar("_T")


def follow(uri: str, folder: Path, until: ClusterTime, said: dict[str, Any], **connection: Any) -> None:
    """Write each event of the deployment's stream and the token after it in one piece, beginning after the last one in
    the file, until the token has passed ``until``. ``said`` are the options of a new stream."""
    with keeping():
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / EVENTS
    known = pairs(path)
    if known:
        begins = ("start", "start_at_operation_time")
        said = {name: value for name, value in said.items() if name not in begins}
        said["resume_after"] = bson.decode(known[-1][1])
    with ExitStack() as stack:
        with keeping():
            # Without a buffer, which would try once more on closing to write what could not be written.
            out = stack.enter_context(path.open("ab", buffering=0))
        client = stack.enter_context(tailrace.connect(uri, **connection))
        out.truncate(sum(len(event) + len(token) for event, token in known))
        watch = partial(client.watch, document_class=RawBSONDocument, max_await_time_ms=_AWAIT_MS, **said)
        stream = stack.enter_context(_again(watch, lambda error: RESUMABLE_LABEL in error.labels))
        if not known:
            _write(out, NO_EVENT, stream.resume_token)
        while True:
            event = _again(stream.try_next, lambda _: stream.alive)
            if event is not None:
                _write(out, bytes(event.raw), stream.resume_token)
            elif _time(stream.resume_token) >= until:
                # If nothing happened, only the token has moved on.
                return


def _again(ask: Callable[[], _T], may_be: Callable[[SourceError], bool]) -> _T:
    """Asks as a careful consumer does, again during an election. (A stream resumes by itself once in each call, like
    those of MongoDB's drivers.)"""
    for _ in range(_TRIES):
        try:
            return ask()
        except SourceError as error:
            if not may_be(error):
                raise
        time.sleep(0.2)
    return ask()


@contextmanager
def keeping() -> Iterator[None]:
    """What the harness itself writes down in place of a consumer: if that cannot be written, it refuses to go on."""
    try:
        yield
    except OSError as error:
        raise SinkError(f"what was read cannot be kept: {error}") from error


def _write(out: FileIO, event: bytes, token: Any) -> None:
    pair = event + bson.encode(token)
    with keeping():
        if out.write(pair) != len(pair):
            raise OSError("the disk is full")


def _time(token: Any) -> ClusterTime:
    """There are none while a copy is running."""
    return ResumeToken.parse(token).cluster_time if isinstance(token.get("_data"), str) else ZERO


def followed(folder: Path) -> tuple[ClusterTime, list[bytes]]:
    """When a stream of changes that was written down began, and its events."""
    (_, token), *_ = pairs(folder / EVENTS)
    return ResumeToken.parse(token).cluster_time, events_in(folder)


def events_in(folder: Path) -> list[bytes]:
    """The events of a stream that was written down."""
    return [event for event, _ in pairs(folder / EVENTS)[1:]]


def damage_token(folder: Path, rng: random.Random) -> str:
    """Alter the last token that was written down, and return the result."""
    path = folder / EVENTS
    (_, raw), *_ = reversed(pairs(path))
    token = bson.decode(raw)
    name = rng.choice(sorted(token))
    value = token[name]
    if isinstance(value, str) and value:
        place = rng.randrange(len(value))
        damages = (
            value[:place],
            value[:place] + rng.choice("0123456789ABCDEFG") + value[place + 1 :],
            value[:place] + value[place + 2 :],
            value[: place // 2 * 2]
            + rng.choice(("FF", "1E", "46", "5A", "00", "3C", "6E"))
            + value[place // 2 * 2 + 2 :],
        )
        value = rng.choice(damages)
    else:
        value = rng.choice((None, 1, [], {}, b"", "82"))
    token = rng.choice(
        ({**token, name: value}, {**token, name: value}, {one: token[one] for one in token if one != name})
    )
    path.write_bytes(path.read_bytes()[: -len(raw)] + bson.encode(token))
    return str(token)[:120]
