"""Finds the namespace and the time of a write's entry, or all its fields, in one step if its layout is the usual one.

At the end of an oplog most entries come alone, and each is asked for these. The result is what a walk over the elements
finds; ``None`` means that a walk is needed.
"""

from __future__ import annotations

import re
import struct
from typing import Final

#: The length; a session and the number of a retryable write; the operation; the namespace. An id of a session and a
#: digest of its user have one size, so all of it is one pattern.
_TO_NAMESPACE: Final = (
    rb"(?s).{4}(?:\x03lsid\x00\x48\x00\x00\x00.{68}\x12txnNumber\x00.{8})?"
    rb"\x02op\x00\x02\x00\x00\x00[idu]\x00\x02ns\x00(.{4})([^\x00]*)\x00"
)
_NAMESPACE: Final = re.compile(_TO_NAMESPACE)
_TO_DOCUMENT: Final = re.compile(_TO_NAMESPACE + rb"\x05ui\x00\x10\x00\x00\x00\x04.{16}\x03o\x00")
_TIME: Final = re.compile(rb"(?s)(?:\x10stmtId\x00.{4})?\x11ts\x00(.{8})")
_KEY: Final = b"\x03o2\x00"
#: All fields before the document, and all after the documents, as 6.0, 5.0 and 4.4 write them. An op time has a fixed
#: size.
_HEAD_FIELDS: Final = re.compile(
    rb"(?s).{4}(?:\x03lsid\x00(\x48\x00\x00\x00.{68})\x12txnNumber\x00(.{8}))?"
    rb"\x02op\x00(\x02\x00\x00\x00[idu]\x00)\x02ns\x00(.{4}[^\x00]*\x00)\x05ui\x00(\x10\x00\x00\x00\x04.{16})\x03o\x00"
)
_TAIL_FIELDS: Final = re.compile(
    rb"(?s)(?:\x10stmtId\x00.{4})?\x11ts\x00(.{8})\x12t\x00.{8}(?:\x12v\x00.{8})?\x09wall\x00(.{8})(?:\x12v\x00.{8})?"
    rb"(?:\x10stmtId\x00.{4})?(?:\x03prevOpTime\x00(\x1c\x00\x00\x00.{24}))?\x00\Z"
)
_SIZE: Final = struct.Struct("<i")


def namespace_of_write(raw: bytes, start: int = 0) -> bytes | None:
    """The namespace of the insert, update or delete at ``start``."""
    match = _NAMESPACE.match(raw, start)
    if match is None:
        return None
    size, name = match.groups()
    return name if _SIZE.unpack(size)[0] == len(name) + 1 and _ends_after(raw, start, match.end()) else None


def time_of_write(raw: bytes, start: int = 0) -> bytes | None:
    """The eight bytes of ``ts`` of the insert, update or delete at ``start``."""
    match = _TO_DOCUMENT.match(raw, start)
    if match is None:
        return None
    size, name = match.groups()
    at = match.end()
    if _SIZE.unpack(size)[0] != len(name) + 1 or (at := _past(raw, at)) < 0:
        return None
    if raw.startswith(_KEY, at) and (at := _past(raw, at + len(_KEY))) < 0:
        return None
    time = _TIME.match(raw, at)
    return time[1] if time is not None and _ends_after(raw, start, time.end()) else None


def fields_of_write(raw: bytes) -> dict[bytes, bytes] | None:
    """The values of those fields of an insert, update or delete that the stages read, by name. ``None``: a walk is
    needed."""
    head = _HEAD_FIELDS.match(raw)
    if head is None or _SIZE.unpack_from(raw)[0] != len(raw):
        return None
    session, number, operation, namespace, uuid = head.groups()
    at = head.end()
    end = _past(raw, at)
    if end < 0 or _SIZE.unpack_from(namespace)[0] != len(namespace) - 4:
        return None
    found = {b"op": operation, b"ns": namespace, b"ui": uuid, b"o": raw[at:end]}
    if raw.startswith(_KEY, end):
        at = end + len(_KEY)
        end = _past(raw, at)
        if end < 0:
            return None
        found[b"o2"] = raw[at:end]
    tail = _TAIL_FIELDS.match(raw, end)
    if tail is None:
        return None
    found[b"ts"], found[b"wall"], previous = tail.groups()
    if session is not None:
        found[b"lsid"], found[b"txnNumber"] = session, number
    if previous is not None:
        found[b"prevOpTime"] = previous
    return found


def _past(raw: bytes, start: int) -> int:
    """Where the document at ``start`` ends; -1 if that is nowhere."""
    if start + 4 > len(raw):
        return -1
    size: int = _SIZE.unpack_from(raw, start)[0]
    return start + size if size >= 5 else -1


def _ends_after(raw: bytes, start: int, at: int) -> bool:
    """Whether the document at ``start`` is whole, and reaches beyond ``at``."""
    end: int = start + _SIZE.unpack_from(raw, start)[0]
    return at < end <= len(raw) and not raw[end - 1]
