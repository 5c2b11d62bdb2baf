"""What ``tailrace doctor`` and the console look at: is a deployment fit for reading change events from its oplog?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from pymongo.errors import OperationFailure, PyMongoError

from tailrace.cli.doctor_rights import ANY_NAME, look_ups, replica_set_id
from tailrace.cli.finding import Finding
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import for_people, knowledge_of, profile_for
from tailrace.errors import TailraceError
from tailrace.read.source.compatibility import compatibility_of
from tailrace.read.source.failure import describe_members, source_error
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.shard_identity import ONE_SHARD_HINT, shard_name
from tailrace.read.source.topology import Cluster
from tailrace.read.source.uri import ConnectionString

_HOURS_GOOD: Final = 24
_HOURS_MIN: Final = 1
_CANNOT_ASK: Final = (
    "This user may not ask for the feature compatibility version, so streams assume the version's own: grant find on "
    "admin.system.version"
)
_MAJORITY_LAG_SECONDS_MAX: Final = 30
_NAMED_MAX: Final = 5
_UNAUTHORIZED: Final = 13
_IMAGES_BEFORE_6: Final = (
    "They came with MongoDB 6.0; fullDocumentBeforeChange works for collections with recordPreImages, which log them"
)


def examine_deployment(source: MongodSource, uri: ConnectionString) -> Iterator[Finding]:
    """The findings of a replica set, or of every shard of a cluster."""
    try:
        cluster = Cluster.discover(source.client, uri, {})
    except TailraceError:
        yield from examine(source)  # its first look at the replica set says the same
        return
    if cluster is None:
        own = shard_name(source.client)
        if own is not None:
            found = f"this is shard {own} of a cluster: only its part is seen"
            yield Finding("cluster", "warn", found, ONE_SHARD_HINT)
        yield from examine(source)
        return
    with closing(cluster):
        try:
            shards = cluster.shards()
        except TailraceError as error:
            yield Finding("cluster", "fail", str(error.message), error.hint or "")
            return
        names = ", ".join(shard.name for shard in shards)
        yield Finding("cluster", "ok" if shards else "fail", f"{len(shards)} shards: {names}" if shards else "no shard")
        for shard in shards:
            for finding in examine(MongodSource(cluster.client(shard.name), retry_seconds=10.0)):
                yield replace(finding, check=f"{shard.name}: {finding.check}")


def examine(source: MongodSource) -> Iterator[Finding]:
    """The findings, one by one. The others are made only if the first two are good."""
    for check, look in (("replica set", _replica_set), ("rights", _rights)):
        finding = _look(check, look, source)
        yield finding
        if finding.status == "fail":
            return
    yield from _unusual_member(source)
    for check, look in (
        ("version", _version),
        ("oplog window", _window),
        ("majority reads", _majority),
        ("look-ups and copies", look_ups),
        ("replica set id", replica_set_id),
        ("pre- and post-images", _images),
    ):
        yield _look(check, look, source)


def _look(check: str, look: Callable[[MongodSource], Finding], source: MongodSource) -> Finding:
    try:
        return look(source)
    except TailraceError as error:
        return Finding(check, "fail", str(error.message), error.hint or "")
    except PyMongoError as error:
        failure = source_error(error, source.client)
        return Finding(check, "fail", str(failure.message), failure.hint or "")


def _replica_set(source: MongodSource) -> Finding:
    name = source.name
    return Finding("replica set", "ok", f"{name} ({describe_members(source.client)})")


def _unusual_member(source: MongodSource) -> Iterator[Finding]:
    """That this is a hidden or a delayed member; nothing of any other."""
    try:
        hello = source.client.admin.command("hello", read_preference=source.client.read_preference)
    except PyMongoError:
        return  # the checks after this one say so
    found = _unusual(hello)
    if found is not None:
        yield found


def _unusual(hello: Mapping[str, Any]) -> Finding | None:
    delay = int(hello.get("secondaryDelaySecs") or hello.get("slaveDelay") or 0)
    if not (hello.get("hidden") or delay):
        return None
    applied = hello.get("lastWrite", {}).get("opTime", {}).get("ts")
    known = hello.get("$clusterTime", {}).get("clusterTime")
    lag = "" if applied is None or known is None else f", {max(0, known.time - applied.time)} s behind the others now"
    kind = f"a delayed member ({delay} s)" if delay else "a hidden member"
    advice = "Everything that reads works here, and puts no load on the members that applications use"
    if delay:
        advice += f"; every event comes {delay} s late"
    return Finding("member", "warn" if delay else "ok", f"{kind}{lag}", advice)


def _rights(source: MongodSource) -> Finding:
    source.oldest()
    return Finding("rights", "ok", "this user may read local.oplog.rs")


def _version(source: MongodSource) -> Finding:
    finding = version_finding(source.server_version)
    if compatibility_of(source.client) is not None:
        return finding
    return replace(finding, advice=". ".join(part for part in (finding.advice, _CANNOT_ASK) if part))


def version_finding(version: str) -> Finding:
    """What is known about the deployment's version, and what to do where that is not enough."""
    known, rules = knowledge_of(version), profile_for(version).name
    if known == "measured":
        return Finding("version", "ok", f"MongoDB {for_people(version)}, measured")
    means = {
        "derived": f"derived: the rules of {rules}, which were not measured on this version",
        "unknown": f"unknown: later than any version that Tailrace knows. It is read by the rules of {rules}",
    }
    return Finding(
        "version",
        "warn",
        f"MongoDB {for_people(version)}, {means[known]}",
        "Measure it here before you rely on it: tailrace compare URI --duration 1h",
    )


