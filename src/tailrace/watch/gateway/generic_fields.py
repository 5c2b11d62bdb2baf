"""Generic fields of a command: session, API version, cluster times, read preference, transaction. No I/O.

The server checks these before it looks at the command itself. The values that every driver sends are recognised here; a
command with other values is left to the server, or is sent to it first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.core.event.bson_text import spaced_document_text
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.raw_bson import (
    ARRAY,
    BINARY,
    BOOL,
    DECIMAL128,
    DOUBLE,
    INT32,
    INT64,
    NULL,
    OBJECT,
    STRING,
    TIMESTAMP,
    Element,
)

_NUMBERS: Final = (INT32, INT64, DOUBLE, DECIMAL128)
_API: Final = (b"apiVersion", b"apiStrict", b"apiDeprecationErrors")


def is_ordinary(document: bytes, version: tuple[int, int] = (6, 0)) -> bool:
    """Whether the generic fields of a command are valid for a server of ``version`` and make no difference here. Any
    other command is for the server, which checks such fields before it looks at the command itself."""
    api = set()
    for element in raw_bson.elements(document):
        name = element.name
        check = _GENERIC.get(name)
        if name in _SERVERS_OWN or (check is not None and not check(document, element)):
            return False
        if name.startswith(b"api"):
            api.add(name)
        if version < _SINCE.get(name, version):
            return False
        if version < (5, 0) and name in _NEVER_NULL and element.type == NULL:
            return False
        if name == b"aggregate" and element.type == DECIMAL128:
            return False  # no collection; 6.0 has words of its own for it
    return not api or b"apiVersion" in api


def are_known(document: bytes, options: bytes, version: tuple[int, int]) -> bool:
    """Whether a server of ``version`` knows the ``options`` of a ``$changeStream``; with ``apiStrict``, whether its API
    has them. If not, the server is to answer."""
    names = {element.name for element in raw_bson.elements(options)}
    strict = raw_bson.find(document, b"apiStrict")
    if strict is not None and raw_bson.value(document, strict) == b"\x01" and not names <= _OF_THE_API:
        return False
    return version >= (6, 0) or names <= _OLD_OPTIONS


def has_plain_session(document: bytes) -> bool:
    """Whether a command's session, if it has one, is one of the client's own."""
    lsid = raw_bson.find(document, b"lsid")
    return lsid is None or _is_session(document, lsid)


def is_plain_get_more(document: bytes, version: tuple[int, int]) -> bool:
    """Whether a getMore has no fields that a server of ``version`` might refuse, apart from its own fields' values."""
    if any(raw_bson.find(document, name) is not None for name in _RARE_IN_A_GET_MORE):
        return False
    named = raw_bson.find(document, b"collection")
    if named is not None and not _is_plain_name(document, named):
        return False
    size = raw_bson.find(document, b"batchSize") if version < (5, 0) else None
    if size is not None and not _is_plain_size(document, size, 1):
        return False  # 4.4 refuses 0, and what becomes 0
    return is_ordinary(document, version)


def has_plain_size(document: bytes, version: tuple[int, int]) -> bool:
    """Whether an aggregate's batch size is one that a server of ``version`` reads as the engine does: 4.4 reads null,
    NaN and large numbers in its own way."""
    cursor = raw_bson.find(document, b"cursor") if version < (5, 0) else None
    if cursor is None or cursor.type != OBJECT:
        return True
    size = raw_bson.find(document, b"batchSize", cursor.value_start)
    return size is None or _is_plain_size(document, size, 0)


def transaction_of(document: bytes) -> int | None:
    """The number of the transaction that a command is part of; ``None`` if it is part of none."""
    number = raw_bson.find(document, b"txnNumber")
    if number is None or number.type != INT64 or raw_bson.find(document, b"autocommit") is None:
        return None
    return raw_bson.read_int64(document, number.value_start)


def is_plain_kill(document: bytes, version: tuple[int, int]) -> bool:
    """Whether a killCursors has no fields that the server might refuse."""
    name, cursors = raw_bson.find(document, b"killCursors"), raw_bson.find(document, b"cursors")
    if name is None or not _is_plain_name(document, name) or cursors is None or cursors.type != ARRAY:
        return False
    if any(each.type != INT64 for each in raw_bson.elements(document, cursors.value_start)):
        return False
    names = {element.name for element in raw_bson.elements(document)}
    return names <= _OF_A_KILL and is_ordinary(document, version)


