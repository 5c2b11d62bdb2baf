"""Replies as the server writes them, field by field. ``$clusterTime`` and ``operationTime``, which follow, belong to
the connection and are added by the sender of the reply."""

from __future__ import annotations

from typing import Final

from tailrace.core.cursor.reply_events import ReplyEvents
from tailrace.core.raw_bson import (
    ARRAY,
    BOOL,
    DOUBLE,
    INT32,
    INT64,
    OBJECT,
    STRING,
    encode_document,
    encode_element,
    encode_int32,
    encode_int64,
    encode_string,
)
from tailrace.errors import (
    NON_RESUMABLE_LABEL,
    RESUMABLE_LABEL,
    SourceError,
    TailraceError,
    UsageError,
    code_name,
)

_OK: Final = encode_element(DOUBLE, b"ok", b"\x00\x00\x00\x00\x00\x00\xf0\x3f")
_NOT_OK: Final = encode_element(DOUBLE, b"ok", bytes(8))
_INVALIDATED: Final = encode_element(BOOL, b"invalidated", b"\x01")

#: Codes of an aggregate or an open cursor that tell the client to resume (semantics 6.2, measured on 6.0.27).
RESUMABLE_CODES: Final = frozenset(
    {6, 7, 63, 89, 91, 133, 134, 150, 189, 234, 262, 384, 9001, 10107, 11600, 11602, 13435, 13436}
)
#: Of these, the ones that tell nothing to clients of 5.0 and 4.4.
_SINCE_6: Final = frozenset({134, 384})
#: The one that tells nothing to clients of 7.0.
_UNTIL_6: Final = frozenset({63})
#: Names that 5.0 and 4.4 give to codes.
_OLD_NAMES: Final = {63: "StaleShardVersion", 40414: "Location40414", 40415: "Location40415"}
_NON_RESUMABLE_CODES: Final = frozenset({280, 286})
_HOST_UNREACHABLE: Final = 6
_BAD_VALUE: Final = 2
_UNKNOWN_ERROR: Final = 8

IN_AGGREGATE: Final = "PlanExecutor error during aggregation :: caused by :: "
IN_GET_MORE: Final = "Executor error during getMore :: caused by :: "


def cursor_reply(
    reply: ReplyEvents, resume_token: bytes, *, cursor_id: int, namespace: str, invalidated: bool
) -> bytes:
    """``{cursor: {firstBatch|nextBatch, postBatchResumeToken[, invalidated], id, ns}, ok: 1.0}``."""
    cursor = encode_document(
        reply.to_element(),
        encode_element(OBJECT, b"postBatchResumeToken", resume_token),
        _INVALIDATED if invalidated else b"",
        encode_element(INT64, b"id", encode_int64(cursor_id)),
        encode_element(STRING, b"ns", encode_string(namespace)),
    )
    return encode_document(encode_element(OBJECT, b"cursor", cursor), _OK)


def kill_reply(killed: list[int], not_found: list[int]) -> bytes:
    """``{cursorsKilled, cursorsNotFound, cursorsAlive, cursorsUnknown, ok}``; the last two lists are always empty."""
    lists = {b"cursorsKilled": killed, b"cursorsNotFound": not_found, b"cursorsAlive": [], b"cursorsUnknown": []}
    return encode_document(*(encode_element(ARRAY, name, _longs(ids)) for name, ids in lists.items()), _OK)


def is_resumable(code: int | None, version: tuple[int, int] = (6, 0)) -> bool:
    """Whether a stream's error with this code tells clients of a server of ``version`` to resume."""
    others = _SINCE_6 if version < (6, 0) else _UNTIL_6 if version >= (7, 0) else ()
    return code in RESUMABLE_CODES and code not in others


def error_reply(error: TailraceError, *, prefix: str = "", in_stream: bool, version: tuple[int, int] = (6, 0)) -> bytes:
    """``{[errorLabels,] ok: 0.0, errmsg, code, codeName}``.

    ``prefix``     ``IN_AGGREGATE`` or ``IN_GET_MORE`` for an error of execution, before the message
    ``in_stream``  the command is a change stream's aggregate, or a getMore that has found its cursor
    ``version``    of the server: labels and names of codes depend on it
    """
    code = _code_of(error)
    labels = set(error.labels)
    if code in _NON_RESUMABLE_CODES:
        labels.add(NON_RESUMABLE_LABEL)
    if in_stream and is_resumable(code, version):
        labels.add(RESUMABLE_LABEL)
    name = code_name(code) if version >= (6, 0) else _OLD_NAMES.get(code, code_name(code))
    parts = [
        _NOT_OK,
        encode_element(STRING, b"errmsg", encode_string(prefix + error.message)),
        encode_element(INT32, b"code", encode_int32(code)),
        encode_element(STRING, b"codeName", encode_string(name)),
    ]
    if labels:
        texts = (encode_element(STRING, b"%d" % i, encode_string(text)) for i, text in enumerate(sorted(labels)))
        parts.insert(0, encode_element(ARRAY, b"errorLabels", encode_document(*texts)))
    return encode_document(*parts)


def _code_of(error: TailraceError) -> int:
    """The error's code; where the server has none for it, one that makes the client do the right thing."""
    if error.code is not None:
        return error.code
    if isinstance(error, SourceError):
        return _HOST_UNREACHABLE
    return _BAD_VALUE if isinstance(error, UsageError) else _UNKNOWN_ERROR


def _longs(ids: list[int]) -> bytes:
    return encode_document(*(encode_element(INT64, b"%d" % i, encode_int64(id_)) for i, id_ in enumerate(ids)))
