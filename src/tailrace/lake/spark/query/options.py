"""The options of ``format("tailrace")``, for ``spark.readStream`` and ``spark.read``: texts to checked values.

Spark hands every option over as text and its name in lower case, so names are known here without regard to case. The
server's own option names are kept. Every mistake is a ``UsageError`` that names the option, and nothing that could hold
a password is ever repeated in a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import bson
from bson import json_util
from bson.errors import BSONError

from tailrace.core.masking.stages import check_stages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan, exact_plan
from tailrace.core.plan.profile import ServerProfile
from tailrace.core.user_text import byte_count, nearest
from tailrace.errors import UsageError
from tailrace.lake.store.local_path import local_path
from tailrace.read.source.mask_file import Masks

#: Options of ``$changeStream`` that take a text, and those that take a boolean.
SERVER_TEXTS: Final = ("fullDocument", "fullDocumentBeforeChange")
SERVER_FLAGS: Final = (
    "showExpandedEvents",
    "showSystemEvents",
    "showMigrationEvents",
    "showRawUpdateDescription",
    "allowToRunOnConfigDB",
    "allowToRunOnSystemNS",
    "matchCollectionUUIDForUpdateLookup",
    "ignoreRemovedShards",
)
#: The modes of exact images, and the server's mode that does the same with images of its own.
_EXACT: Final = {"exact": "required", "exactWhenAvailable": "whenAvailable"}
#: The modes that ask the server for documents, and so do not go together with exact ones.
_SERVERS: Final = frozenset({"updateLookup", "whenAvailable", "required"})
#: The server calls it ``$_generateV2ResumeTokens``; it is an option of aggregate, not of the stage.
V2_TOKENS: Final = "generateV2ResumeTokens"
START_OPTIONS: Final = ("resumeAfter", "startAfter", "startAtOperationTime", "startingFrom")
#: A value of ``startingFrom``: every existing document, and then every change.
SNAPSHOT: Final = "snapshot"
COLUMNS: Final = (
    "event",
    "token",
    "operation_type",
    "cluster_time",
    "wall_time",
    "database",
    "collection",
    "to_database",
    "to_collection",
    "document_key",
    "full_document",
    "full_document_before_change",
    "update_description",
    "transaction_id",
)
DOCUMENT_FORMS: Final = ("variant", "json", "bson")
KNOWN: Final = (
    "uri",
    "database",
    "collection",
    "collections",
    "pipeline",
    "collation",
    *SERVER_TEXTS,
    *SERVER_FLAGS,
    V2_TOKENS,
    *START_OPTIONS,
    "endAtOperationTime",
    "documents",
    "columns",
    "maxEventsPerTrigger",
    "maxBytesPerTrigger",
    "partitions",
    "filterPushdown",
    "failOnInvalidate",
    "archive",
    "images",
    "snapshotDocumentsPerSecond",
    "masks",
)
#: Without a limit the first micro-batch after a long pause is the whole oplog, and a crash in it loses all its work.
MAX_BYTES_DEFAULT: Final = 1 << 30
#: With exact images one task reads all of a micro-batch, and the documents that it changes are kept as they were.
MAX_BYTES_EXACT: Final = 128 << 20
_BY_LOWER: Final = {name.lower(): name for name in KNOWN}

_TIME_PAIR = re.compile(r"(?:Timestamp\()?\s*(\d{1,10})\s*[,:]\s*(\d{1,10})\s*\)?")
_HEX = re.compile(r"[0-9A-Fa-f]+")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a new stream starts. ``option`` is one of ``START_OPTIONS``' first three, ``"oldest"``, ``"now"`` or
    ``"snapshot"``; ``token`` (the token document's BSON) belongs to the first two, ``time`` (inclusive) to the third.
    """

    option: str
    token: bytes | None = None
    time: ClusterTime | None = None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Checked options.

    ``stage``       the server's options, but for where to start; the modes of exact images among them
    ``selection``   the collections that are watched, if a list of them is given; the scope is then the cluster
    ``pipeline``    the user's stages as BSON
    ``collation``   how they compare strings, as BSON; ``None``: by their bytes
    ``start``       ``None`` where the user named none
    ``end``         where a batch read ends, inclusive; ``None``: now
    ``max_events``  bound of a micro-batch; ``None``: none
    ``max_bytes``   bound of a micro-batch in bytes of oplog
    ``filters``     whether a batch read takes Spark's filters on its columns into the read
    ``archive``     the directory of an archive of the same deployment: what the oplog no longer holds is read from it
    ``images``      the directory for the states that exact images are computed from
    ``snapshot_rate``  how many documents a second are copied at most; ``None``: no limit
    ``masks``       what is masked in every event before a column is made of it
    ``fails_on_invalidate``  whether a stream whose collection or database is gone fails, after its last event
    """

    uri: str = field(repr=False)
    scope: Scope
    stage: dict[str, Any]
    pipeline: tuple[bytes, ...]
    collation: bytes | None
    v2_tokens: bool
    start: Start | None
    end: ClusterTime | None
    documents: str
    columns: tuple[str, ...]
    max_events: int | None
    max_bytes: int
    partitions: int
    #: Whether the user named ``partitions``: then a full micro-batch has that many slices, however small they are.
    partitions_named: bool = False
    filters: bool = False
    fails_on_invalidate: bool = False
    archive: str | None = None
    snapshot_rate: int | None = None
    selection: Selection | None = None
    images: str | None = None
    masks: Masks | None = None

    @property
    def exact(self) -> bool:
        """Whether images are computed here."""
        return any(self.stage.get(name) in _EXACT for name in SERVER_TEXTS)

    @property
    def watched(self) -> Scope | Selection:
        """The scope, or the part of it that is selected."""
        return self.selection or self.scope

    @property
    def stages(self) -> tuple[bytes, ...]:
        """The stages of the stream: the ``$match`` that selects the collections, and the user's."""
        match = None if self.selection is None else self.selection.match
        return self.pipeline if match is None else (bson.encode({"$match": match}), *self.pipeline)

    @property
    def splits_events(self) -> bool:
        """Whether the pipeline ends in ``$changeStreamSplitLargeEvent``."""
        return any(stage[5:].startswith(b"$changeStreamSplitLargeEvent\x00") for stage in self.pipeline)

    @property
    def has_fixed_start(self) -> bool:
        """Whether the stream starts at the same place whenever it is asked; the oldest entry and now move on."""
        return self.start is not None and (self.start.token is not None or self.start.time is not None)

    def stream_options(self, start: Start | None = None, *, v2_tokens: bool = False) -> StreamOptions:
        """The change stream that these options ask for, beginning at ``start``; raises as ``StreamOptions.parse``."""
        stage = {name: _EXACT.get(value, value) for name, value in self.stage.items()}
        if start is not None and start.token is not None:
            stage[start.option] = bson.decode(start.token)
        if start is not None and start.time is not None:
            stage["startAtOperationTime"] = start.time.to_timestamp()
        return StreamOptions.parse(
            self.scope,
            stage,
            self.stages,
            generate_v2_tokens=self.v2_tokens or v2_tokens or None,
            collation=self.collation,
        )

    def plan(self, stream: StreamOptions, profile: ServerProfile) -> Plan:
        """The plan of such a stream; raises as ``build_plan``."""
        return (exact_plan if self.exact else build_plan)(stream, profile)


