"""Server profiles: what differs between server versions, in one table.

6.0 is measured against a running mongod 6.0.27, 7.0 against 7.0.25 and 7.0.28, 5.0 and 4.4 against recordings of 5.0.4
and 4.4.2. 8.0 follows the server's published documents (semantics 1.1, 2.5, 4.3); it was not measured against a running
server. A profile's version may have three parts, where a patch release changed something.
``tailrace.plan.reference`` makes docs/reference/server-versions.md from the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeAlias

from tailrace.errors import UsageError

#: What the rules for a version are taken from.
Knowledge: TypeAlias = Literal["measured", "derived", "unknown"]


def _column(says: str) -> Any:
    """A field that the documentation explains in these words."""
    return field(metadata={"says": says})


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """What a server version's change streams do differently from the others."""

    version: tuple[int, ...]
    token_version: int = _column(
        "version of the resume tokens that a stream writes, unless something asks for version 2"
    )
    wall_time: bool = _column("events carry `wallTime`")
    disambiguated_paths: bool = _column("`updateDescription.disambiguatedPaths`, with showExpandedEvents")
    ns_type: bool = _column("`nsType` on create events")
    unwinds_apply_ops_without_session: bool = _column(
        "an `applyOps` entry without a session (batched deletes, atomic applyOps) gives events"
    )
    multi_op_is_no_transaction: bool = _column(
        "several retryable writes in one `applyOps` (`multiOpType: 1`) give events without `lsid` and `txnNumber`"
    )
    expanded_events_and_images: bool = _column("showExpandedEvents and stored pre- and post-images exist")
    logs_pre_images: bool = _column(
        "pre-images are no-op entries of the oplog (`recordPreImages`), shown in the event after `fullDocument`"
    )
    finds_logged_pre_images: bool = _column(
        "pre-images that `recordPreImages` has logged are given, too, and post-images made of them"
    )
    refuses_mode_by_own_code: bool = _column("an unknown `fullDocument` is refused with 40575, not 2")
    insert_keys_from_catalog: bool = _column(
        "a shard's insert gets its `documentKey` from the shard key of the collection as it is when the event is made"
    )
    always_shows_new_shards: bool = _column("a shard's streams show `kNewShardDetected` without `needsMerge` too")
    shard_part_ends: bool = _column("a shard's stream with `needsMerge` ends with its invalidate")
    looks_up_by_uuid: bool = _column(
        "`updateLookup` finds the event's collection by its UUID: under its new name after a rename, and never one "
        "made anew under the old name"
    )
    searches_before_user_stages: bool = _column(
        "the event that a stream is resumed from is looked for before the user's stages, so they may leave it out"
    )
    match_sees_session_of_entry: bool = _column(
        "a `$match` on `lsid` or `txnNumber` alone also looks at the oplog entry: it takes a retryable write for one "
        "that has them, although its event shows neither"
    )
    ends_with_token_of_invalidate: bool = _column(
        "a stream ends with its invalidate's resume token although its pipeline leaves that event out"
    )
    reply_says_invalidated: bool = _column("the reply that closes an invalidated cursor says `invalidated: true`")
    messages_end_with_full_stop: bool = _column("the messages of both errors 260 end with a full stop")
    describes_no_ops: bool = _column(
        "`reshardBegin`, `reshardDoneCatchUp` and `migrateChunkToNewShard` (before: `kNewShardDetected`) have `ns`; "
        "their tokens hold an `operationDescription`, which showExpandedEvents shows"
    )
    shows_resharding_collections: bool = _column("showSystemEvents shows `system.resharding.*` too")
    shows_index_builds: bool = _column("`startIndexBuild` events, with showExpandedEvents and showSystemEvents")
    refuses_old_updates: bool = _column(
        "an update entry with a `$v` other than 2, or with neither `$v` nor `_id`, ends the stream with 6741200"
    )
    measured: bool = _column("measured against a server of this version, not taken from its documentation")

    @property
    def series(self) -> tuple[int, int]:
        """The first two parts of ``version``: what a user calls the server's version."""
        return self.version[0], self.version[1]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


