"""What Spark writes into a checkpoint for us: how far the stream has come, as readable JSON.

    {"clusterTime": {"i": 1, "t": 1700000000}, "entries": {"rs0": {"digest": "0c1f...", "ts": "6553f10000000001"}},
     "invalidated": false, "shards": {"rs0": [1700000000, 1]}, "stream": {...}, "token": "826553F100...", "version": 1}

``clusterTime`` is the time T that the stream has reached on every shard: events up to and with T have been given.
``shards`` says how far each shard's oplog was read. ``entries`` marks an entry of each oplog at or before T, by which a
deployment that was restored from an older backup is distinguished from the one that was read
(``tailrace.core.oplog.witness``). ``token`` is the high-water token just after T: any driver can resume after it and
gets what comes next. ``stream`` is the stream's identity, so that a checkpoint is never read by another stream.
``serverVersion`` is the one whose events the micro-batch that ends here holds: they are the same when Spark runs it
again after an upgrade. ``resume`` stands only where a stream starts by a token that has not been passed yet, ``opened``
only where a shard was added to the cluster in the micro-batch that ends here: it is read after that time. ``snapshot``
says how far the copy before the stream has come (``snapshot_position``), and ``images`` which directory holds the
states of its exact images. There are no secrets: no URI, and of the user's pipeline a digest only.

Spark compares offsets as texts (a source that changed the order of keys made 64 micro-batches of one), so every key is
written in sorted order and nothing optional wavers between two spellings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark, marks_from_json, marks_to_json
from tailrace.errors import InvalidResumeToken, UsageError
from tailrace.lake.spark.query.options import V2_TOKENS, ReadOptions
from tailrace.lake.spark.query.snapshot_position import SnapshotPosition

VERSION = 1
#: The version of offsets in the middle of a copy: earlier releases would read them as if the copy had ended.
VERSION_OF_COPIES = 2

#: An option that is set when a stream cannot go on otherwise, with its checkpoint.
_NOT_OF_THE_EVENTS: Final = ("ignoreRemovedShards",)

_OTHER_SETTINGS: Final = "Give the stream its old settings back, or a new checkpointLocation"
_OTHER_DEPLOYMENT: Final = (
    "Begin a new checkpointLocation: with the uri of the config server or of a mongos for all shards, and with "
    "startAtOperationTime at the old checkpoint's clusterTime plus one increment to go on where it ended"
)


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """What makes two streams the same: the events they would give.

    ``settings``      pairs of text, sorted by name
    ``replica_sets``  pairs of a replica set's name and its id (``""`` where the server does not tell); of a stream over
                      a sharded cluster none, since shards come and go
    ``cluster``       the cluster's id; of a replica set that is a shard and read alone, the cluster that it is in
    """

    settings: tuple[tuple[str, str], ...]
    replica_sets: tuple[tuple[str, str], ...]
    cluster: str = ""

    @classmethod
    def of(cls, options: ReadOptions, replica_sets: Mapping[str, str], cluster: str = "") -> StreamIdentity:
        chosen = {name: value for name, value in options.stage.items() if name not in _NOT_OF_THE_EVENTS}
        settings = {name: _text(value) for name, value in chosen.items() if value is not False}
        settings["scope"] = str(options.scope)
        settings["scopeKind"] = options.scope.kind
        if options.selection is not None:
            settings["collections"] = json.dumps(sorted(options.selection.patterns), ensure_ascii=False)
        if options.pipeline:
            settings["pipelineSha256"] = hashlib.sha256(b"".join(options.pipeline)).hexdigest()
            if options.collation is not None:
                settings["collationSha256"] = hashlib.sha256(options.collation).hexdigest()
        if options.v2_tokens:
            settings[V2_TOKENS] = "true"
        return cls(tuple(sorted(settings.items())), tuple(sorted(replica_sets.items())), cluster)

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {"cluster": self.cluster} if self.cluster else {}
        if self.replica_sets:
            result["replicaSets"] = dict(self.replica_sets)
        return {**result, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamIdentity:
        # One of the two is always there.
        cluster = value["cluster"] if "replicaSets" not in value else value.get("cluster", "")
        replica_sets = tuple(sorted(value.get("replicaSets", {}).items()))
        return cls(tuple(sorted(value["settings"].items())), replica_sets, cluster)

    def require_same(self, checkpoint: StreamIdentity) -> None:
        """``UsageError`` where ``checkpoint`` was written by another stream; it names what differs."""
        differences = [
            f"{name} was {_quoted(old)} and is {_quoted(new)}"
            for name, old, new in _differences(dict(checkpoint.settings), dict(self.settings))
        ]
        deployments = self._deployment_differences(checkpoint)
        if differences or deployments:
            raise UsageError(
                f"this checkpoint belongs to another stream: {'; '.join(differences + deployments)}",
                hint=_OTHER_SETTINGS if checkpoint._kind == self._kind else _OTHER_DEPLOYMENT,
            )

    @property
    def _kind(self) -> tuple[bool, bool]:
        """A replica set, a shard that is read alone, or a cluster."""
        return bool(self.replica_sets), bool(self.cluster)

    @property
    def _is_whole_cluster(self) -> bool:
        return not self.replica_sets

    def _deployment_differences(self, checkpoint: StreamIdentity) -> list[str]:
        if checkpoint._is_whole_cluster != self._is_whole_cluster:
            return [f"it was made on {checkpoint._described()} and the uri leads to {self._described()}"]
        if self._is_whole_cluster:
            if checkpoint.cluster == self.cluster:
                return []
            return [f"it was made on {checkpoint._described()} and the uri leads to another, {self._described()}"]
        old_sets, new_sets = dict(checkpoint.replica_sets), dict(self.replica_sets)
        if set(old_sets) != set(new_sets):
            return [f"replica set was {_quoted(', '.join(old_sets))} and is {_quoted(', '.join(new_sets))}"]
        differences = [
            f"replica set '{name}' is a different one of the same name"
            for name, old, new in _differences(old_sets, new_sets)
            if old and new
        ]
        if self.cluster and checkpoint.cluster != self.cluster:
            # Read on, it would give one shard's events for all.
            became = f"of another cluster, '{self.cluster}'" if checkpoint.cluster else f"of cluster '{self.cluster}'"
            differences.append(f"replica set '{', '.join(new_sets)}' has become a shard {became}")
        return differences

    def _described(self) -> str:
        if self._is_whole_cluster:
            return f"the sharded cluster '{self.cluster}'"
        return f"the replica set '{', '.join(name for name, _ in self.replica_sets)}'"


def _text(value: object) -> str:
    return "true" if value is True else str(value)


def _quoted(text: str | None) -> str:
    return "not set" if text is None else f"'{text}'"


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    return [(name, old.get(name), new.get(name)) for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


@dataclass(frozen=True, slots=True)
class Resume:
    """The token that a stream starts by: ``option`` is ``resumeAfter`` or ``startAfter``."""

    option: str
    token: ResumeToken

    def to_json(self) -> dict[str, Any]:
        bits = self.token.type_bits
        return {"data": self.token.data, "option": self.option, "typeBits": None if bits is None else bits.hex()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Resume:
        document: dict[str, Any] = {"_data": value["data"]}
        if value["typeBits"] is not None:
            document["_typeBits"] = bytes.fromhex(value["typeBits"])
        return cls(value["option"], ResumeToken.parse(document))


@dataclass(frozen=True, slots=True)
class Offset:
    """A position between micro-batches: everything at or before ``cluster_time`` has been given.

    ``opened`` names the shards that took part for the first time in the micro-batch that ends here, and after which
    cluster time they are read. ``images`` is the id of the directory with the states of exact images. ``entries`` are
    marks of entries at or before ``cluster_time``, by the oplog's name; during a copy, of newer ones.
    ``server_version`` is the one whose events the micro-batch that ends here holds; ``None`` if none ends here, or if
    an earlier release has planned it.
    """

    cluster_time: ClusterTime
    shards: tuple[tuple[str, ClusterTime], ...]
    stream: StreamIdentity
    token_version: int = 1
    invalidated: bool = False
    resume: Resume | None = None
    snapshot: SnapshotPosition | None = None
    opened: tuple[tuple[str, ClusterTime], ...] = ()
    images: str | None = None
    entries: tuple[tuple[str, EntryMark], ...] = ()
    server_version: str | None = None

    @property
    def shard_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.shards)

    def advanced(
        self,
        to: ClusterTime,
        *,
        invalidated: bool = False,
        opened: Mapping[str, ClusterTime] | None = None,
        closed: Collection[str] = (),
    ) -> Offset:
        """The same stream at a later cluster time; a token to start by is after it then. Shards in ``opened`` take
        part from there, those in ``closed`` no longer."""
        opened = opened or {}
        names = sorted((self.shard_names | set(opened)) - set(closed))
        return replace(
            self,
            cluster_time=to,
            shards=tuple((name, to) for name in names),
            invalidated=invalidated,
            resume=None,
            snapshot=None,
            opened=tuple(sorted(opened.items())),
        )

    def to_json(self) -> dict[str, Any]:
        """Keys in sorted order, on every level: Spark compares the text."""
        result: dict[str, Any] = {
            "clusterTime": {"i": self.cluster_time.increment, "t": self.cluster_time.seconds},
        }
        if self.entries:
            result["entries"] = marks_to_json(dict(self.entries))
        if self.images is not None:
            result["images"] = self.images
        result["invalidated"] = self.invalidated
        if self.opened:
            result["opened"] = _times_to_json(self.opened)
        if self.resume is not None:
            result["resume"] = self.resume.to_json()
        if self.server_version is not None:
            result["serverVersion"] = self.server_version
        result["shards"] = _times_to_json(self.shards)
        if self.snapshot is not None:
            result["snapshot"] = self.snapshot.to_json()
        result["stream"] = self.stream.to_json()
        # Events at T itself have been given, and a high-water token of T stands before them.
        after = self.cluster_time.tick()
        result["token"] = ResumeToken.high_water_mark(after, version=self.token_version).data
        result["version"] = VERSION if self.snapshot is None else VERSION_OF_COPIES
        return result

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offset:
        """``UsageError`` for JSON that no version of this source known here has written."""
        if not isinstance(value, Mapping):
            raise UsageError(
                f"this checkpoint holds an offset that is damaged or was not written by Tailrace: {_brief(value)}",
                hint="Restore the checkpoint, or use a new checkpointLocation",
            )
        if value.get("version", VERSION) not in (VERSION, VERSION_OF_COPIES):
            raise UsageError(
                f"this checkpoint has offsets of version {value['version']}; this release reads versions {VERSION} and "
                f"{VERSION_OF_COPIES}",
                hint="Use the release that wrote it, or a new checkpointLocation",
            )
        try:
            time = value["clusterTime"]
            return cls(
                cluster_time=ClusterTime.of(time["t"], time["i"]),
                shards=_times_from_json(value["shards"]),
                stream=StreamIdentity.from_json(value["stream"]),
                token_version=ResumeToken.from_hex(value["token"]).version,
                invalidated=bool(value["invalidated"]),
                resume=Resume.from_json(value["resume"]) if "resume" in value else None,
                snapshot=SnapshotPosition.from_json(value["snapshot"]) if "snapshot" in value else None,
                opened=_times_from_json(value.get("opened", {})),
                images=str(value["images"]) if "images" in value else None,
                entries=tuple(sorted(marks_from_json(value.get("entries", {})).items())),
                server_version=str(value["serverVersion"]) if "serverVersion" in value else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, InvalidResumeToken) as error:
            raise UsageError(
                "this checkpoint holds an offset that is damaged or was not written by Tailrace "
                f"({type(error).__name__}: {error})",
                hint="Restore the checkpoint, or use a new checkpointLocation",
            ) from None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _times_to_json(times: tuple[tuple[str, ClusterTime], ...]) -> dict[str, list[int]]:
    return {name: [time.seconds, time.increment] for name, time in sorted(times)}


def _times_from_json(value: Mapping[str, Any]) -> tuple[tuple[str, ClusterTime], ...]:
    return tuple((name, ClusterTime.of(t, i)) for name, (t, i) in sorted(value.items()))