def parse(options: Mapping[str, str]) -> ReadOptions:
    """Check Spark's options. ``UsageError`` for an unknown, missing, contradicting or unreadable one."""
    given = dict(_canonical(options.items()))
    uri = given.get("uri")
    if not uri:
        raise UsageError(
            "the option 'uri' is missing", hint='Give it as .option("uri", "mongodb://host/?replicaSet=rs")'
        )
    stage = _stage(given)
    options_read = ReadOptions(
        uri=uri,
        scope=_scope(given.get("database"), given.get("collection")),
        selection=_selection(given),
        stage=stage,
        pipeline=_read(given, "pipeline", _pipeline) or (),
        collation=_read(given, "collation", _collation),
        v2_tokens=_read(given, V2_TOKENS, _flag) or False,
        start=_start(given),
        end=_read(given, "endAtOperationTime", _end),
        documents=_read(given, "documents", _documents) or "variant",
        columns=_read(given, "columns", _columns) or COLUMNS,
        max_events=_read(given, "maxEventsPerTrigger", _count),
        max_bytes=_read(given, "maxBytesPerTrigger", _size) or _max_bytes(stage),
        partitions=_read(given, "partitions", _count) or os.cpu_count() or 1,
        partitions_named="partitions" in given,
        filters=_read(given, "filterPushdown", _flag) or False,
        fails_on_invalidate=_read(given, "failOnInvalidate", _flag) or False,
        archive=_read(given, "archive", lambda text: str(local_path(text, "option 'archive'"))),
        images=_read(given, "images", lambda text: str(local_path(text, "option 'images'"))),
        snapshot_rate=_read(given, "snapshotDocumentsPerSecond", _count),
        masks=_read(given, "masks", Masks.from_text),
    )
    _check_masks(options_read)
    _check_exact(options_read)
    options_read.stream_options(options_read.start)  # the server's own rules, before anything runs
    return options_read