def _window(source: MongodSource) -> Finding:
    oldest, complete = source.oldest()
    hours = (source.newest().seconds - oldest.seconds) / 3600
    size = _oplog_size(source)
    if complete:
        return Finding(
            "oplog window", "ok", f"complete history, {hours:.1f} hours since the replica set was created{size}"
        )
    found = f"{hours:.1f} hours{size}"
    if hours >= _HOURS_GOOD:
        return Finding("oplog window", "ok", found)
    advice = (
        "A reader that stops for longer loses its place: "
        "enlarge the oplog with replSetResizeOplog (size, minRetentionHours)"
    )
    return Finding("oplog window", "warn" if hours >= _HOURS_MIN else "fail", found, advice)


def _oplog_size(source: MongodSource) -> str:
    try:
        stats = source.client.local.command("collStats", "oplog.rs")
    except OperationFailure:
        return ""  # the right to see it is not needed for reading
    return f", {stats['size'] / 2**20:,.0f} of {stats['maxSize'] / 2**20:,.0f} MB used"


def _majority(source: MongodSource) -> Finding:
    newest, applied = source.newest(), source.operation_time()
    lag = applied.seconds - newest.seconds
    if newest == ClusterTime(0) or lag > _MAJORITY_LAG_SECONDS_MAX:
        return Finding(
            "majority reads",
            "warn",
            f"the majority is {lag} s behind the newest entry",
            "Events come only when a majority of the members has them: check the members that lag or are down",
        )
    return Finding("majority reads", "ok", f"majority-committed up to {newest}")


def _images(source: MongodSource) -> Finding:
    if not profile_for(source.server_version).expanded_events_and_images:
        return Finding("pre- and post-images", "warn", "this version stores no images", _IMAGES_BEFORE_6)
    names, unreadable = _collections_with_images(source.client)
    if unreadable:
        few = f"{len(unreadable)} of the databases" if len(unreadable) > 1 else f"the database {unreadable[0]}"
        return Finding(
            "pre- and post-images",
            "warn",
            f"{few} cannot be examined: a name that is not UTF-8" + (f"; kept for {', '.join(names)}" if names else ""),
            "No driver can send such a name; what is stored there cannot be read, and everything else can",
        )
    complaint = _complaint_about_reading_images(source)
    if not names and complaint is not None:
        advice = (
            f"Only `tailrace archive` needs it now (or --no-pre-images): no collection keeps any. {complaint.advice}"
        )
        return replace(complaint, advice=advice)
    if not names:
        return Finding(
            "pre- and post-images",
            "ok",
            "no collection that this user sees keeps them (needed for fullDocumentBeforeChange and exact fullDocument)",
        )
    if complaint is not None:
        return complaint
    shown = ", ".join(names[:_NAMED_MAX]) + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
    return Finding("pre- and post-images", "ok", f"kept {_expiry(source.client)} for {shown}")


def _complaint_about_reading_images(source: MongodSource) -> Finding | None:
    """The right to read the images themselves, which reading the oplog does not bring."""
    try:
        source.client.config["system.preimages"].find_one({}, {"_id": 1})
    except OperationFailure as error:
        failure = source_error(error, source.client)
        return Finding("pre- and post-images", "warn", str(failure.message), failure.hint or "")
    return None


def _collections_with_images(client: Any) -> tuple[list[str], list[str]]:
    """The collections that keep images, and the databases whose names are not UTF-8. Such names are text here all the
    same: each byte that is not UTF-8 is a surrogate, and is shown as a number."""
    enabled = {"options.changeStreamPreAndPostImages.enabled": True}
    listed = client.admin.command("listDatabases", nameOnly=True, codec_options=ANY_NAME)
    names, unreadable = [], []
    for database in (one["name"] for one in listed["databases"]):
        if database in ("admin", "config", "local"):
            continue
        if not _is_utf8(database):
            unreadable.append(database)
            continue
        try:
            found = client.get_database(database, codec_options=ANY_NAME).list_collections(filter=enabled)
            names += [f"{database}.{collection['name']}" for collection in found]
        except OperationFailure as error:
            if error.code != _UNAUTHORIZED:
                raise  # one that this user may not look at is none that it sees
    return names, unreadable


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expiry(client: Any) -> str:
    try:
        reply = client.admin.command({"getClusterParameter": "changeStreamOptions"})
        seconds = reply["clusterParameters"][0]["preAndPostImages"]["expireAfterSeconds"]
    except (OperationFailure, LookupError):
        return "(this user cannot see for how long)"
    return "as long as the oplog" if seconds == "off" else f"{seconds} s, and no longer than the oplog"
