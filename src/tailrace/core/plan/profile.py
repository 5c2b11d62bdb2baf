"""Server profiles: what differs between server versions, in one table.

6.0 is measured against a running mongod 6.0.27, 7.0 against 7.0.25 and 7.0.28, 5.0 and 4.4 against recordings of 5.0.4
and 4.4.2. 8.0 and later are not measured: each rule says where it is taken from, and how certain it is (semantics 1.1,
2.5, 4.3). A profile's version may have three parts, where a patch release changed something. A server whose feature
compatibility version is lower than its own version has another profile where that makes a difference; the version's
text says so: "6.0.27-fcv5.0". ``tailrace.core.plan.reference`` makes docs/reference/server-versions.md from the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from tailrace.errors import UsageError

#: What the rules for a version are taken from.
Knowledge: TypeAlias = Literal["measured", "derived", "unknown"]
#: What a rule is taken from where no server could be run: the server's published source; its issue tracker, which names
#: the first release; its manual; the drivers' tests, which name versions; what users have shown of their events; or
#: that no source reports a change.
Source: TypeAlias = Literal["source", "tracker", "manual", "drivers' tests", "captures", "no change known"]
Confidence: TypeAlias = Literal["high", "medium"]


@dataclass(frozen=True, slots=True)
class RuleEvidence:
    """What a rule is taken from for the versions that were not measured, and how sure that is."""

    sources: tuple[Source, ...]
    confidence: Confidence


class ProfileRow(NamedTuple):
    """A row of the table: what differs, how each version does it, and what that is taken from after 7.0."""

    says: str
    by_version: dict[str, str]
    evidence: RuleEvidence | None


_SERIES: Final = re.compile(r"\d{1,4}\.\d{1,4}")
#: Between a version and a lower feature compatibility version.
_FCV: Final = "-fcv"
_UNCHANGED: Final = RuleEvidence(("no change known",), "medium")


def _column(says: str, *sources: Source, confidence: Confidence = "high") -> Any:
    """A field that the documentation explains in these words. Without sources no change after 7.0.28 is known."""
    return field(metadata={"says": says, "evidence": RuleEvidence(sources, confidence) if sources else _UNCHANGED})


def _own_column(says: str) -> Any:
    """A field that is about the table itself."""
    return field(metadata={"says": says, "evidence": None})


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """What a server version's change streams do differently from the others."""

    version: tuple[int, ...]
    token_version: int = _column(
        "version of the resume tokens that a stream writes, unless something asks for version 2", "source", "captures"
    )
    wall_time: bool = _column("events carry `wallTime`", "source", "captures")
    disambiguated_paths: bool = _column(
        "`updateDescription.disambiguatedPaths`, with showExpandedEvents", "source", "drivers' tests"
    )
    ns_type: bool = _column("`nsType` on create events, with showExpandedEvents", "source", "manual")
    unwinds_apply_ops_without_session: bool = _column(
        "an `applyOps` entry without a session (batched deletes, atomic applyOps; from 8.0 on the inserts of one "
        "command too) gives events",
        "source",
        "tracker",
    )
    multi_op_is_no_transaction: bool = _column(
        "several retryable writes in one `applyOps` (`multiOpType: 1`) give events without `lsid` and `txnNumber`, and "
        "are no part of a chain",
        "source",
        "tracker",
    )
    expanded_events_and_images: bool = _column(
        "showExpandedEvents and stored pre- and post-images exist", "source", "captures"
    )
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
        "created later under the old name"
    )
    searches_before_user_stages: bool = _column(
        "the event that a stream is resumed from is searched for before the user's stages, so they may leave it out"
    )
    moves_array_tests: bool = _column(
        "a `$match` is asked before the stages and look-ups ahead of it also where it tests a whole array (`$size`, "
        "`$elemMatch`) or, in a `$jsonSchema`, a field's type or items"
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
        "their tokens hold an `operationDescription`, which showExpandedEvents shows",
        "source",
        "tracker",
    )
    reads_typed_no_ops: bool = _column(
        "these no-ops are also known in the form of 6.0, by their field `type`", "tracker"
    )
    shows_resharding_collections: bool = _column("showSystemEvents shows `system.resharding.*` too", "source")
    shows_blocking_writes: bool = _column("`reshardBlockingWrites` events, with showSystemEvents", "source", "tracker")
    shows_index_builds: bool = _column(
        "`startIndexBuild` events, with showExpandedEvents and showSystemEvents", "source", confidence="medium"
    )
    shows_aborted_index_builds: bool = _column(
        "`abortIndexBuild` events, with showExpandedEvents and showSystemEvents", "source", "tracker"
    )
    shows_ends_of_transactions: bool = _column(
        "`endOfTransaction` events, with showExpandedEvents, where the oplog has entries of them (written for prepared "
        "transactions, with a feature flag that is off by default)",
        "source",
        "tracker",
    )
    refuses_old_updates: bool = _column(
        "an update entry with a `$v` other than 2, or with neither `$v` nor `_id`, ends the stream with 6741200",
        "source",
        "tracker",
    )
    replacements_may_have_v: bool = _column(
        "whether an update entry replaces the document depends on its `_id` alone: one with an `_id` may have any `$v`",
        "source",
        "tracker",
    )
    places: Literal["all", "documents", "none"] = _column(
        "fields that an event could have had keep a place in it (all; of `fullDocument` and `documentKey`; none). "
        "Without, `fullDocument` of an update that is looked up comes last, after `updateDescription` and "
        "`fullDocumentBeforeChange`, and so does a field that a stage sets",
        "source",
        "tracker",
        confidence="medium",
    )
    computes_post_images: bool = _column('`fullDocument: "whenAvailable"` and `"required"` are known')
    measured: bool = _own_column("measured against a server of this version")
    #: The feature compatibility version, where it is a lower one and makes a difference.
    compatibility: tuple[int, int] | None = None

    @property
    def series(self) -> tuple[int, int]:
        """The first two parts of ``version``: what a user calls the server's version."""
        return self.version[0], self.version[1]

    @property
    def name(self) -> str:
        version = ".".join(map(str, self.version))
        return version if self.compatibility is None else f"{version}{_FCV}{'.'.join(map(str, self.compatibility))}"

    @property
    def rank(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Which of two servers is the older one: by the version, then by the feature compatibility version."""
        return self.version, self.compatibility or self.series


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
    moves_array_tests=False,
    match_sees_session_of_entry=False,
    ends_with_token_of_invalidate=False,
    reply_says_invalidated=False,
    messages_end_with_full_stop=True,
    describes_no_ops=False,
    reads_typed_no_ops=True,
    shows_resharding_collections=False,
    shows_blocking_writes=False,
    shows_index_builds=False,
    shows_aborted_index_builds=False,
    shows_ends_of_transactions=False,
    refuses_old_updates=False,
    replacements_may_have_v=False,
    places="all",
    computes_post_images=False,
    measured=True,
)
SERVER_5_0: Final = replace(SERVER_4_4, version=(5, 0), refuses_mode_by_own_code=False, insert_keys_from_catalog=False)
SERVER_6_0: Final = replace(
    SERVER_5_0,
    version=(6, 0),
    wall_time=True,
    expanded_events_and_images=True,
    computes_post_images=True,
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
    moves_array_tests=True,
    refuses_old_updates=True,
)
#: Somewhere after 7.0.25, which is measured too.
SERVER_7_0_28: Final = replace(SERVER_7_0, version=(7, 0, 28), shows_index_builds=True)
SERVER_7_0_31: Final = replace(SERVER_7_0_28, version=(7, 0, 31), shows_aborted_index_builds=True, measured=False)
SERVER_8_0: Final = replace(
    SERVER_7_0,
    version=(8, 0),
    multi_op_is_no_transaction=True,
    reads_typed_no_ops=False,
    shows_ends_of_transactions=True,
    measured=False,
)
SERVER_8_0_5: Final = replace(SERVER_8_0, version=(8, 0, 5), ns_type=True)
SERVER_8_0_16: Final = replace(
    SERVER_8_0_5, version=(8, 0, 16), shows_index_builds=True, shows_aborted_index_builds=True
)
SERVER_8_1: Final = replace(SERVER_8_0_16, version=(8, 1), shows_blocking_writes=True)
#: That of 8.2.1 and later patch releases.
SERVER_8_2: Final = replace(SERVER_8_1, version=(8, 2), places="documents")
SERVER_8_3: Final = replace(SERVER_8_2, version=(8, 3), places="none", replacements_may_have_v=True)

#: All profiles, oldest first.
PROFILES: Final[tuple[ServerProfile, ...]] = (
    SERVER_4_4,
    SERVER_5_0,
    SERVER_6_0,
    SERVER_7_0,
    SERVER_7_0_28,
    SERVER_7_0_31,
    SERVER_8_0,
    SERVER_8_0_5,
    SERVER_8_0_16,
    SERVER_8_1,
    SERVER_8_2,
    SERVER_8_3,
)
#: What a server does otherwise as long as its feature compatibility version is the one before its own, by series. It
#: goes by the setting at the moment of reading, for older entries too (6.0.27, 7.0.28). At 4.4, 5.0.4 does nothing
#: otherwise.
_BELOW_OWN: Final[dict[tuple[int, int], tuple[tuple[int, int], dict[str, Any]]]] = {
    (6, 0): ((5, 0), {"wall_time": False, "computes_post_images": False}),
    (7, 0): ((6, 0), {"disambiguated_paths": False}),
}
#: Releases that no profile is right for, and what they do.
_REFUSED: Final[dict[tuple[int, ...], str]] = {
    (
        8,
        2,
        0,
    ): "it shows `collectionUUID` and other fields of expanded events in every stream, as no other release does",
}


def profile_for(version: str | Sequence[int]) -> ServerProfile:
    """The newest profile that is not newer than ``version`` (``"6.0.27"`` or ``[6, 0, 27]``), at the feature
    compatibility version that it names (``"6.0.27-fcv5.0"``).

    Raises ``UsageError`` for a version before 4.4, one whose events no profile describes, or text that is no version.
    """
    try:
        asked = _parts(version)
        lowered = _compatibility(version)
    except (ValueError, IndexError):
        raise UsageError(f"'{version}' is not a server version", hint="Give one such as 6.0 or 6.0.27") from None
    if asked in _REFUSED:
        name = ".".join(map(str, asked))
        raise UsageError(
            f"the events of MongoDB {name} are not supported: {_REFUSED[asked]}",
            hint="Upgrade the server, or name 8.2.1 (server_version, --server-version) to have the events of the later "
            "releases of 8.2",
        )
    fitting = [profile for profile in PROFILES if profile.version <= asked]
    if not fitting:
        raise UsageError(f"MongoDB {asked[0]}.{asked[1]} is not supported", hint="4.4 is the oldest supported version")
    return _lowered(fitting[-1], lowered)


def profiles_of_series(series: str) -> frozenset[ServerProfile]:
    """Those that a server can have of whose version the first two numbers are known, such as "7.0"."""
    whole = {profile_for(series), *(one for one in PROFILES if one.series == _parts(series)[:2])}
    lower = {_lowered(one, below[0]) for one in whole if (below := _BELOW_OWN.get(one.series)) is not None}
    return frozenset(whole | lower)


def lowered_profiles(profiles: Iterable[ServerProfile], compatibility: str | None) -> frozenset[ServerProfile]:
    """Those of the same versions at this feature compatibility version; ``None``: at each one's own."""
    lowered = None if compatibility is None or not _SERIES.fullmatch(compatibility) else _series(compatibility)
    return frozenset(_lowered(profile_for(one.version), lowered) for one in profiles)


def _lowered(profile: ServerProfile, compatibility: tuple[int, int] | None) -> ServerProfile:
    below, changes = _BELOW_OWN.get(profile.series, (None, {}))
    if compatibility is None or compatibility != below:
        return profile
    return replace(profile, compatibility=compatibility, **changes)


def with_compatibility(version: str, compatibility: str | None) -> str:
    """The text that says a server's version and its feature compatibility version: the version alone, where the other
    is its own or not known. Earlier releases of Tailrace read it as the version."""
    plain = without_compatibility(version)
    if compatibility is None or _SERIES.fullmatch(compatibility) is None or _series(compatibility) >= _parts(plain)[:2]:
        return plain
    return f"{plain}{_FCV}{compatibility}"


def without_compatibility(version: str) -> str:
    """The server's version alone."""
    return version.partition(_FCV)[0]


def for_people(version: str) -> str:
    """The text as a sentence has it: "6.0.27 with the feature compatibility version 5.0"."""
    plain, _, compatibility = version.partition(_FCV)
    return f"{plain} with the feature compatibility version {compatibility}" if compatibility else plain


def knowledge_of(version: str | Sequence[int]) -> Knowledge:
    """What the rules for a version are taken from: ``measured`` against a server of its series (7.0, not 7.3),
    ``derived`` from published documents or from the rules of the series before it, ``unknown`` where it is of a later
    major version than any profile. Raises as ``profile_for``.
    """
    profile_for(version)
    major, minor = _parts(version)[:2]
    if major > PROFILES[-1].version[0]:
        return "unknown"
    measured = {one.series for one in PROFILES if one.measured}
    return "measured" if (major, minor) in measured else "derived"


def _parts(version: str | Sequence[int]) -> tuple[int, ...]:
    """At least two and at most three numbers. Raises ValueError or IndexError for what is no version."""
    words = without_compatibility(version).split(".")[:3] if isinstance(version, str) else list(version)[:3]
    if not words:
        raise IndexError
    return (*(_number(word) for word in words), 0)[: max(2, len(words))]


def _compatibility(version: str | Sequence[int]) -> tuple[int, int] | None:
    """The feature compatibility version that a text names. Raises ValueError for what is none."""
    said = version.partition(_FCV)[2] if isinstance(version, str) else ""
    return _series(said) if said else None


def _series(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _number(word: str | int) -> int:
    """A part of a version: its digits, so that the last part of "7.0.28-rc1" is 28."""
    return int(word) if isinstance(word, int) else int(word.partition("-")[0])


def chosen_profile(version: str | Sequence[int]) -> ServerProfile:
    """As ``profile_for``, for a version that the caller names: a version that is not known yet is a UsageError."""
    profile = profile_for(version)
    parts = without_compatibility(version).split(".") if isinstance(version, str) else version
    if int(parts[0]) > PROFILES[-1].version[0]:
        raise UsageError(
            f"nothing is known about the events of MongoDB {'.'.join(map(str, parts))}",
            hint=f"{PROFILES[-1].name} is the newest version that can be asked for",
        )
    return profile


def differences() -> list[ProfileRow]:
    """The table in words."""
    columns = [column for column in fields(ServerProfile) if "says" in column.metadata]
    return [
        ProfileRow(
            column.metadata["says"],
            {profile.name: _word(getattr(profile, column.name)) for profile in PROFILES},
            column.metadata["evidence"],
        )
        for column in columns
    ]


def _word(value: bool | int | str) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