SERVER_4_4: Final = ServerProfile(
    version=(4, 4),
    token_version=1,
    wall_time=False,
    disambiguated_paths=False,
    ns_type=False,
    unwinds_apply_ops_without_session=False,
    multi_op_is_no_transaction=False,
    expanded_events_and_images=False,
    logs_pre_images=True,
    finds_logged_pre_images=True,
    refuses_mode_by_own_code=True,
    insert_keys_from_catalog=True,
    always_shows_new_shards=True,
    shard_part_ends=False,
    looks_up_by_uuid=True,
    searches_before_user_stages=True,
    match_sees_session_of_entry=False,
    ends_with_token_of_invalidate=False,
    reply_says_invalidated=False,
    messages_end_with_full_stop=True,
    describes_no_ops=False,
    shows_resharding_collections=False,
    shows_index_builds=False,
    refuses_old_updates=False,
    measured=True,
)
SERVER_5_0: Final = replace(SERVER_4_4, version=(5, 0), refuses_mode_by_own_code=False, insert_keys_from_catalog=False)
SERVER_6_0: Final = replace(
    SERVER_5_0,
    version=(6, 0),
    wall_time=True,
    expanded_events_and_images=True,
    logs_pre_images=False,
    looks_up_by_uuid=False,
    searches_before_user_stages=False,
    match_sees_session_of_entry=True,
    always_shows_new_shards=False,
    shard_part_ends=True,
    ends_with_token_of_invalidate=True,
    reply_says_invalidated=True,
    messages_end_with_full_stop=False,
)
SERVER_7_0: Final = replace(
    SERVER_6_0,
    version=(7, 0),
    token_version=2,
    finds_logged_pre_images=False,
    disambiguated_paths=True,
    unwinds_apply_ops_without_session=True,
    describes_no_ops=True,
    shows_resharding_collections=True,
    refuses_old_updates=True,
)
#: Somewhere after 7.0.25, which is measured too.
SERVER_7_0_28: Final = replace(SERVER_7_0, version=(7, 0, 28), shows_index_builds=True)
SERVER_8_0: Final = replace(SERVER_7_0_28, version=(8, 0), multi_op_is_no_transaction=True, measured=False)
SERVER_8_1: Final = replace(SERVER_8_0, version=(8, 1), ns_type=True)

#: All profiles, oldest first.
PROFILES: Final[tuple[ServerProfile, ...]] = (
    SERVER_4_4,
    SERVER_5_0,
    SERVER_6_0,
    SERVER_7_0,
    SERVER_7_0_28,
    SERVER_8_0,
    SERVER_8_1,
)


def profile_for(version: str | Sequence[int]) -> ServerProfile:
    """The newest profile that is not newer than ``version`` (``"6.0.27"`` or ``[6, 0, 27]``).

    Raises ``UsageError`` for a version before 4.4 or text that is not a version.
    """
    try:
        asked = _parts(version)
    except (ValueError, IndexError):
        raise UsageError(f"'{version}' is not a server version", hint="Give one such as 6.0 or 6.0.27") from None
    fitting = [profile for profile in PROFILES if profile.version <= asked]
    if not fitting:
        raise UsageError(f"MongoDB {asked[0]}.{asked[1]} is not supported", hint="4.4 is the oldest version that is")
    return fitting[-1]


def profiles_of_series(series: str) -> frozenset[ServerProfile]:
    """Those that a server can have of whose version the first two numbers are known, such as "7.0"."""
    return frozenset({profile_for(series), *(one for one in PROFILES if one.series == _parts(series)[:2])})


def knowledge_of(version: str | Sequence[int]) -> Knowledge:
    """What the rules for a version are taken from: ``measured`` against a server of its series (7.0, not 7.3),
    ``derived`` from published documents or from the rules of the series before it, ``unknown`` where it is of a later
    major version than any profile. Raises as ``profile_for``.
    """
    profile = profile_for(version)
    major, minor = _parts(version)[:2]
    if major > PROFILES[-1].version[0]:
        return "unknown"
    return "measured" if profile.measured and profile.series == (major, minor) else "derived"


def _parts(version: str | Sequence[int]) -> tuple[int, ...]:
    """At least two and at most three numbers. Raises ValueError or IndexError for what is no version."""
    words = version.split(".")[:3] if isinstance(version, str) else list(version)[:3]
    if not words:
        raise IndexError
    return (*(_number(word) for word in words), 0)[: max(2, len(words))]


def _number(word: str | int) -> int:
    """A part of a version: its digits, so that the last part of "7.0.28-rc1" is 28."""
    return int(word) if isinstance(word, int) else int(word.partition("-")[0])


def chosen_profile(version: str | Sequence[int]) -> ServerProfile:
    """As ``profile_for``, for a version that the caller names: a version that is not known yet is a UsageError."""
    profile = profile_for(version)
    parts = version.split(".") if isinstance(version, str) else version
    if int(parts[0]) > PROFILES[-1].version[0]:
        raise UsageError(
            f"nothing is known of the events of MongoDB {'.'.join(map(str, parts))}",
            hint=f"{PROFILES[-1].name} is the newest version that can be asked for",
        )
    return profile


def differences() -> list[tuple[str, dict[str, str]]]:
    """The table in words: what differs, and how each version does it."""
    columns = [column for column in fields(ServerProfile) if "says" in column.metadata]
    return [
        (column.metadata["says"], {profile.name: _word(getattr(profile, column.name)) for profile in PROFILES})
        for column in columns
    ]


def _word(value: bool | int) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