class Times(NamedTuple):
    """Cluster times of a command; 0 if there is none.

    ``after``    ``readConcern.afterClusterTime``: the command must see everything up to it
    ``cluster``  ``$clusterTime``: the newest that the client knows
    """

    after: ClusterTime
    cluster: ClusterTime


def times_of(document: bytes) -> Times:
    """The cluster times of a command whose generic fields are ordinary (``is_ordinary``)."""
    return Times(
        _time_in(document, b"readConcern", b"afterClusterTime"), _time_in(document, b"$clusterTime", b"clusterTime")
    )


def _time_in(document: bytes, outer: bytes, name: bytes) -> ClusterTime:
    element = raw_bson.find(document, outer)
    inner = (
        raw_bson.find(document, name, element.value_start) if element is not None and element.type == OBJECT else None
    )
    if inner is None or inner.type != TIMESTAMP:
        return ClusterTime(0)
    return ClusterTime.from_bytes_le(raw_bson.value(document, inner))


def api_text(document: bytes) -> str:
    """The API parameters of a command, as the server writes them."""
    found = (raw_bson.find(document, name) for name in _API)
    given = [document[each.start : each.end] for each in found if each is not None and each.type != NULL]
    return spaced_document_text(raw_bson.encode_document(*given)) if given else "{}"


def _is_session(document: bytes, element: Element) -> bool:
    """``{id: UUID}`` and nothing else. With ``uid`` a user can name other users' sessions, if the server allows it."""
    if element.type != OBJECT:
        return element.type == NULL
    inner = raw_bson.value(document, element)
    fields = list(raw_bson.elements(inner))
    return (
        len(fields) == 1
        and fields[0].name == b"id"
        and fields[0].type == BINARY
        and inner[fields[0].value_start : fields[0].value_start + 5] == _UUID_HEAD
    )


def _is_read_concern(document: bytes, element: Element) -> bool:
    if element.type != OBJECT:
        return False
    inner = raw_bson.value(document, element)
    return all(
        (each.name == b"level" and each.type == STRING)
        or (each.name == b"afterClusterTime" and each.type == TIMESTAMP and any(raw_bson.value(inner, each)))
        for each in raw_bson.elements(inner)
    )


def _is_read_preference(document: bytes, element: Element) -> bool:
    if element.type != OBJECT:
        return False
    inner = raw_bson.value(document, element)
    mode = raw_bson.find(inner, b"mode")
    if mode is None or mode.type != STRING:
        return False
    name = raw_bson.read_string(inner, mode.value_start)
    others = [each for each in raw_bson.elements(inner) if each.name != b"mode"]
    if name == b"primary" or name not in _MODES:
        return name == b"primary" and not others
    return all(
        (each.name == b"tags" and each.type == ARRAY)
        or (each.name == b"hedge" and each.type == OBJECT)
        or (each.name == b"maxStalenessSeconds" and _staleness(inner, each) >= _STALENESS_MIN)
        for each in others
    )


def _is_plain_name(document: bytes, element: Element) -> bool:
    """Whether it is a collection name that no server refuses."""
    if element.type != STRING:
        return False
    name = raw_bson.read_string(document, element.value_start)
    return bool(name) and name[:1] != b"." and b"\0" not in name


def _is_plain_size(document: bytes, element: Element, least: int) -> bool:
    if element.type == INT32:
        return raw_bson.read_int32(document, element.value_start) >= least
    if element.type == INT64:
        return raw_bson.read_int64(document, element.value_start) >= least
    if element.type != DOUBLE:
        return False
    (number,) = _DOUBLE.unpack_from(document, element.value_start)
    return bool(least <= number < _LARGE)  # false for NaN too


def _staleness(inner: bytes, element: Element) -> float:
    if element.type == INT32:
        return raw_bson.read_int32(inner, element.value_start)
    if element.type == INT64:
        return raw_bson.read_int64(inner, element.value_start)
    return 0


