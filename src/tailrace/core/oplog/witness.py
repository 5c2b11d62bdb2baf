"""A witness: whose history a store belongs to, and one entry of each oplog at the store's position.

A position alone (a cluster time) says nothing about the deployment that it was read from: another deployment has a
clock too, and one that was restored from an older backup goes through the same times again with other writes. So a
store keeps the identity of its deployment and marks of entries next to its position, and code that continues it
compares them with what the deployment holds now, before anything is written (``source/witness.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.erased import entry_digest


class EntryMark(NamedTuple):
    """One entry of an oplog: its cluster time, and the first 32 hexadecimal digits of the SHA-256 of its bytes."""

    time: ClusterTime
    digest: str

    @classmethod
    def of(cls, time: ClusterTime, entry: bytes) -> EntryMark:
        """The mark of the entry whose ``ts`` is ``time``: of the entry as it was written, if something was erased from
        it since."""
        return cls(time, entry_digest(entry))


def marks_to_json(marks: Mapping[str, EntryMark]) -> dict[str, dict[str, str]]:
    """Marks by the oplog's name as an object to keep, its keys in sorted order on every level."""
    return {name: {"digest": mark.digest, "ts": f"{mark.time:016x}"} for name, mark in sorted(marks.items())}


def marks_from_json(value: Mapping[str, Any]) -> dict[str, EntryMark]:
    """What ``marks_to_json`` gave. Raises LookupError, TypeError, AttributeError or ValueError for something else."""
    return {str(name): EntryMark(ClusterTime(int(one["ts"], 16)), str(one["digest"])) for name, one in value.items()}


@dataclass(frozen=True, slots=True)
class DeploymentIdentity:
    """Which deployment something was read from.

    ``replica_sets``  ``settings.replicaSetId`` in hexadecimal, by the name of the oplog: the replica set's, or the
                      shard's. ``""`` where the server does not tell
    ``cluster``       ``clusterId`` of ``config.version``; ``""`` for a replica set, or where the user may not know
    """

    replica_sets: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""

    @property
    def name_and_id(self) -> str | None:
        """A text that distinguishes this deployment from others of its kind, such as ``rs0/6565...`` or
        ``cluster/6565...``; ``None`` where its id is not known, or where it is several replica sets without a cluster's
        id."""
        if self.cluster:
            return f"cluster/{self.cluster}"
        [*known] = ((name, known) for name, known in self.replica_sets.items() if known)
        return "/".join(known[0]) if len(known) == len(self.replica_sets) == 1 else None

    def difference(self, found: DeploymentIdentity) -> str | None:
        """What tells two deployments apart, in words; ``None`` where they may be the same one.

        The shards of a cluster come and go, and a name may be given to another replica set: of two clusters only the
        ids count. Ids that are not known are not compared.
        """
        if self.cluster and found.cluster:
            if self.cluster != found.cluster:
                return f"the cluster's id was {self.cluster} and is {found.cluster}"
            return None
        for name, before in self.replica_sets.items():
            now = found.replica_sets.get(name)
            if now is None and not self.cluster and not found.cluster:
                return f"the replica set was {name} and is {', '.join(found.replica_sets) or 'none'}"
            if now and before and now != before:
                return f"the id of the replica set {name} was {before} and is {now}"
        return None


@dataclass(frozen=True, slots=True)
class Witness:
    """Whose history a store belongs to, and an entry of each oplog, by the oplog's name, at or before its position."""

    identity: DeploymentIdentity
    entries: Mapping[str, EntryMark] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """The document to keep, of strings alone, so that JSON and BSON both hold it."""
        return {
            "replicaSets": dict(self.identity.replica_sets),
            **({"cluster": self.identity.cluster} if self.identity.cluster else {}),
            "entries": marks_to_json(self.entries),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Witness:
        """Read what ``to_document`` gave. Raises ValueError where it is something else."""
        try:
            sets = {str(name): str(found) for name, found in document["replicaSets"].items()}
            identity = DeploymentIdentity(sets, str(document.get("cluster", "")))
            entries = marks_from_json(document["entries"])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no witness: {error!r}") from None
        return cls(identity, entries)
