"""The events of a block as the documents that a stream gives: raw ones as slices, others decoded one at a time.

``next()`` on a stream must cost well under a microsecond where an event has already arrived, so it takes from one of
Python's own plain iterators: a list of raw documents that were made together, or a ``map`` that calls PyMongo's
decoder. How far it has come is asked of the iterator, not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from operator import length_hint
from typing import Any, Final, NamedTuple

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core.event.event_block import EventBlock

#: How many events, and about how many bytes of them, are cut out of a block at a time; one event at least.
_CHUNK_EVENTS: Final = 256
_CHUNK_BYTES: Final = 1 << 18


_run_through: Final = deque[None](maxlen=0).extend


class _Cut(NamedTuple):
    """Events that were cut out of the block: up to ``end``, as ``documents``, which takes them from ``source``."""

    end: int
    source: Iterator[Any]
    documents: Iterator[Any]


class BlockEvents:
    """One block's events from the first one on, a few at a time."""

    def __init__(self, block: EventBlock, codec_options: CodecOptions[Any]) -> None:
        self._block = block
        self._options = codec_options
        self._is_raw = codec_options.document_class is RawBSONDocument and _set_raw is not None
        # Replaced as a whole, so that an interrupt loses no event.
        self._cut = _Cut(0, iter(()), iter(()))

    @property
    def left(self) -> int:
        """How many events were not given yet."""
        return len(self._block) - self._cut.end + length_hint(self._cut.source)

    @property
    def token(self) -> bytes | None:
        """The resume token of the last event given; ``None`` where none was, or where it has none."""
        given = self._cut.end - length_hint(self._cut.source)
        return (self._block.token(given - 1) or None) if given else None

    def documents(self) -> Iterator[Any]:
        """The next few documents: those that were made and not taken yet, or else further ones. Taking one raises the
        decoder's error where it cannot be decoded, and the next one comes after it."""
        if not length_hint(self._cut.source) and self._cut.end < len(self._block):
            self._cut = self._next_cut(self._cut.end)
        return self._cut.documents

    def _next_cut(self, first: int) -> _Cut:
        block = self._block
        places = block.offsets[first : first + _CHUNK_EVENTS + 1]
        start = int(places[0])
        count = max(1, int(places.searchsorted(start + _CHUNK_BYTES, "right")) - 1)
        places = places[: count + 1]
        data = block.buffer[start : int(places[-1])].tobytes()
        events = [data[begin:end] for begin, end in pairwise((places - start).tolist())]
        if self._is_raw:
            made = iter(_raw_documents(events, self._options))
            return _Cut(first + count, made, made)
        source = iter(events)
        return _Cut(first + count, source, map(_decode, source, repeat(self._options)))


def _raw_documents(events: list[bytes], options: CodecOptions[Any]) -> list[RawBSONDocument]:
    """``RawBSONDocument(event, options)`` of each, but for the check that it is one document: our stages made it.

    The constructor takes 0.9 µs, which is more than all that the event has cost until then.
    """
    documents = list(map(_new, repeat(RawBSONDocument, len(events))))
    _run_through(map(_set_raw, documents, events))
    _run_through(map(_set_inflated, documents, repeat(None)))
    _run_through(map(_set_options, documents, repeat(options)))
    return documents


def _setter(name: str) -> Any:
    """Sets a slot of a RawBSONDocument; ``None`` where this PyMongo's has no such slot."""
    return getattr(vars(RawBSONDocument).get(f"_RawBSONDocument__{name}"), "__set__", None)


_new: Final = RawBSONDocument.__new__
_set_raw: Any = _setter("raw")
_set_inflated: Any = _setter("inflated_doc")
_set_options: Any = _setter("codec_options")
if RawBSONDocument.__slots__ != ("__codec_options", "__inflated_doc", "__raw"):
    _set_raw = None  # another PyMongo: its constructor knows what belongs in a document

#: ``bson.decode`` without its look at the options, which are good.
_decode: Callable[[bytes, CodecOptions[Any]], Any] = getattr(bson, "_bson_to_dict", bson.decode)