def _is_write_concern(document: bytes, element: Element) -> bool:
    if element.type != OBJECT:
        return False
    inner = raw_bson.value(document, element)
    fields = list(raw_bson.elements(inner))
    return bool(fields) and all(
        (each.name == b"w" and each.type in (INT32, INT64, STRING))
        or (each.name == b"j" and each.type == BOOL)
        or (each.name == b"wtimeout" and each.type in (INT32, INT64))
        for each in fields
    )


def _is_time(document: bytes, element: Element) -> bool:
    if element.type != OBJECT:
        return False
    names = {each.name for each in raw_bson.elements(raw_bson.value(document, element))}
    return names == {b"clusterTime", b"signature"}


def _is_api_version(document: bytes, element: Element) -> bool:
    return element.type == STRING and raw_bson.read_string(document, element.value_start) == b"1"


def _is_bool(document: bytes, element: Element) -> bool:
    return element.type == BOOL


def _is_flag(document: bytes, element: Element) -> bool:
    return element.type == BOOL or element.type in _NUMBERS


_DOUBLE: Final = struct.Struct("<d")
_LARGE: Final = 1 << 31
_UUID_HEAD: Final = b"\x10\x00\x00\x00\x04"
#: Seconds; the server refuses less.
_STALENESS_MIN: Final = 90
_MODES: Final = frozenset((b"primary", b"primaryPreferred", b"secondary", b"secondaryPreferred", b"nearest"))
_GENERIC: Final[dict[bytes, Callable[[bytes, Element], bool]]] = {
    b"$clusterTime": _is_time,
    b"$readPreference": _is_read_preference,
    b"apiDeprecationErrors": _is_bool,
    b"apiStrict": _is_bool,
    b"apiVersion": _is_api_version,
    b"bypassDocumentValidation": _is_flag,
    b"lsid": _is_session,
    b"readConcern": _is_read_concern,
    b"writeConcern": _is_write_concern,
}
_RARE_IN_A_GET_MORE: Final = (b"readConcern", b"writeConcern", b"term", b"lastKnownCommittedOpTime")
_OF_A_KILL: Final = frozenset((b"killCursors", b"cursors", b"$db", b"lsid", b"$clusterTime", b"$readPreference", *_API))
#: Fields that older servers do not know, and the first version that does.
_SINCE: Final[dict[bytes, tuple[int, int]]] = {
    b"apiVersion": (5, 0),
    b"let": (5, 0),
    b"$_generateV2ResumeTokens": (6, 0),
}
#: Fields of an aggregate that 4.4 refuses if they are null.
_NEVER_NULL: Final = frozenset((b"collation", b"exchange"))
#: The options of ``$changeStream`` that belong to version 1 of the API (6.0.27).
_OF_THE_API: Final = frozenset(
    (
        b"allChangesForCluster",
        b"fullDocument",
        b"fullDocumentBeforeChange",
        b"resumeAfter",
        b"startAfter",
        b"startAtOperationTime",
    )
)
#: The options that servers before 6.0 know, and the engine.
_OLD_OPTIONS: Final = frozenset(
    (
        b"allChangesForCluster",
        b"allowToRunOnConfigDB",
        b"allowToRunOnSystemNS",
        b"fullDocument",
        b"resumeAfter",
        b"showMigrationEvents",
        b"startAfter",
        b"startAtOperationTime",
    )
)
#: Fields of transactions, fields that servers send to each other, and fields that no change stream accepts.
_SERVERS_OWN: Final = frozenset(
    (
        b"$audit",
        b"$client",
        b"$configServerState",
        b"$configTime",
        b"$oplogQueryData",
        b"$queryOptions",
        b"$replData",
        b"$topologyTime",
        b"allowImplicitCollectionCreation",
        b"autocommit",
        b"clientOperationKey",
        b"collectionUUID",
        b"coordinator",
        b"databaseVersion",
        b"encryptionInformation",
        b"help",
        b"hint",
        b"isMapReduceCommand",
        b"maxTimeMSOpOnly",
        b"runtimeConstants",
        b"serialization_context",
        b"shardVersion",
        b"startTransaction",
        b"stmtId",
        b"tracking_info",
        b"txnNumber",
    )
)
