"""Which server version a member runs, as far as it decides the events. Its series follows from its hello, which PyMongo
keeps. Where a patch release has changed something, the member is asked for the whole version: once for each of its
processes, which its hello distinguishes. Its feature compatibility version is a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from pymongo import MongoClient
from pymongo.errors import OperationFailure
from pymongo.server_description import ServerDescription

from tailrace.core.plan.profile import (
    ServerProfile,
    lowered_profiles,
    profile_for,
    profiles_of_series,
    with_compatibility,
    without_compatibility,
)
from tailrace.read.source.compatibility import Compatibility
from tailrace.read.source.wire_version import series_of

HostAndPort: TypeAlias = tuple[str, int | None]
_TRIES: Final = 5


class MemberVersion(NamedTuple):
    """A member's version: the whole of it, or its series, and the profiles that this can be."""

    text: str
    profiles: frozenset[ServerProfile]

    @classmethod
    def whole(cls, version: str | Sequence[int]) -> MemberVersion:
        """One that is known in full, such as "7.0.28", or "7.0.28-fcv6.0"."""
        text = version if isinstance(version, str) else ".".join(map(str, version))
        return cls(text, frozenset({profile_for(version)}))

    @classmethod
    def of_series(cls, series: str) -> MemberVersion:
        """One of which the first two numbers are known."""
        return cls(series, profiles_of_series(series))

    def at(self, compatibility: str | None) -> MemberVersion:
        """The same at this feature compatibility version; where it is not known (``None``), at its own."""
        return MemberVersion(
            with_compatibility(self.text, compatibility), lowered_profiles(self.profiles, compatibility)
        )

    @property
    def is_whole(self) -> bool:
        """Whether it has all numbers."""
        return without_compatibility(self.text).count(".") > 1

    @property
    def is_certain(self) -> bool:
        """Whether it is known whose events a member of this version gives."""
        return len(self.profiles) == 1

    @property
    def needs_all_numbers(self) -> bool:
        """Whether a patch release of the series has changed something, and its number is not known."""
        return not self.is_whole and len({one.version for one in self.profiles}) > 1


class MemberVersions:
    """The versions of the members that one client reads from."""

    def __init__(self, client: MongoClient[Any]) -> None:
        self._client = client
        #: What the processes have said that were asked.
        self._said: dict[tuple[HostAndPort, object], MemberVersion] = {}
        self.compatibility = Compatibility(client)

    def of(self, address: HostAndPort) -> MemberVersion | None:
        """That of a member; ``None`` where PyMongo does not know the member at the moment. Raises PyMongoError."""
        member = self._member(address)
        if member is None or not member.max_wire_version:
            return None
        return self._binary(address, member).at(self.compatibility.known())

    def _binary(self, address: HostAndPort, member: ServerDescription) -> MemberVersion:
        """What the member's process is, whatever it is set to."""
        version = MemberVersion.of_series(series_of(member.max_wire_version))
        if not version.needs_all_numbers:
            return version
        process = process_of(member)
        said = self._said.get((address, process))
        if said is None:
            text = self._asked(address)
            if text is None or self._process(address) != process:
                return version
            said = self._said[address, process] = MemberVersion.whole(text)
        return said

    def _member(self, address: HostAndPort) -> ServerDescription | None:
        return self._client.topology_description.server_descriptions().get(address)

    def _process(self, address: HostAndPort) -> object:
        member = self._member(address)
        return None if member is None else process_of(member)

    def _asked(self, address: HostAndPort) -> str | None:
        """What the member at ``address`` says; ``None`` where it cannot be asked."""
        if self._client.primary == address:
            text = str(self._client.server_info()["version"])
            return text if self._client.primary == address else None
        return self._logged(address)

    def _logged(self, address: HostAndPort) -> str | None:
        """What a secondary has noted of its start in a collection of its own. Whose answer it is, a cursor tells."""
        starts = self._client.get_database("local", read_preference=self._client.read_preference)["startup_log"]
        for _ in range(_TRIES):
            try:
                with starts.find({}, {"buildinfo.version": 1}).sort("$natural", -1).limit(1) as cursor:
                    found = next(cursor, None)
                    if found is None or cursor.address == address:
                        return None if found is None else str(found["buildinfo"]["version"])
            except OperationFailure:
                return None  # the user may read the oplog alone
        return None


def process_of(member: ServerDescription) -> object:
    """What tells a member's process from the one before; ``None`` where it does not say."""
    return None if member.topology_version is None else member.topology_version["processId"]


class PresentMember(NamedTuple):
    """The process that a client reads from at the moment."""

    address: HostAndPort
    series: str
    process: object


def present_member(client: MongoClient[Any]) -> PresentMember | None:
    """The primary, or else a member that can be read, as PyMongo knows them at the moment; ``None`` where it knows
    none. As long as this is the same, so is the version."""
    known = client.topology_description.server_descriptions().values()
    members = sorted(
        (one for one in known if one.is_readable and one.max_wire_version), key=lambda one: not one.is_writable
    )
    if not members:
        return None
    return PresentMember(members[0].address, series_of(members[0].max_wire_version), process_of(members[0]))
