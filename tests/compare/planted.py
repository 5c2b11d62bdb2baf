"""Faults that a comparison must find: one side's stream with one event altered, moved, lost or repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.watch.compare.reading import EventStream, Opener

Event = dict[str, Any]
_CODEC: CodecOptions[Event] = CodecOptions(document_class=dict)


class AlteredStream:
    """A stream whose events go through ``alter``, which returns what takes an event's place."""

    def __init__(self, stream: EventStream, alter: Callable[[bytes], Iterator[bytes]]) -> None:
        self._stream = stream
        self._alter = alter
        self._waiting: deque[bytes] = deque()

    @property
    def alive(self) -> bool:
        return bool(self._waiting) or self._stream.alive

    @property
    def has_next(self) -> bool:
        return bool(self._waiting) or self._stream.has_next

    @property
    def resume_token(self) -> Any:
        return self._stream.resume_token

    @property
    def statistics(self) -> Any:
        return self._stream.statistics

    def try_next(self) -> Any:
        if not self._waiting:
            event = self._stream.try_next()
            if event is None:
                return None
            self._waiting.extend(self._alter(bytes(event.raw)))
            if not self._waiting:
                return self.try_next()
        return RawBSONDocument(self._waiting.popleft())

    def close(self) -> None:
        self._waiting.clear()
        self._stream.close()


def altered(opener: Opener, alter: Callable[[bytes], Iterator[bytes]]) -> Opener:
    """The same side with altered events."""

    def opened(start: Mapping[str, Any]) -> EventStream:
        return AlteredStream(opener(start), alter)

    return opened


def _changed(operation: str, change: Callable[[Event], None]) -> Callable[[bytes], Iterator[bytes]]:
    def alter(raw: bytes) -> Iterator[bytes]:
        event = bson.decode(raw, _CODEC)
        if event["operationType"] == operation:
            change(event)
            assert bson.encode(event) != raw
            yield bson.encode(event)
        else:
            yield raw

    return alter


def _in_document(event: Event) -> None:
    event["fullDocument"]["n"] += 1


def _in_description(event: Event) -> None:
    event["updateDescription"]["updatedFields"]["n"] += 1


def _in_key(event: Event) -> None:
    event["documentKey"]["_id"] = "another"


def _in_namespace(event: Event) -> None:
    event["ns"]["db"] += "x"


def _in_target(event: Event) -> None:
    event["to"]["coll"] += "x"


def _in_definition(event: Event) -> None:
    event["operationDescription"]["idIndex"]["v"] = 3


def _in_time(event: Event) -> None:
    event["clusterTime"] = event["clusterTime"].__class__(event["clusterTime"].time, event["clusterTime"].inc + 1)


def _in_token(event: Event) -> None:
    data = event["_id"]["_data"]
    place = data.index("5A1004") + 6  # the first digit of the collection's UUID
    event["_id"]["_data"] = data[:place] + ("0" if data[place] != "0" else "1") + data[place + 1 :]


def _lost(raw: bytes) -> Iterator[bytes]:
    if bson.decode(raw, _CODEC)["operationType"] != "update":
        yield raw


def _twice(raw: bytes) -> Iterator[bytes]:
    yield raw
    if bson.decode(raw, _CODEC)["operationType"] == "update":
        yield raw


class _Swapped:
    """The update after the event that comes after it."""

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def __call__(self, raw: bytes) -> Iterator[bytes]:
        if bson.decode(raw, _CODEC)["operationType"] == "update":
            self._held.append(raw)
            return
        yield raw
        yield from self._held
        self._held.clear()


#: By name: a function that makes an alteration, and the kind, operation and place of the difference that must be found.
FAULTS: dict[str, tuple[Callable[[], Callable[[bytes], Iterator[bytes]]], tuple[str, str, str]]] = {
    "insert": (lambda: _changed("insert", _in_document), ("bytes", "insert", "fullDocument")),
    "update": (lambda: _changed("update", _in_description), ("bytes", "update", "updateDescription.updatedFields")),
    "replace": (lambda: _changed("replace", _in_document), ("bytes", "replace", "fullDocument")),
    "delete": (lambda: _changed("delete", _in_key), ("bytes", "delete", "documentKey")),
    "drop": (lambda: _changed("drop", _in_namespace), ("bytes", "drop", "ns")),
    "rename": (lambda: _changed("rename", _in_target), ("bytes", "rename", "to")),
    "dropDatabase": (lambda: _changed("dropDatabase", _in_namespace), ("bytes", "dropDatabase", "ns")),
    "invalidate": (lambda: _changed("invalidate", _in_time), ("bytes", "invalidate", "clusterTime")),
    "create": (lambda: _changed("create", _in_definition), ("bytes", "create", "operationDescription")),
    "a token": (lambda: _changed("update", _in_token), ("token", "update", "")),
    "an order": (_Swapped, ("order", "replace", "")),
    "lost": (lambda: _lost, ("missing", "update", "")),
    "twice": (lambda: _twice, ("twice", "update", "")),
}
#: The same for servers that show no definitions of collections.
BEFORE_6 = tuple(name for name in FAULTS if name != "create")
