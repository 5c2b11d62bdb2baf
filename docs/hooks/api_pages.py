"""A page for each public module, with every name of its ``__all__``; mkdocstrings fills them from the docstrings."""

from __future__ import annotations

from importlib import import_module

_FOLDER = "reference/api"
#: The public modules and what they are for, in a reader's order.
FACES = {
    "tailrace": "streams and clients",
    "tailrace.errors": "errors",
    "tailrace.consumer": "listeners and leases",
    "tailrace.consumer.dead_letters": "dead letters",
    "tailrace.consumer.views": "denormalised views",
    "tailrace.consumer.messages": "messages",
    "tailrace.consumer.messages.kafka": "messages to Kafka",
    "tailrace.consumer.messages.nats_jetstream": "messages to NATS",
    "tailrace.consumer.messages.redis_streams": "messages to Redis",
    "tailrace.consumer.messages.schema_registry": "records in Avro and Protobuf",
    "tailrace.spark": "the Spark source and sinks",
    "tailrace.lake": "change events in a lake",
    "tailrace.tables": "current-state tables",
    "tailrace.masks": "fields dropped, hashed or tokenised",
    "tailrace.sync": "one MongoDB kept equal to another",
    "tailrace.compare": "comparison with the server",
    "tailrace.images": "exact images",
    "tailrace.embedded": "a MongoDB for tests",
    "tailrace.embedded.sharding": "a sharded MongoDB for tests",
    "tailrace.testing": "checks of your own stores",
}
#: Names without a docstring of their own, and what they are.
_PLAIN = {
    "tailrace.MongoClient": "`Client` under PyMongo's name: a program moves by changing the line that imports it.",
    "tailrace.AsyncMongoClient": "`AsyncClient` under PyMongo's name.",
    "tailrace.embedded.DEFAULT_VERSION": "The version of MongoDB that is started by default.",
    "tailrace.embedded.VERSIONS": "The versions that can be fetched, and the wheel that each comes in.",
    "tailrace.__version__": "The version of Tailrace, a string.",
    "tailrace.consumer.views.MISSING": "What a view's difference holds where a document has no such field.",
}
#: Classes that the public names of a module give or take, and that nobody imports.
_GIVEN = {
    "tailrace": [
        "watch.client.statistics.StreamStatistics",
        "read.tail.shared_tail.TailStatistics",
        "core.oplog.cluster_time.ClusterTime",
    ],
    "tailrace.compare": ["watch.compare.sampling.SamplingNumbers"],
    "tailrace.consumer": [
        "act.consumer.rules.settings.ListenerStatistics",
        "act.consumer.rules.position.StreamPosition",
        "act.consumer.lease_operations.Resource",
    ],
    "tailrace.images": ["read.images.state.ImageBatch"],
    "tailrace.spark": ["lake.spark.planning.backlog.Backlog"],
    "tailrace.sync": ["act.sync.plan.SyncPlan", "act.sync.verification.Verification"],
    "tailrace.tables": [
        "lake.tables.as_of.AsOf",
        "lake.tables.schema.TableSchema",
        "lake.tables.progress.TablesProgress",
    ],
}
#: ``watch`` is what these classes are for, and they have it from a base.
_WATCH = {"Client", "AsyncClient"}


def _path(face: str) -> str:
    return f"{_FOLDER}/{face}.md"


def titles() -> dict[str, str]:
    """The pages and their titles, for the navigation."""
    return {f"{_FOLDER}/index.md": "All modules", **{_path(face): face for face in FACES}}


def pages() -> dict[str, str]:
    """The pages and their Markdown."""
    return {f"{_FOLDER}/index.md": _index(), **{_path(face): "\n".join(_lines(face)) for face in FACES}}


def _index() -> str:
    rows = [f"| [`{face}`]({face}.md) | {what} |" for face, what in FACES.items()]
    return "\n".join(
        [
            "# Python modules",
            "",
            "Every public name, from its docstring. Anything imported from elsewhere below `tailrace` may change in "
            "any version.",
            "",
            "| module | what for |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _lines(face: str) -> list[str]:
    lines = [f"# {face}", "", f"::: {face}", "    options:", "      members: false", "      show_root_heading: false"]
    lines += ["      show_root_toc_entry: false", ""]
    for name in import_module(face).__all__:
        public = f"{face}.{name}"
        if public in _PLAIN:
            lines += [f'<a id="{public}"></a>', "", f"## `{name}`", "", _PLAIN[public], ""]
            continue
        lines += [f"::: {public}", ""]
        if name in _WATCH:
            lines[-1:] = ["    options:", "      inherited_members: [watch]", ""]
    if given := _GIVEN.get(face):
        lines += ["## What these names return and accept", "", "These classes are not imported from here.", ""]
        for path in given:
            lines += [f"::: tailrace.{path}", "    options:", "      heading_level: 3", ""]
    return lines
