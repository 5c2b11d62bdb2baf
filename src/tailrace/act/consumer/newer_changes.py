"""Has a dead letter's document changed since? For handlers that write without a fence, which would undo it silently."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final

import bson
from bson.raw_bson import RawBSONDocument

from tailrace.act.consumer.dead_letters import DeadLetter
from tailrace.act.consumer.snapshots import oldest_reachable
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost, TailraceError
from tailrace.watch.client.change_stream import ChangeStream
from tailrace.watch.client.client import Client, operation_time
from tailrace.watch.client.patience import try_next_patiently

_AWAIT_MS: Final = 100
_CANNOT_TELL: Final = "it is not known whether its document has changed since: "

#: Namespace and ``_id`` of a document, as BSON.
_NamedId = tuple[bytes, bytes]


class NewerChanges:
    """Looks through the deployment's changes since the oldest of ``letters``, once, and goes on at each question.

    ``client``  of ``tailrace.connect()``: the deployment that the changes came from
    ``dead``    gives the message ids of all letters of a resource: what was not handled either is no newer state
    """

    def __init__(
        self,
        client: Client[Any],
        letters: Iterable[DeadLetter],
        dead: Callable[[str], Collection[str]] = lambda resource: (),
    ) -> None:
        self._client = client
        self._dead = dead
        self._oldest = oldest_reachable(client)
        #: Type and value of the ``_id`` of every document that is searched for, and the time of the first of the
        #: letters.
        self._identities: set[bytes] = set()
        self._begin: ClusterTime | None = None
        for letter in letters:
            document = _document_of(letter.raw)
            if document is not None and self._is_reachable(letter):
                self._identities.add(document[1])
                self._begin = min(self._begin or letter.cluster_time, letter.cluster_time)
        #: The tokens of the changes of each document, and what they are, in their order.
        self._found: dict[_NamedId, list[tuple[str, str]]] = {}
        self._stream: ChangeStream | None = None
        self._failure: TailraceError | None = None

    def __enter__(self) -> NewerChanges:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            with suppress(TailraceError):
                self._stream.close()

    def since(self, letter: DeadLetter) -> str | None:
        """In words, how its document has changed since, or why that cannot be known; ``None``: it has not, or the
        change is not one of a single document. Asked again, it looks on from where it was."""
        if not letter.raw:
            return f"{_CANNOT_TELL}its event was too large to be kept"
        document = _document_of(letter.raw)
        if document is None:
            return None
        if not self._is_reachable(letter):
            return f"{_CANNOT_TELL}the oplog no longer reaches back to it"
        if self._failure is None:
            try:
                self._catch_up()
            except ChangeStreamHistoryLost as error:
                self._failure = error
        if self._failure is not None:
            return f"{_CANNOT_TELL}{self._failure.message}"
        dead = self._dead(letter.whole_resource)
        mine = str(letter.token["_data"])
        newer = [(token, kind) for token, kind in self._found.get(document, ()) if token > mine and token not in dead]
        if not newer:
            return None
        token, kind = newer[-1]
        return f"its document has changed since: {kind} at {ClusterTime(int(token[2:18], 16))}"

    def _is_reachable(self, letter: DeadLetter) -> bool:
        return self._oldest is None or letter.cluster_time >= self._oldest

    def _catch_up(self) -> None:
        """Read up to the present."""
        until = operation_time(self._client)
        stream = self._stream = self._stream or self._opened()
        while True:
            event = try_next_patiently(stream)
            if event is not None:
                self._note(raw_bson.bytes_of(event))
                continue
            token = stream.resume_token
            if token is not None and ClusterTime(int(str(token["_data"])[2:18], 16)) >= until:
                return

    def _opened(self) -> ChangeStream:
        # As bytes: a key may hold text that is not UTF-8.
        values = b"".join(
            raw_bson.encode_element(kind[0], str(number).encode(), kind[1:])
            for number, kind in enumerate(sorted(self._identities))
        )
        wanted = raw_bson.encode_document(
            raw_bson.encode_element(raw_bson.ARRAY, b"$in", raw_bson.encode_document(values))
        )
        match = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"documentKey._id", wanted))
        stage = raw_bson.encode_document(raw_bson.encode_element(raw_bson.OBJECT, b"$match", match))
        begin = ClusterTime(0) if self._begin is None else self._begin
        stream: ChangeStream = self._client.watch(
            [RawBSONDocument(stage)],
            start_at_operation_time=begin.to_timestamp(),
            max_await_time_ms=_AWAIT_MS,
            document_class=RawBSONDocument,
        )
        return stream

    def _note(self, event: bytes) -> None:
        document = _document_of(event)
        if document is not None:
            token = bson.decode(raw_bson.value(event, _element(event, b"_id")))
            kind = raw_bson.value(event, _element(event, b"operationType"))[4:-1].decode()
            self._found.setdefault(document, []).append((str(token["_data"]), kind))


def _element(document: bytes, name: bytes) -> raw_bson.Element:
    element = raw_bson.find(document, name)
    if element is None:
        raise TailraceError(f"an event without {name.decode()}")
    return element


def _document_of(event: bytes) -> _NamedId | None:
    """Which document an event is of: namespace, and type and value of its ``_id``."""
    key, namespace = (raw_bson.find(event, name) if event else None for name in (b"documentKey", b"ns"))
    if key is None or namespace is None or key.type != raw_bson.OBJECT:
        return None
    fields = raw_bson.value(event, key)
    identity = raw_bson.find(fields, b"_id")
    if identity is None:
        return None
    return raw_bson.value(event, namespace), bytes([identity.type]) + raw_bson.value(fields, identity)
