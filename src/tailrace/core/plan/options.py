"""The parameters of a change stream, checked as the server checks them (semantics 6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import bson
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import ServerProfile
from tailrace.core.raw_bson import BOOL, NULL, OBJECT, STRING, TIMESTAMP, Element
from tailrace.errors import UsageError

if TYPE_CHECKING:
    from tailrace.core.expression.values.collation import Collation

FULL_DOCUMENT_MODES: Final = ("default", "updateLookup", "whenAvailable", "required")
BEFORE_CHANGE_MODES: Final = ("off", "whenAvailable", "required")

#: The server's option names and our attribute for each, by type.
_BOOLEANS: Final[dict[bytes, str]] = {
    b"allChangesForCluster": "all_changes_for_cluster",
    b"showExpandedEvents": "show_expanded_events",
    b"showSystemEvents": "show_system_events",
    b"showMigrationEvents": "show_migration_events",
    b"showRawUpdateDescription": "show_raw_update_description",
    b"allowToRunOnConfigDB": "allow_to_run_on_config_db",
    b"allowToRunOnSystemNS": "allow_to_run_on_system_ns",
    b"matchCollectionUUIDForUpdateLookup": "match_collection_uuid_for_update_lookup",
    b"ignoreRemovedShards": "ignore_removed_shards",
}
_MODES: Final[dict[bytes, tuple[str, tuple[str, ...]]]] = {
    b"fullDocument": ("full_document", FULL_DOCUMENT_MODES),
    b"fullDocumentBeforeChange": ("full_document_before_change", BEFORE_CHANGE_MODES),
}
_NOT_SUPPORTED: Final = 115
#: Options of later servers that no stream of ours has: the series that they came with, for people too.
_LATER_OPTIONS: Final[dict[str, tuple[tuple[int, int], str]]] = {
    "supportedEvents": ((8, 2), "MongoDB has it from 8.2 on"),
    "showCommitTimestamp": ((8, 2), "MongoDB has it from 8.2.1 on"),
    "version": ((9, 0), "MongoDB has it from 9.0 on"),
    "showEndOfTransaction": ((9, 1), "MongoDB has it after 9.0"),
}
_TOKENS: Final[dict[bytes, str]] = {b"resumeAfter": "resume_after", b"startAfter": "start_after"}


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """A change stream's scope, the options of its ``$changeStream`` stage, and the user's stages after it.

    ``pipeline``            the user's stages, each a BSON document
    ``generate_v2_tokens``  the aggregate command's ``$_generateV2ResumeTokens``; ``None``: as the server does
    ``needs_merge``         the stream is one shard's part of a merged stream
    ``let``                 the aggregate command's variables for the user's stages, a BSON document
    ``collation``           how the user's stages compare strings; ``None``: by their bytes. It touches nothing else:
                            neither the scope, nor tokens, nor look-ups
    """

    scope: Scope
    full_document: str = "default"
    full_document_before_change: str = "off"
    resume_after: ResumeToken | None = None
    start_after: ResumeToken | None = None
    start_at_operation_time: ClusterTime | None = None
    show_expanded_events: bool = False
    show_system_events: bool = False
    show_migration_events: bool = False
    show_raw_update_description: bool = False
    allow_to_run_on_config_db: bool = False
    allow_to_run_on_system_ns: bool = False
    match_collection_uuid_for_update_lookup: bool = False
    ignore_removed_shards: bool = False
    pipeline: tuple[bytes, ...] = field(default=(), repr=False)
    generate_v2_tokens: bool | None = None
    needs_merge: bool = False
    let: bytes | None = field(default=None, repr=False)
    collation: Collation | None = None

    @classmethod
    def parse(
        cls,
        scope: Scope,
        stage: Mapping[str, Any] | bytes = raw_bson.EMPTY_DOCUMENT,
        pipeline: Sequence[Mapping[str, Any] | bytes] = (),
        *,
        generate_v2_tokens: bool | None = None,
        needs_merge: bool = False,
        let: bytes | None = None,
        collation: Mapping[str, Any] | bytes | None = None,
        profile: ServerProfile | None = None,
    ) -> StreamOptions:
        """The options in ``stage``, the document inside ``$changeStream``.

        Raises ``UsageError``, or ``InvalidResumeToken`` for a token that does not parse, with the server's code and
        message (of ``profile``'s version where it is given). Whether the token fits this stream is ``build_plan``'s
        question. A ``collation`` other than simple is refused (115) where ICU is not installed.
        """
        scope.check_names()
        asked = None
        if collation is not None:
            # The language takes a while to load; many ask this module for its names alone.
            from tailrace.core.expression.values.collation import order_of, parse_collation  # noqa: PLC0415

            asked = parse_collation(to_bson(collation))
            order_of(asked)
        raw = to_bson(stage)
        chosen: dict[str, Any] = {}
        all_changes: bool | None = None
        for element in raw_bson.elements(raw):
            name, value = _parse_option(raw, element, profile)
            if name == "all_changes_for_cluster":
                all_changes = bool(value)
            elif value is not None:
                chosen[name] = value
        _check_scope(scope, chosen, all_changes)
        options = cls(
            scope=scope,
            pipeline=tuple(to_bson(user_stage) for user_stage in pipeline),
            generate_v2_tokens=generate_v2_tokens,
            needs_merge=needs_merge,
            let=let,
            collation=asked,
            **chosen,
        )
        _check_start(options)
        return options

    @property
    def start_token(self) -> ResumeToken | None:
        """The token that the stream starts from, whichever option gave it."""
        return self.resume_after or self.start_after

    @property
    def start(self) -> ClusterTime | None:
        """The cluster time that the stream starts at; ``None`` where the options name none."""
        token = self.start_token
        return self.start_at_operation_time if token is None else token.cluster_time


def to_bson(document: Mapping[str, Any] | bytes) -> bytes:
    """The BSON of a mapping; raw documents and bytes are taken as they are. UsageError where a value has none."""
    if isinstance(document, bytes):
        return document
    if isinstance(document, RawBSONDocument):
        return raw_bson.bytes_of(document)
    try:
        return bson.encode(document)
    except (BSONError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"a stage cannot be written as BSON: {error}") from None


def _parse_option(raw: bytes, element: Element, profile: ServerProfile | None) -> tuple[str, Any]:
    name = element.name
    if name == b"showExpandedEvents" and profile is not None and not profile.expanded_events_and_images:
        raise unknown_option(name.decode(), hint="It came with 6.0")  # of whatever type it is
    if name in _BOOLEANS:
        return _BOOLEANS[name], _parse_boolean(raw, element)
    if name in _MODES:
        attribute, modes = _MODES[name]
        return attribute, _parse_mode(raw, element, modes, profile)
    if name in _TOKENS:
        if element.type == NULL:
            return _TOKENS[name], None
        if element.type != OBJECT:
            raise _wrong_type(element, "object")
        return _TOKENS[name], ResumeToken.parse(raw_bson.value(raw, element))
    if name == b"startAtOperationTime":
        if element.type == NULL:
            return "start_at_operation_time", None
        if element.type != TIMESTAMP:
            raise _wrong_type(element, "timestamp")
        return "start_at_operation_time", ClusterTime.from_bytes_le(raw_bson.value(raw, element))
    text = name.decode("utf-8", "replace")
    if text not in _LATER_OPTIONS:
        raise unknown_option(text)
    since, said = _LATER_OPTIONS[text]
    if profile is None or profile.series < since:
        raise unknown_option(text, hint=said)
    raise UsageError(
        f"the option '{text}' of $changeStream is not supported", code=_NOT_SUPPORTED, hint=f"{said}; leave it out"
    )


def unknown_option(name: str, hint: str | None = None) -> UsageError:
    """The error that refuses an option which the server does not know."""
    return UsageError(f"BSON field '$changeStream.{name}' is an unknown field.", code=40415, hint=hint)


def unknown_mode(name: str, value: str, profile: ServerProfile | None) -> UsageError:
    """The error that refuses a value of ``fullDocument`` or ``fullDocumentBeforeChange``."""
    modes = dict(_MODES.values())["full_document" if name == "fullDocument" else "full_document_before_change"]
    if name == "fullDocument" and profile is not None and not profile.computes_post_images:
        if value in modes and profile.expanded_events_and_images:
            return UsageError(
                f"Specified value '{value}' is not a valid option for the '{name}' parameter of the $changeStream "
                "stage",
                code=2,
                hint="It needs the feature compatibility version 6.0 (setFeatureCompatibilityVersion)",
            )
        modes = modes[:2]
    hint = f"One of: {', '.join(modes)}"
    if name == "fullDocument" and profile is not None and profile.refuses_mode_by_own_code:
        return UsageError(
            f"unrecognized value for the '{name}' option to the $changeStream stage: '{value}'", code=40575, hint=hint
        )
    return UsageError(
        f"Enumeration value '{value}' for field '$changeStream.{name}' is not a valid value.", code=2, hint=hint
    )


def _parse_boolean(raw: bytes, element: Element) -> bool:
    # Null, which other options take for "not given", is refused here (6.0.27).
    if element.type != BOOL:
        found = raw_bson.type_name(element.type)
        raise UsageError(f"Field '{element.name.decode()}' should be a boolean value, but found: {found}", code=14)
    return raw[element.value_start] == 1


def _parse_mode(raw: bytes, element: Element, modes: tuple[str, ...], profile: ServerProfile | None) -> str | None:
    if element.type == NULL:
        return None
    if element.type != STRING:
        raise _wrong_type(element, "string")
    text = raw_bson.read_string(raw, element.value_start).decode("utf-8", "replace")
    if text not in modes:
        raise unknown_mode(element.name.decode(), text, profile)
    return text


def _wrong_type(element: Element, expected: str) -> UsageError:
    type_name = raw_bson.type_name(element.type)
    return UsageError(
        f"BSON field '$changeStream.{element.name.decode()}' is the wrong type '{type_name}', expected type "
        f"'{expected}'",
        code=14,
    )


def _check_scope(scope: Scope, chosen: Mapping[str, Any], all_changes: bool | None) -> None:
    """The server's rules on where a stream may be opened. A cluster scope means allChangesForCluster on admin; it may
    be said again in the stage but not denied."""
    if scope.kind == "cluster":
        if all_changes is False:
            raise _internal_database("admin")
        return
    if all_changes:
        target = scope.collection if scope.kind == "collection" else "$cmd.aggregate"
        raise UsageError(
            "A $changeStream with 'allChangesForCluster:true' may only be opened on the 'admin' database, and with no "
            f"collection name; found {scope.database}.{target}",
            code=72,
        )
    if scope.database in ("admin", "local") or (
        scope.database == "config" and not chosen.get("allow_to_run_on_config_db")
    ):
        raise _internal_database(scope.database or "")
    if (
        scope.collection is not None
        and scope.collection.startswith("system.")
        and not chosen.get("allow_to_run_on_system_ns")
    ):
        raise UsageError(
            f"$changeStream may not be opened on the internal {scope.database}.{scope.collection} collection", code=73
        )


def _internal_database(name: str) -> UsageError:
    return UsageError(f"$changeStream may not be opened on the internal {name} database", code=73)


def _check_start(options: StreamOptions) -> None:
    if options.resume_after is not None and options.start_after is not None:
        raise UsageError("Do not specify both 'resumeAfter' and 'startAfter' in a $changeStream stage", code=50865)
    token = options.start_token
    if token is None:
        return
    if options.start_at_operation_time is not None:
        raise UsageError("Only one type of resume option is allowed, but multiple were found", code=40674)
