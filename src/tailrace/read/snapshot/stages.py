"""The user's stages, for events that no stream's own pipeline makes: those of a copy, and those that a listener looks
through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo import MongoClient

from tailrace.core.expression.language.version import USUAL
from tailrace.core.expression.stages.pipeline import CompiledPipeline, compile_stages
from tailrace.core.expression.values.collation import parse_collation
from tailrace.core.plan.profile import ServerProfile, profile_for
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster


def compiled_for(
    deployment: MongoClient[Any] | Cluster | None,
    stages: Sequence[bytes],
    *,
    collation: bytes | None = None,
    show_expanded_events: bool = False,
    profile: ServerProfile | None = None,
) -> CompiledPipeline:
    """The stages in the language of the deployment's server, as its streams take them: of a cluster, of the lowest
    version of its shards. Without a deployment they are those of 6.0.

    ``stages``     each one's BSON
    ``collation``  its BSON
    ``profile``    the one that was chosen for the streams, whatever the deployment's version

    Raises UsageError as ``compile_stages``, and SourceError where the deployment cannot be asked.
    """
    order = None if collation is None else parse_collation(collation)
    if profile is None and deployment is not None and stages:
        profile = profile_for(version_of(deployment))
    version = USUAL if profile is None else profile.version
    return compile_stages(stages, collation=order, show_expanded_events=show_expanded_events, version=version)


def version_of(deployment: MongoClient[Any] | Cluster) -> str:
    """The version whose language streams of the deployment speak."""
    if isinstance(deployment, Cluster):
        return deployment.server_version()
    return MongodSource(deployment).server_version