def _canonical(items: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    for key, text in items:
        name = _BY_LOWER.get(key.lower())
        if name is None:
            raise UsageError(f"unknown option '{key}'", hint=_meant(key, KNOWN))
        yield name, text


def _meant(word: str, known: Sequence[str]) -> str:
    meant = nearest(word, known)
    return f"Did you mean '{meant}'?" if meant else f"The known ones are {', '.join(known)}"


def _read(given: Mapping[str, str], name: str, reader: Callable[[str], T]) -> T | None:
    """The option's value through ``reader``, whose ``ValueError`` (its text says what is expected) names the option."""
    text = given.get(name)
    if text is None:
        return None
    try:
        return reader(text.strip())
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, BSONError, OverflowError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"it does not parse: {error}"
        raise UsageError(f"option '{name}': {reason}") from None


def _scope(database: str | None, collection: str | None) -> Scope:
    if collection:
        if not database:
            raise UsageError("option 'collection' needs option 'database'")
        return Scope.of_collection(database, collection)
    return Scope.of_database(database) if database else Scope.cluster()


def _selection(given: Mapping[str, str]) -> Selection | None:
    selection = _read(given, "collections", lambda text: Selection.of(_names(text), "option 'collections'"))
    if selection is None:
        return None
    for name in ("collection", "database"):
        if given.get(name):
            raise UsageError(
                f"options '{name}' and 'collections' both say what is watched",
                hint="Give one of them; collections are named with their database: shop.orders",
            )
    if _read(given, "showSystemEvents", _flag):
        raise UsageError(
            "options 'collections' and 'showSystemEvents' cannot be used together: a list names no system collections",
            hint="Watch a database or the cluster, with a $match on ns",
        )
    return selection


def _names(text: str) -> list[str]:
    """A list of names: a JSON array, or names with commas between them."""
    if not text.startswith("["):
        return [name.strip() for name in text.split(",") if name.strip() or "," in text]
    names = _json(text)
    if not all(isinstance(name, str) for name in names):
        raise ValueError('expected names such as shop.orders, logs.*, or a JSON array of them: ["shop.orders"]')
    return list(names)


def _stage(given: Mapping[str, str]) -> dict[str, Any]:
    stage: dict[str, Any] = {name: given[name] for name in SERVER_TEXTS if name in given}
    for name in SERVER_FLAGS:
        flag = _read(given, name, _flag)
        if flag is not None:
            stage[name] = flag
    return stage


def _max_bytes(stage: Mapping[str, Any]) -> int:
    return MAX_BYTES_EXACT if any(stage.get(name) in _EXACT for name in SERVER_TEXTS) else MAX_BYTES_DEFAULT


def _check_exact(options: ReadOptions) -> None:
    if not options.exact:
        if options.images is not None:
            raise UsageError(
                "option 'images' is the directory for exact images, and none are requested",
                hint="Add fullDocument=exact or fullDocumentBeforeChange=exact, or leave 'images' out",
            )
        return
    after, before = (options.stage.get(name) for name in SERVER_TEXTS)
    if after in _SERVERS or before in _SERVERS:
        raise UsageError(
            f"options fullDocument={after} and fullDocumentBeforeChange={before} do not go together",
            hint="Request exact images with both, or with one of them alone",
        )
    if options.images is None:
        raise UsageError(
            "exact images need the option 'images': the directory for the documents that they are computed from",
            hint="Give a directory on a local disk of the machine that runs the driver and the executors",
        )
    if options.selection is not None:
        raise UsageError(
            "option 'collections' and exact images cannot be used together: a collection that is renamed into the list "
            "brings documents that are not known",
            hint="Watch a collection, a database or the whole cluster, with a $match on ns in 'pipeline'",
        )


def _check_masks(options: ReadOptions) -> None:
    if options.masks is None:
        return
    check_stages(options.pipeline)
    if options.exact:
        raise UsageError(
            "masks and exact images cannot be used together: these are computed from whole documents on the disk",
            hint="Take the server's own images (fullDocument=updateLookup, fullDocumentBeforeChange=whenAvailable)",
        )
    _ = options.masks.compiled  # the key is missed before anything runs


def _start(given: Mapping[str, str]) -> Start | None:
    named = [name for name in START_OPTIONS if name in given]
    if not named:
        return None
    if len(named) > 1:
        raise UsageError(f"options '{named[0]}' and '{named[1]}' both say where to start", hint="Give one of them")
    name = named[0]
    if name == "startingFrom":
        return Start(_read(given, name, _starting_from) or "")
    if name == "startAtOperationTime":
        return Start(name, time=_read(given, name, cluster_time))
    return Start(name, token=_read(given, name, _token))


def _starting_from(text: str) -> str:
    if text.lower() not in {"oldest", "now", SNAPSHOT}:
        raise ValueError("expected 'oldest', 'now' or 'snapshot'")
    return text.lower()


def _flag(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError(f"expected 'true' or 'false', found '{text}'")
    return text.lower() == "true"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a whole number, 1 or more, found '{text}'")
    return int(text)


def _size(text: str) -> int:
    size = byte_count(text)
    if size is None:
        raise ValueError(f"expected a number of bytes such as 1000000, 64k or 32m, found '{text}'")
    return size


def _json(text: str) -> Any:
    try:
        return json_util.loads(text, json_options=json_util.CANONICAL_JSON_OPTIONS)
    except (ValueError, TypeError, ArithmeticError, BSONError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def _pipeline(text: str) -> tuple[bytes, ...]:
    stages = _json(text)
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ValueError('expected a JSON array of stages, such as [{"$match": {...}}]')
    return tuple(bson.encode(stage) for stage in stages)


def _collation(text: str) -> bytes:
    document = _json(text)
    if not isinstance(document, dict):
        raise ValueError('expected a JSON document such as {"locale": "en", "strength": 2}')
    return bson.encode(document)


def _token(text: str) -> bytes:
    """A resume token: its document as JSON, or the hexadecimal ``_data`` alone (the column ``token``)."""
    document = {"_data": text} if _HEX.fullmatch(text) else _json(text)
    if not isinstance(document, dict):
        raise ValueError('expected a resume token such as {"_data": "82..."} or its hexadecimal digits')
    return bson.encode(document)


def cluster_time(text: str) -> ClusterTime:
    """A cluster time from text: ``{"$timestamp": {"t": 1700000000, "i": 1}}``, ``1700000000,1``,
    ``Timestamp(1700000000, 1)``, seconds since 1970, or a date and time in ISO 8601 (UTC where it names no zone).
    ``ValueError`` for anything else."""
    expected = "expected a cluster time such as 1700000000,1 or 2024-01-31T12:00:00Z"
    if text.startswith("{"):
        value = _json(text)
        if isinstance(value, bson.Timestamp):
            return ClusterTime.from_timestamp(value)
        raise ValueError(f"{expected}, found other JSON")
    pair = _TIME_PAIR.fullmatch(text)
    if pair or (text.isdecimal() and len(text) <= 10):
        seconds, increment = (int(pair[1]), int(pair[2])) if pair else (int(text), 0)
        if max(seconds, increment) > 0xFFFFFFFF:
            raise ValueError(f"{expected}: both parts are below 2^32")
        return ClusterTime.of(seconds, increment)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{expected}, found '{text}'") from None
    seconds = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    if not 0 <= seconds <= 0xFFFFFFFF:
        raise ValueError(f"{expected}: the year is out of range")
    return ClusterTime.of(seconds, 0)


def _end(text: str) -> ClusterTime | None:
    return None if text.lower() == "now" else cluster_time(text)


def _documents(text: str) -> str:
    if text.lower() not in DOCUMENT_FORMS:
        raise ValueError(f"expected one of {', '.join(DOCUMENT_FORMS)}, found '{text}'")
    return text.lower()


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in COLUMNS:
            raise UsageError(f"option 'columns': unknown column '{name}'", hint=_meant(name, COLUMNS))
    if len(set(names)) != len(names):
        raise ValueError("a column is named twice")
    return names
