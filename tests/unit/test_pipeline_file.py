"""The pipeline file of ``tailrace run``: what it may contain, and the messages if it contains something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.cli.main import build_parser
from tailrace.cli.run import run
from tailrace.errors import UsageError
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.store.pipeline_file import ArchiveSettings, load
from tailrace.lake.store.compaction_policy import CompactionPolicy

LEAST = "source: {uri: 'mongodb://h'}\nlake: {path: lake}\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    return path


def test_the_example_is_a_good_pipeline_file() -> None:
    example = Path(__file__).parents[2] / "examples" / "pipeline.yaml"
    settings = load(example, {"TAILRACE_URI": "mongodb://u:secret@h/?replicaSet=rs0"})
    assert settings.source == {
        "uri": "mongodb://u:secret@h/?replicaSet=rs0",
        "database": "shop",
        "collection": "orders",
        "startingFrom": "oldest",
        "maxEventsPerTrigger": "100000",
        "maxBytesPerTrigger": "256m",
        "documents": "json",
    }
    assert settings.lake == example.parent / "lake"
    assert settings.checkpoint == example.parent / "checkpoint"
    assert settings.processing_time == "1 second"
    assert settings.compaction == CompactionPolicy(128 << 20, 64, 8)
    assert "secret" not in repr(settings)


def test_every_key_of_the_example_is_known_also_those_in_comments(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "pipeline.yaml"
    uncommented = []
    for line in example.read_text().splitlines():
        bare = line.replace("# ", "", 1)
        key = bare.split(":")[0].strip()
        is_key = (
            line.startswith("  # ") and (key.isidentifier() or key in {"- $match", "spark.local.dir"}) and ":" in bare
        )
        uncommented.append(bare if is_key else line)
    settings = load(written(tmp_path, "\n".join(uncommented)), {"TAILRACE_URI": "mongodb://h"})
    assert settings.source["pipeline"].startswith('[{"$match"')
    assert settings.source["columns"].startswith("event,token,operation_type")
    assert settings.source["showExpandedEvents"] == "true"
    assert settings.cores == 2
    assert settings.spark_config == {"spark.local.dir": "/var/tmp"}


def test_the_least_that_a_file_needs(tmp_path: Path) -> None:
    settings = load(written(tmp_path, LEAST))
    assert settings.source == {"uri": "mongodb://h"}
    assert settings.checkpoint is None
    assert (settings.processing_time, settings.available_now) == ("1 second", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "source.uri is missing"),
        ("source: {uri: x}\n", "lake.path is missing"),
        ("- 1", "the file must hold keys and values"),
        ("source: 3", "source must hold keys and values, not 3"),
        ("sourc: {}", "unknown key 'sourc'. Did you mean 'source'?"),
        (
            "zzz: {}",
            "unknown key 'zzz'. The known keys are source, lake, trigger, archive, limits, compaction, tables, "
            "messages, masks, spark",
        ),
        (
            LEAST + "limits: {maxEventPerTrigger: 3}",
            "unknown key 'limits.maxEventPerTrigger'. Did you mean 'limits.max",
        ),
        ("source: {uri: x, documents: json}", "unknown key 'source.documents'. It belongs in 'lake.documents'"),
        ("source: {uri: '${NOT_THERE}'}", "the environment variable NOT_THERE is not set"),
        ("source: {uri: '${A B}'}", "'${A B}' is not the name of an environment variable"),
        ("source: {uri: [", "is not YAML at line 1, column"),
        (LEAST + "trigger: {every: 3 fortnights}", "trigger.every must be a duration"),
        (LEAST + "trigger: {every: 1 second, availableNow: true}", "cannot be used together"),
        (LEAST + "trigger: {availableNow: maybe}", "trigger.availableNow must be true or false"),
        (LEAST + "compaction: {targetBytes: big}", "compaction.targetBytes must be a number of bytes"),
        (LEAST + "compaction: {every: -1}", "compaction.every must be a whole number, 0 or more"),
        (LEAST + "compaction: {fanIn: 1}", "compaction.fanIn must be a whole number, 2 or more"),
        (LEAST + "spark: {cores: 0}", "spark.cores must be a whole number, 1 or more"),
        (
            "source: {uri: x}\nlake: {path: p, partitionBy: [days]}",
            "cannot be partitioned by 'days'. Did you mean 'day'?",
        ),
        ("source: {uri: x}\nlake: {path: p, partitionBy: {day: 1}}", "lake.partitionBy must be a list of day, hour"),
        ("source: {uri: x}\nlake: {path: p, partitionBy: []}", "lake.partitionBy must be a list of day, hour"),
        ("source: {uri: x}\nlake: {path: p, onError: skip}", "lake.onError must be one of fail, quarantine"),
        ("source: {uri: x}\nlake: {path: p, onError: [fail]}", "lake.onError must be one of fail, quarantine"),
        (LEAST + "archive: {keep: 90 days}", "archive.path is missing"),
        (LEAST + "archive: {path: a, keep: ever}", "archive.keep must be a time such as"),
        (LEAST + "archive: {path: a, keepBytes: much}", "archive.keepBytes must be a number of bytes"),
        (LEAST + "archive: {path: 's3a://bucket/a'}", "archive.path is a URI that begins with 's3a:'"),
        (LEAST + "tables: {collections: [shop.a]}", "tables.path is missing"),
        (LEAST + "tables: {path: t}", "tables.collections must name collections"),
        (LEAST + "tables: {path: 's3://b/t', collections: [a.b]}", "tables.state is missing"),
        (
            LEAST + "tables: {path: t, state: s, collections: [a.b]}",
            "tables.state belongs to tables in an object store",
        ),
        (LEAST + "tables: {path: 'az://box/t', collections: [a.b]}", "tables.state is missing"),
        (LEAST + "tables: {path: 's3://k:v@b/t', state: s, collections: [a.b]}", "must be s3://BUCKET/PREFIX"),
        (LEAST + "tables: {path: 'gcs://b/t', collections: [a.b]}", "begins with 'gcs:'"),
        (LEAST + "tables: {path: t, collections: [shop]}", "tables.collections: 'shop' names no collections"),
        (LEAST + "tables: {path: t, collections: [a.b], onMismatch: ignore}", "must be one of evolve, widen"),
        (
            LEAST + "tables: {path: t, collections: {a.b: {column: {}}}}",
            "unknown key 'column' in tables.collections.a.b",
        ),
        (LEAST + "tables: {path: t, collections: {a.b: {columns: {n: money}}}}", "'money' is not a column type"),
        (LEAST + "tables: {path: t, nested: 1, collections: a.b}", "tables.nested must be true or false"),
        (
            LEAST + "tables: {path: t, collections: {a.b: {nested: true, columns: {n: int}}}}",
            "tables.collections.a.b.nested belongs to columns that are inferred",
        ),
        (LEAST + "tables: {path: t, collections: {a.b: {partitionBy: n}}}", "'n' is not a declared column of a.b"),
        (LEAST + "tables: {path: t, collections: [a.b], every: soon}", "tables.every must be a time such as"),
        (LEAST + "tables: {path: t, collections: [a.b], targetBytes: big}", "tables.targetBytes must be a number"),
        ("source: {uri: x}\nlake: {path: 3}", "lake.path must be text"),
        ("source: {uri: x, database: }\nlake: {path: p}", "source.database must be a name, not null"),
        (
            "source: {uri: x, database: on}\nlake: {path: p}",
            "source.database must be a name, not true. Write it in quotes",
        ),
        ("source: {uri: x, database: ''}\nlake: {path: p}", 'source.database must be a name, not ""'),
        ("source: {uri: x, database: d, collection: [a]}\nlake: {path: p}", "Several collections: source.collections"),
        ("source: {uri: x, collections: [1.10]}\nlake: {path: p}", "source.collections must be names such as"),
        (LEAST + "tables: {path: '', collections: [a.b]}", "tables.path must be a path"),
        (LEAST + "tables: {path: t, collections: [{a.b: {}}]}", "tables.collections must name collections"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(path, {})
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_tables_are_kept_as_the_file_says(tmp_path: Path) -> None:
    text = "tables: {path: t, every: 5 seconds, retention: 2 days, targetBytes: 64m, collections: {shop.o*: {columns: "
    text += "{total: 'decimal(18,2)', at: date}, partitionBy: at, zOrder: [total]}, 'shop.*': }}\n"
    settings = load(written(tmp_path, LEAST + text)).tables
    assert settings is not None
    assert settings.root == tmp_path / "t"
    assert (settings.every_s, settings.retention_h, settings.target_bytes) == (5.0, 48.0, 64 << 20)
    rule = settings.rule("shop.orders")
    assert [column.name for column in rule.schema.columns] == ["total", "at"]
    assert (rule.partition_by, rule.z_order, rule.schema.policy) == (("at",), ("total",), "quarantine")
    assert settings.rule("shop.x").schema.policy == "evolve"
    assert (settings.grace_h, settings.versions, settings.feed_h) == (1 / 6, 7, 0.0)
    text = "tables: {path: t, grace: 2 hours, versions: 0, changeFeed: 1 day, collections: 'shop.*'}\n"
    settings = load(written(tmp_path, LEAST + text)).tables
    assert settings is not None
    assert (settings.grace_h, settings.versions, settings.feed_h) == (2.0, 0, 24.0)
    text = (
        "tables: {path: t, nested: true, collections: {s.a: , s.b: {nested: false}, s.c: {columns: {l: array<int>}}}}"
    )
    settings = load(written(tmp_path, LEAST + text)).tables
    assert settings is not None
    assert [settings.rule(f"s.{name}").schema.nested for name in "abc"] == [True, False, False]
    assert [column.type for column in settings.rule("s.c").schema.columns] == ["array<int>"]
    assert load(written(tmp_path, LEAST)).tables is None


def test_what_cannot_be_written_fails_unless_a_quarantine_is_asked_for(tmp_path: Path) -> None:
    assert load(written(tmp_path, LEAST), {}).on_error == "fail"
    file = written(tmp_path, "source: {uri: 'mongodb://h'}\nlake: {path: lake, onError: quarantine}\n")
    assert load(file, {}).on_error == "quarantine"


def test_collections_are_a_list_of_names_and_patterns(tmp_path: Path) -> None:
    for collections in ("[shop.orders, 'log?.*']", "'shop.orders, log?.*'"):
        file = written(tmp_path, f"source:\n  uri: mongodb://h\n  collections: {collections}\nlake: {{path: p}}")
        options = parse(load(file, {}).source)
        assert options.selection is not None
        assert options.selection.patterns == ("shop.orders", "log?.*")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*missing\.yaml: No such file"):
        load(tmp_path / "missing.yaml")


def test_a_moment_in_yaml_reaches_the_source_as_text(tmp_path: Path) -> None:
    text = "source: {uri: x, startAtOperationTime: 2026-11-21T10:00:00Z}\nlake: {path: lake}\ntrigger: {every: 2}\n"
    settings = load(written(tmp_path, text))
    assert settings.source["startAtOperationTime"] == "2026-11-21T10:00:00+00:00"
    assert settings.processing_time == "2 seconds"


def test_an_archive_is_kept_and_read_where_the_file_says(tmp_path: Path) -> None:
    settings = load(
        written(tmp_path, LEAST + "archive: {path: kept, keep: 90 days, keepBytes: 1g, preImages: false}\n")
    )
    assert settings.archive == ArchiveSettings(tmp_path / "kept", 90 * 86400.0, 1 << 30, images=False)
    assert "archive" not in settings.source
    settings = load(written(tmp_path, "source: {uri: x, archive: ../kept}\nlake: {path: lake}\n"))
    assert Path(settings.source["archive"]).resolve() == (tmp_path.parent / "kept").resolve()
    assert settings.archive is None


def test_images_are_kept_where_the_file_says(tmp_path: Path) -> None:
    source = "source: {uri: x, fullDocument: exact, images: ../kept}\nlake: {path: lake}\n"
    settings = load(written(tmp_path, source))
    assert Path(settings.source["images"]).resolve() == (tmp_path.parent / "kept").resolve()
    with pytest.raises(UsageError, match=r"source\.images is a URI that begins with 's3:'"):
        load(written(tmp_path, source.replace("../kept", "'s3://bucket/kept'")))


def test_what_a_lake_is_divided_by_is_a_name_or_a_list(tmp_path: Path) -> None:
    for given, found in (("hour", ("day", "hour")), ("[collection, day]", ("day", "collection"))):
        path = written(tmp_path, f"source: {{uri: x}}\nlake: {{path: p, partitionBy: {given}}}")
        assert load(path).partition_by == found
    assert load(written(tmp_path, LEAST)).partition_by is None
    with pytest.raises(UsageError, match="cannot be partitioned by 'month'"):
        run(build_parser().parse_args(["run", str(written(tmp_path, LEAST)), "--partition-by", "month"]))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text", [BOMB, "source: &s {uri: *s}\n", "source: &s\n  x: [*s]\n", "a: &a {k: 1}\nb:\n  <<: *a\n"]
)
def test_aliases_are_refused_at_once(tmp_path: Path, text: str) -> None:
    """Eight levels of aliases took 39 s and 2.8 GB, and one that refers to itself was a RecursionError."""
    with pytest.raises(UsageError, match=r"has the alias \*. at line \d+, column \d+, but aliases are not supported"):
        load(written(tmp_path, text), {})


@pytest.mark.parametrize("text", ["[" * 1_000_000, "x: " + "[" * 3000 + "]" * 3000, "{a: " * 3000])
def test_deep_nesting_is_refused(tmp_path: Path, text: str) -> None:
    """Reading the first one would have taken days."""
    with pytest.raises(UsageError, match=r"nested too deeply at line 1, column \d+"):
        load(written(tmp_path, text), {})


def test_the_nesting_of_a_document_is_no_trouble(tmp_path: Path) -> None:
    match = '{"$match": ' + '{"$and": [' * 99 + '{"operationType": "insert"}' + "]}" * 99 + "}"
    text = f"source: {{uri: 'mongodb://h', pipeline: [{match}]}}\nlake: {{path: lake}}\n"
    assert load(written(tmp_path, text), {}).source["pipeline"].count("$and") == 99


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "long.yaml").write_bytes(b"# \n" * (1 << 19))
    for name, message in (
        ("binary.yaml", "it is not UTF-8"),
        ("long.yaml", "is longer than a pipeline file may be, 1 MB"),
        (".", "Is a directory"),
        ("a\0b", "its name holds a NUL"),
    ):
        with pytest.raises(UsageError, match=message):
            load(tmp_path / name, {})


def messages_file(keys: str, more: str = "") -> str:
    return f"{LEAST}messages: {{orders: {{{keys}}}}}\n{more}"


ENTRY = "to: 'kafka://h:9092', collections: shop.orders, topic: t"
DEBEZIUM = "to: 'kafka://h:9092', collections: shop.orders, topicPrefix: p, format: debezium"


def test_messages_are_published_as_the_file_says(tmp_path: Path) -> None:
    text = messages_file(
        "to: 'redis://:${SECRET}@h:6379/0', config: {maxLength: 5, replicas: 1}, collections: [shop.orders, 'a.*'], "
        "topic: 'c.{database}.{collection}', format: bson, cloudEvents: binary, fullDocument: updateLookup, "
        "pipeline: [{$match: {operationType: insert}}], startingFrom: snapshot, onHistoryLost: gap, leases: k.b, "
        "resource: r, leaseTime: 1 minute, partitions: 3, laneKey: fullDocument.customer, commitEvery: 7, retries: 2, "
        "deadLetters: k.letters, afterDeadLetter: stop, brokerTimeout: 1 minute"
    )
    (found,) = load(written(tmp_path, text), {"SECRET": "s3cret"}).messages
    assert (found.name, found.broker, found.to) == ("orders", "redis", "redis://:s3cret@h:6379/0")
    assert (found.topic, found.form, found.cloud_events) == ("c.{database}.{collection}", "bson", "binary")
    assert (found.selection.patterns, found.watch) == (("shop.orders", "a.*"), {"full_document": "updateLookup"})
    assert (found.pipeline, found.config) == (
        ({"$match": {"operationType": "insert"}},),
        {"maxLength": 5, "replicas": 1},
    )
    assert (found.start, found.on_history_lost, found.store, found.resource) == ("snapshot", "gap", "k.b", "r")
    assert (found.lease_s, found.partitions, found.lane_key) == (60, 3, "fullDocument.customer")
    assert (found.commit_every, found.retries, found.letters, found.after_letter) == (7, 2, "k.letters", "stop")
    assert found.broker_s == 60
    assert "s3cret" not in repr(found)
    (least,) = load(written(tmp_path, messages_file(ENTRY)), {}).messages
    assert (least.start, least.on_history_lost, least.store, least.resource) == (
        "now", "fail", "tailrace.leases", "orders",
    )  # fmt: skip
    assert (least.commit_every, least.letters, least.masks) == (100, None, None)
    (records,) = load(written(tmp_path, messages_file(DEBEZIUM)), {}).messages
    assert (records.form, records.topic, records.tombstones) == ("debezium", "p", True)
    (stored,) = load(written(tmp_path, messages_file(DEBEZIUM.replace("kafka://h:9092", "nats://h"))), {}).messages
    assert stored.tombstones is False, "NATS stores none"


def test_masks_are_declared_once_for_messages_too(tmp_path: Path) -> None:
    masks = "masks: {rules: {shop.orders: {email: drop}}}\n"
    settings = load(written(tmp_path, messages_file(ENTRY, masks)), {})
    assert settings.messages[0].masks is settings.masks is not None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("topic: t, collections: a.b", "messages.orders.to is missing: it must be the URI of a broker: kafka://HOST"),
        ("to: 'amqp://u:s3cret@h', topic: t, collections: a.b", "messages.orders.to must be the URI of a broker"),
        ("to: 'kafka://u:s3cret@h', topic: t, collections: a.b", "to must name only Kafka's brokers"),
        ("to: 3, topic: t, collections: a.b", "messages.orders.to must be the URI of a broker"),
        ("to: 'kafka://h', collections: a.b", "messages.orders.topic is missing"),
        ("to: 'kafka://h', topic: t", "messages.orders.collections must name collections"),
        ("to: 'kafka://h', topic: t, collections: shop", "messages.orders.collections: 'shop' names no collections"),
        (f"{ENTRY}, topik: x", "unknown key 'messages.orders.topik'. Did you mean 'messages.orders.topic'?"),
        (f"{ENTRY}, formaat: x", "unknown key 'messages.orders.formaat'. Did you mean 'messages.orders.format'?"),
        (f"{ENTRY}, config: [1]", "messages.orders.config must hold settings"),
        (f"{ENTRY}, format: avro", "messages.orders.format must be one of json, bson, debezium"),
        (f"{ENTRY}, topicPrefix: p", "messages.orders.topicPrefix is only for format: debezium"),
        (f"{ENTRY}, converter: avro", "messages.orders.converter is only for format: debezium"),
        (f"{DEBEZIUM}, topic: t", "messages.orders.topic is not for format: debezium"),
        (f"{DEBEZIUM}, converter: avro", "messages.orders.schemaRegistry is missing: avro needs it"),
        (f"{DEBEZIUM}, schemaRegistry: 'http://r'", "messages.orders.schemaRegistry belongs to converter: avro"),
        (f"{DEBEZIUM}, converter: avro, schemaRegistry: {{user: s3cret}}", "schemaRegistry must be a URL, or settings"),
        (
            f"{DEBEZIUM}, converter: avro, schemaRegistry: u, cloudEvents: structured",
            "cloudEvents cannot be structured with this converter",
        ),
        (
            "to: 'redis://h', collections: a.b, topicPrefix: p, format: debezium, tombstones: true",
            "messages.orders.tombstones cannot be true: redis stores no message without a body",
        ),
        (
            "to: 'nats://h', collections: a.b, topicPrefix: p, format: debezium, converter: avro",
            "messages.orders.converter cannot be avro or protobuf with NATS",
        ),
        ("to: 'redis://h', collections: a.b, topic: t, config: {length: 3}", "config.length is not a setting of redis"),
        (
            "to: 'redis://h', collections: a.b, topic: t, config: {replicas: -1}",
            "config.replicas must be a whole number",
        ),
        (DEBEZIUM.replace("topicPrefix: p", "topicPrefix: a b"), "topicPrefix must consist of letters"),
        (ENTRY.replace("topic: t", "topic: 'a.{db}'"), "topic may hold {database} and {collection}"),
        (f"{ENTRY}, pipeline: {{$match: {{}}}}", "messages.orders.pipeline must be a list of stages"),
        (f"{ENTRY}, pipeline: 'no'", "messages.orders.pipeline must be a list of stages"),
        (f"{ENTRY}, fullDocument: exact", "fullDocument must be one of default, updateLookup"),
        (f"{ENTRY}, showExpandedEvents: 1", "messages.orders.showExpandedEvents must be true or false"),
        (f"{ENTRY}, startingFrom: yesterday", "startingFrom must be one of now, oldest, snapshot"),
        (f"{ENTRY}, onHistoryLost: skip", "onHistoryLost must be one of fail, snapshot, gap"),
        (f"{ENTRY}, leases: leases", "messages.orders.leases must be a collection such as tailrace.leases"),
        (f"{ENTRY}, deadLetters: 3", "messages.orders.deadLetters must be text, not 3"),
        (f"{ENTRY}, afterDeadLetter: stop", "messages.orders.afterDeadLetter needs deadLetters"),
        (f"{ENTRY}, leaseTime: soon", "messages.orders.leaseTime must be a time such as '30 seconds'"),
        (f"{ENTRY}, brokerTimeout: 0s", "messages.orders.brokerTimeout must be a time such as"),
        (f"{ENTRY}, partitions: 0", "messages.orders.partitions must be a whole number, 1 or more"),
        (f"{ENTRY}, commitEvery: '5'", "messages.orders.commitEvery must be a whole number, 1 or more"),
        (f"{ENTRY}, retries: -1", "messages.orders.retries must be a whole number, 0 or more"),
        (f"{ENTRY}, laneKey: ''", "messages.orders.laneKey must be text"),
        (
            f"{ENTRY}}}, other: {{{ENTRY}, resource: orders",
            "messages.orders and messages.other have one lease: 'orders'",
        ),
        (
            "to: 'kafka://h', topic: t, collections: '*.*'",
            "messages.orders.collections takes in tailrace.leases, which is written whenever a position is committed",
        ),
        (f"{ENTRY}, deadLetters: shop.orders", "messages.orders.collections takes in shop.orders"),
        (f"{ENTRY}}}, other: 3, '': {{", "messages.other must hold keys and values, not 3"),
        (f"{ENTRY}}}, '': {{", "an entry of messages has no name"),
    ],
)
def test_a_mistake_in_messages_is_named_with_its_key_and_without_secrets(
    tmp_path: Path, keys: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(written(tmp_path, messages_file(keys)), {})
    assert message in str(caught.value)
    assert "s3cret" not in str(caught.value)
