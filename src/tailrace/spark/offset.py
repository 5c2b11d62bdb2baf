"""What Spark writes into a checkpoint for us: how far the stream has come, as readable JSON.

    {"clusterTime": {"i": 1, "t": 1700000000}, "invalidated": false, "shards": {"rs0": [1700000000, 1]},
     "stream": {...}, "token": "826553F100...", "version": 1}

``clusterTime`` is the time T that the stream has reached on every shard: events up to and with T have been given.
``shards`` says how far each shard's oplog was read. ``token`` is the high-water token just behind T: any driver can
resume after it and gets what comes next. ``stream`` is the stream's identity, so that a checkpoint is never read by
another stream. ``resume`` stands only where a stream starts by a token that has not been passed yet. There are no
secrets: no URI, and of the user's pipeline a digest only.

Spark compares offsets as texts (a source that changed the order of keys made 64 micro-batches of one), so every key is
written in sorted order and nothing optional wavers between two spellings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tailrace.errors import InvalidResumeToken, UsageError
from tailrace.event.resume_token import ResumeToken
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.spark.options import V2_TOKENS, ReadOptions

VERSION = 1


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """What makes two streams the same: the events they would give. ``settings`` are pairs of text, sorted by name;
    ``replica_sets`` pairs of a replica set's name and its id (``""`` where the server does not tell)."""

    settings: tuple[tuple[str, str], ...]
    replica_sets: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, options: ReadOptions, replica_sets: Mapping[str, str]) -> StreamIdentity:
        settings = {name: _text(value) for name, value in options.stage.items() if value is not False}
        settings["scope"] = str(options.scope)
        settings["scopeKind"] = options.scope.kind
        if options.pipeline:
            settings["pipelineSha256"] = hashlib.sha256(b"".join(options.pipeline)).hexdigest()
        if options.v2_tokens:
            settings[V2_TOKENS] = "true"
        return cls(tuple(sorted(settings.items())), tuple(sorted(replica_sets.items())))

    def to_json(self) -> dict[str, Any]:
        return {"replicaSets": dict(self.replica_sets), "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamIdentity:
        return cls(tuple(sorted(value["settings"].items())), tuple(sorted(value["replicaSets"].items())))

    def require_same(self, checkpoint: StreamIdentity) -> None:
        """``UsageError`` where ``checkpoint`` was written by another stream; it names what differs."""
        differences = [
            f"{name} was {_quoted(old)} and is {_quoted(new)}"
            for name, old, new in _differences(dict(checkpoint.settings), dict(self.settings))
        ]
        old_sets, new_sets = dict(checkpoint.replica_sets), dict(self.replica_sets)
        if set(old_sets) != set(new_sets):
            differences.append(f"replica set was {_quoted(', '.join(old_sets))} and is {_quoted(', '.join(new_sets))}")
        else:
            differences += [
                f"replica set '{name}' is another one of the same name"
                for name, old, new in _differences(old_sets, new_sets)
                if old and new
            ]
        if differences:
            raise UsageError(
                f"this checkpoint belongs to another stream: {'; '.join(differences)}",
                hint="Give the stream its old settings back, or a new checkpointLocation",
            )


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
    """A position between micro-batches: everything at or before ``cluster_time`` has been given."""

    cluster_time: ClusterTime
    shards: tuple[tuple[str, ClusterTime], ...]
    stream: StreamIdentity
    token_version: int = 1
    invalidated: bool = False
    resume: Resume | None = None

    def advanced(self, to: ClusterTime, *, invalidated: bool = False) -> Offset:
        """The same stream at a later cluster time; a token to start by is behind it then."""
        shards = tuple((name, to) for name, _ in self.shards)
        return replace(self, cluster_time=to, shards=shards, invalidated=invalidated, resume=None)

    def to_json(self) -> dict[str, Any]:
        """Keys in sorted order, on every level: Spark compares the text."""
        result: dict[str, Any] = {
            "clusterTime": {"i": self.cluster_time.increment, "t": self.cluster_time.seconds},
            "invalidated": self.invalidated,
        }
        if self.resume is not None:
            result["resume"] = self.resume.to_json()
        result["shards"] = {name: [time.seconds, time.increment] for name, time in sorted(self.shards)}
        result["stream"] = self.stream.to_json()
        # Events at T itself have been given, and a high-water token of T stands before them.
        after = self.cluster_time.tick()
        result["token"] = ResumeToken.high_water_mark(after, version=self.token_version).data
        result["version"] = VERSION
        return result

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offset:
        """``UsageError`` for JSON that no version of this source known here has written."""
        if value.get("version", VERSION) != VERSION:
            raise UsageError(
                f"this checkpoint has offsets of version {value['version']}; this release reads version {VERSION}",
                hint="Use the release that wrote it, or a new checkpointLocation",
            )
        try:
            time = value["clusterTime"]
            return cls(
                cluster_time=ClusterTime.of(time["t"], time["i"]),
                shards=tuple((name, ClusterTime.of(t, i)) for name, (t, i) in sorted(value["shards"].items())),
                stream=StreamIdentity.from_json(value["stream"]),
                token_version=ResumeToken.from_hex(value["token"]).version,
                invalidated=bool(value["invalidated"]),
                resume=Resume.from_json(value["resume"]) if "resume" in value else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, InvalidResumeToken) as error:
            raise UsageError(
                f"this checkpoint holds an offset that is not ours or is damaged ({type(error).__name__}: {error})",
                hint="Restore the checkpoint, or use a new checkpointLocation",
            ) from None
