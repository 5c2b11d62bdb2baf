"""The time from which an archive has the entries of another feature compatibility version: the entries that set it say
so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tailrace.core.oplog.compatibility import SettingRead
from tailrace.core.plan.profile import profile_for, with_compatibility, without_compatibility
from tailrace.read.archive.layout import VersionNote


def set_since(before: VersionNote, read: Mapping[str, Iterable[SettingRead]]) -> list[VersionNote]:
    """What comes after the note ``before``, of servers that have kept its version: a note for each entry of those
    ``read``, by oplog, from which on the lowest setting of all shards is another. Each is taken to have had that of
    ``before`` until then."""
    plain = without_compatibility(before.version)
    versions = dict.fromkeys(read, before.version)
    entries = sorted((one.time, name, one.version) for name, settings in read.items() for one in settings)
    notes = [before]
    for time, name, setting in entries:
        if time <= before.since:
            continue
        versions[name] = with_compatibility(plain, setting)
        lowest = min(versions.values(), key=lambda version: profile_for(version).rank)
        if lowest != notes[-1].version:
            notes.append(VersionNote(lowest, time))
    return notes[1:]
