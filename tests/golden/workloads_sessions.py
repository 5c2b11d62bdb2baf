"""Recorded workloads about sessions, images and cursors: transactions of every form, retryable writes, pre- and
post-images in every mode, batches and resumes, events above 16 MB."""

from __future__ import annotations

from typing import Any

from bson.timestamp import Timestamp

from tests.golden.workloads import (
    CLUSTER,
    IMAGES,
    Runner,
    StreamPlan,
    after,
    deletes,
    everywhere,
    inserts,
    update_command,
)

_MAJORITY = {"writeConcern": {"w": "majority"}}
_PADDING = "p" * 200


def sessions(run: Runner) -> list[StreamPlan]:
    """Transactions in one entry, in a chain of entries, prepared, prepared in a chain, aborted and empty; the applyOps
    command; retryable writes."""
    for database, collection in (("gr", "a"), ("gr", "b"), ("gr2", "a")):
        run(database, {"create": collection})
    _committed(run, [("gr", inserts("a", {"_id": 1, "pad": _PADDING}))])
    _committed(run, [("gr", inserts("b", {"_id": 1})), ("gr2", inserts("a", {"_id": 1}))])
    long: list[tuple[str, dict[str, Any]]] = [
        ("gr", inserts("a", *({"_id": number, "pad": _PADDING} for number in range(10, 17)))),
        ("gr", update_command("a", 10, {"$set": {"x": 1}})),
        ("gr", update_command("a", 10, [{"$set": {"x": {"y": [1, 2]}}}])),
        ("gr2", update_command("a", 1, {"replaced": True})),
        ("gr", deletes("a", 11)),
        ("gr", inserts("b", {"_id": 2})),
    ]
    _committed(run, long)
    aborted = run.transaction([("gr", inserts("a", {"_id": 20}))])
    run("admin", {"abortTransaction": 1, **aborted})
    _prepared(run, [("gr", inserts("a", {"_id": 30}))], between=31)
    _prepared(run, [("gr", inserts("a", *({"_id": number} for number in range(40, 48))))], between=32)
    _prepared(run, [("gr", inserts("a", {"_id": 50}))], between=33, commit=False)
    operations = [{"op": "i", "ns": "gr.a", "o": {"_id": 60}}, {"op": "d", "ns": "gr.b", "o": {"_id": 1}}]
    run("admin", {"applyOps": operations})
    run("admin", {"applyOps": [{"op": "i", "ns": "gr.a", "o": {"_id": 61}}], "allowAtomic": False})
    run.retryable("gr", inserts("a", {"_id": 70}, {"_id": 71}, {"_id": 72}))
    run.retryable("gr", update_command("a", 70, {"$set": {"y": 1}}))
    run.retryable("gr", {"findAndModify": "a", "query": {"_id": 71}, "update": {"$inc": {"z": 1}}, "new": True})
    run.retryable("gr", {"findAndModify": "a", "query": {"_id": 72}, "remove": True})
    plans = everywhere("gr", "a", run.version)
    plans.append(StreamPlan("cluster resumed inside a transaction", CLUSTER, after("cluster plain", 5)))
    plans.append(StreamPlan("collection b", ("gr", "b"), {}))
    return plans


def _committed(run: Runner, commands: list[tuple[str, dict[str, Any]]]) -> None:
    run("admin", {"commitTransaction": 1, **run.transaction(commands)})


def _prepared(run: Runner, commands: list[tuple[str, dict[str, Any]]], *, between: int, commit: bool = True) -> None:
    """Prepare, write something beside, then commit or abort."""
    fields = run.transaction(commands)
    reply = run("admin", {"prepareTransaction": 1, **fields, **_MAJORITY})
    prepared: Timestamp = reply["prepareTimestamp"]
    run.insert("gr", "b", {"_id": between})
    if commit:
        run("admin", {"commitTransaction": 1, "commitTimestamp": prepared, **fields, **_MAJORITY})
    else:
        run("admin", {"abortTransaction": 1, **fields, **_MAJORITY})


_FULL = ("default", "updateLookup", "whenAvailable", "required")
_BEFORE = ("off", "whenAvailable", "required")


def images(run: Runner) -> list[StreamPlan]:
    """Every pair of modes on three collections: with images, without, and with images switched on halfway. From 6.0."""
    if run.version < (6, 0):
        return []
    run("gr", {"create": "on", **IMAGES})
    run("gr", {"create": "switched"})
    for collection in ("on", "off", "switched"):
        _imaged(run, collection)
    run("gr", {"collMod": "switched", **IMAGES})
    _imaged(run, "switched", base=100)
    _committed(
        run,
        [
            ("gr", inserts("on", {"_id": 200, "v": 1})),
            ("gr", update_command("on", 200, {"$set": {"v": 2}})),
            ("gr", update_command("on", 200, {"$set": {"v": 3}})),
            ("gr", update_command("on", 2, [{"$set": {"list": {"$slice": ["$list", 1]}, "w": 1}}])),
            ("gr", deletes("on", 200)),
        ],
    )
    _prepared(run, [("gr", update_command("on", 2, {"$set": {"w": 2}}))], between=300)
    plans = []
    for where, scope in (("on", ("gr", "on")), ("switched", ("gr", "switched")), ("database", ("gr", None))):
        for full in _FULL:
            for before in _BEFORE:
                stage = {"fullDocument": full, "fullDocumentBeforeChange": before}
                plans.append(StreamPlan(f"{where} {full} {before}", scope, stage))
    everything: dict[str, Any] = {"fullDocument": "required", "fullDocumentBeforeChange": "required"}
    everything["showExpandedEvents"] = True
    plans.append(StreamPlan("on expanded", ("gr", "on"), everything))
    return plans


def _imaged(run: Runner, collection: str, *, base: int = 0) -> None:
    first, second, third = base + 1, base + 2, base + 3
    body: dict[str, Any] = {"v": 1, "list": [1, 2, 3, 4], "o": {"x": {"y": 1}, "z": 2}, "pad": _PADDING}
    run.insert("gr", collection, {"_id": first, **body}, {"_id": second, **body}, {"_id": third, **body})
    run.update("gr", collection, first, {"$set": {"v": 2, "new": 1}, "$unset": {"o.z": ""}})
    run.update("gr", collection, second, [{"$set": {"list": {"$slice": ["$list", 2]}, "o.x.w": [1]}}])
    run.update("gr", collection, second, {"$set": {"list.5": "padded"}})
    run.update("gr", collection, second, {"$rename": {"v": "o.v"}})
    run.update("gr", collection, third, {"replaced": True})
    run.delete("gr", collection, first)


def cursors(run: Runner) -> list[StreamPlan]:
    """Batch sizes and their post-batch resume tokens, streams that match nothing, resumes after an event and inside a
    transaction."""
    collection = ("gr", "c")
    for number in range(12):
        run.insert("gr", "c", {"_id": number})
        run.insert("gr", "beside", {"_id": number})
    _committed(run, [("gr", inserts("c", *({"_id": number} for number in range(20, 25))))])
    run.insert("gr", "beside", {"_id": 100})
    plans = [StreamPlan("default", collection, {})]
    plans += [StreamPlan(f"batches of {size}", collection, {}, batch_size=size) for size in (1, 2, 5, 101)]
    plans += [
        StreamPlan("an absent collection", ("gr", "absent"), {}),
        StreamPlan("resumed in the middle", collection, after("default", 4)),
        StreamPlan("resumed in the transaction", collection, after("default", 14), batch_size=1),
        StreamPlan("resumed at the last event", collection, after("default", -1)),
        StreamPlan("a token of another collection", ("gr", "beside"), after("default", 3)),
        StreamPlan("a token of the database", collection, after("database", 2, "startAfter")),
        StreamPlan("database", ("gr", None), {}),
    ]
    return sorted(plans, key=lambda plan: plan.name != "database")


def large_events(run: Runner) -> list[StreamPlan]:
    """Events larger than 16 MB: an error without the split stage, fragments with it. From 6.0."""
    if run.version < (6, 0):
        return []
    run("gr", {"create": "large", **IMAGES})
    run.insert("gr", "large", {"_id": 1, "big": "a" * 9_000_000})
    run.update("gr", "large", 1, {"$set": {"big": "b" * 9_500_000}})
    run.update("gr", "large", 1, {"$set": {"small": 1}})
    run.delete("gr", "large", 1)
    run.insert("gr", "large", {"_id": 2})
    both = {"fullDocument": "required", "fullDocumentBeforeChange": "required"}
    split: tuple[dict[str, Any], ...] = ({"$changeStreamSplitLargeEvent": {}},)
    scope = ("gr", "large")
    return [
        StreamPlan("without the split", scope, both),
        StreamPlan("split", scope, both, pipeline=split),
        StreamPlan("split, resumed after its first fragment", scope, after("split", 1, **both), pipeline=split),
        StreamPlan("a fragment without the split", scope, after("split", 1, **both)),
        StreamPlan("a fragment of an event that is small now", scope, after("split", 1), pipeline=split),
    ]
