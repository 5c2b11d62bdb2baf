"""The JSON Schema of the pipeline file: what editors complete and check, and what ``tailrace run --schema`` prints.

It says what one key may hold. Combinations of keys (``trigger.every`` with ``trigger.availableNow``), and what only
the deployment knows, are checked by ``pipeline_file.load`` and by the run itself. ``${NAME}`` may stand wherever the
file has a text.
"""

from __future__ import annotations

from typing import Any, Final

from tailrace.base.object_place import URIS
from tailrace.core.masking.rules import ACTIONS
from tailrace.core.plan.options import BEFORE_CHANGE_MODES, FULL_DOCUMENT_MODES
from tailrace.lake.spark.query.options import COLUMNS, DOCUMENT_FORMS, SERVER_FLAGS, V2_TOKENS
from tailrace.lake.spark.store import message_settings
from tailrace.lake.store.partitioning import COLLECTION, DAY, HOUR
from tailrace.lake.store.quarantine import ON_ERRORS
from tailrace.lake.tables.schema import POLICIES

JsonSchema = dict[str, Any]

_VARIABLE: Final = r"\$\{[A-Za-z_][A-Za-z0-9_]*\}"
_DURATION: Final = r"[0-9]{1,9}(?:\.[0-9]{1,9})? *(?:[smhd]|(?:second|minute|hour|day)s?)"
_FLAG: Final[JsonSchema] = {"type": "boolean"}
_TEXT: Final[JsonSchema] = {"type": "string", "minLength": 1}
_MAPPING: Final[JsonSchema] = {"type": "object"}
_STAGES: Final[JsonSchema] = {"type": "array", "items": _MAPPING}


def pipeline_schema() -> JsonSchema:
    """The schema, as JSON Schema of 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pipeline file of tailrace run",
        "description": "Which changes of a MongoDB deployment are kept, and where.",
        **_section(
            {
                "source": _said("Which change stream is read.", _section(_source())),
                "lake": _said("The directory that the events go to.", _section(_lake(), required=("path",))),
                "trigger": _said("How often a micro-batch starts.", _section(_trigger())),
                "archive": _said(
                    "An archive of the deployment's oplog, kept beside the lake.",
                    _or_empty(_section(_archive(), required=("path",))),
                ),
                "limits": _said("Bounds of one micro-batch.", _section(_limits())),
                "compaction": _said("How small files are merged.", _section(_compaction())),
                "tables": _said(
                    "Tables that equal their collections.",
                    _or_empty(_section(_tables(), required=("path", "collections"))),
                ),
                "messages": _said(
                    "Changes that become messages of a broker: an entry for each stream of them, by name.",
                    _or_empty(
                        {
                            "type": "object",
                            "additionalProperties": _section(_messages(), required=("to", "collections")),
                        }
                    ),
                ),
                "masks": _said(
                    "Fields that are masked before anything is written.", _section(_masks(), required=("rules",))
                ),
                "spark": _said("The local Spark that the command starts.", _section(_spark())),
            },
            required=("lake",),
        ),
    }


def _section(keys: dict[str, JsonSchema], *, required: tuple[str, ...] = ()) -> JsonSchema:
    """An object with these keys and no others. A section without a required key may be left empty."""
    types = "object" if required else ["object", "null"]
    wanted = {"required": [*required]} if required else {}
    return {"type": types, "properties": keys, "additionalProperties": False, **wanted}


def _or_empty(section: JsonSchema) -> JsonSchema:
    return {"anyOf": [{"type": "null"}, {"type": "object", "maxProperties": 0}, section]}


def _said(description: str, schema: JsonSchema, **more: Any) -> JsonSchema:
    return {"description": description, **schema, **more}


def _one_of(*values: str) -> JsonSchema:
    return {"type": "string", "anyOf": [{"enum": [*values]}, {"pattern": f"^{_VARIABLE}$"}]}


def _matching(pattern: str) -> JsonSchema:
    return {"type": "string", "pattern": f"^(?:{pattern})$|{_VARIABLE}"}


def _number(least: int) -> JsonSchema:
    return {"type": "integer", "minimum": least}


def _bytes() -> JsonSchema:
    return {"anyOf": [_number(1), _matching(r"0*[1-9][0-9]{0,17}\s*[kmgtKMGT]?[bB]?")]}


def _time(*units: str) -> JsonSchema:
    return _matching(rf"[0-9]+(?:\.[0-9]+)? *(?:{'|'.join(f'{one}s?' for one in units)})")


def _kept_for() -> JsonSchema:
    return _matching(r"[0-9]{1,6} *(?:minute|hour|day)s?")


def _duration() -> JsonSchema:
    return _matching(_DURATION)


def _names(description: str, items: JsonSchema | None = None) -> JsonSchema:
    """One name, or a list of names."""
    one = items or _TEXT
    return _said(description, {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]})


def _source() -> dict[str, JsonSchema]:
    position = {"anyOf": [_TEXT, _MAPPING, _number(0)]}
    counted = {"anyOf": [_number(1), _matching("[0-9]+")]}
    images = "exact, exactWhenAvailable: computed here, in the directory that images names."
    return {
        "uri": _said(
            "The replica set or cluster: its URI, ${NAME} or @FILE. Without it, the variable TAILRACE_URI is used.",
            _TEXT,
        ),
        "database": _said("Watch only this database.", _TEXT),
        "collection": _said("Watch only this collection of the database.", _TEXT),
        "collections": _names("Watch these collections, by name or pattern: shop.orders, logs_*.event_20??"),
        "pipeline": _said(
            "The stages that follow $changeStream, as YAML or as JSON text.", {"anyOf": [_STAGES, _TEXT]}
        ),
        "collation": _said("How the stages compare strings.", {"anyOf": [_MAPPING, _TEXT]}),
        "fullDocument": _said(
            f"The document after an update. {images}", _one_of(*FULL_DOCUMENT_MODES, "exact", "exactWhenAvailable")
        ),
        "fullDocumentBeforeChange": _said(
            f"The document before the change. {images}",
            _one_of(*BEFORE_CHANGE_MODES, "exact", "exactWhenAvailable"),
        ),
        **{name: _said("The server's own option.", _FLAG) for name in (*SERVER_FLAGS, V2_TOKENS)},
        "resumeAfter": _said("Begin after this resume token.", position),
        "startAfter": _said("Begin after this resume token, even that of an invalidate event.", position),
        "startAtOperationTime": _said("Begin at this cluster time: 1700000000,1 or 2026-01-31T12:00:00Z.", position),
        "startingFrom": _said("Where a new stream begins.", _one_of("now", "oldest", "snapshot")),
        "endAtOperationTime": _said("Where a batch read ends.", position),
        "partitions": _said("How many tasks share a micro-batch.", counted),
        "filterPushdown": _said("Whether Spark's filters become part of the read.", _FLAG),
        "failOnInvalidate": _said("Whether the run fails when what it watches is dropped or renamed.", _FLAG),
        "archive": _said("An archive that holds what the oplog no longer does.", _TEXT),
        "images": _said("A directory on a local disk for exact images.", _TEXT),
        "snapshotDocumentsPerSecond": _said("The most documents a second that a snapshot copies.", counted),
    }


def _lake() -> dict[str, JsonSchema]:
    column = _one_of(*COLUMNS)
    return {
        "path": _said(f"The lake's directory, which is made if it is missing, or {URIS}.", _TEXT),
        "state": _said("The local directory of a lake in an object store.", _TEXT),
        "checkpoint": _said(
            "Spark's checkpoint directory; of a lake in an object store <state>/checkpoint unless it says otherwise.",
            _TEXT,
            default="<path>.checkpoint",
        ),
        "columns": _said(
            "Which columns the lake has; token is needed.",
            {"anyOf": [{"type": "array", "items": column, "uniqueItems": True, "minItems": 1}, _TEXT]},
        ),
        "documents": _said("The form of the columns with documents.", _one_of(*DOCUMENT_FORMS), default="json"),
        "acceptGap": _said("Continue although the oplog has lost events that the lake does not have.", _FLAG),
        "partitionBy": _names("How a new lake's files are divided.", _one_of(DAY, HOUR, COLLECTION)),
        "onError": _said("What becomes of an event that cannot be written.", _one_of(*ON_ERRORS), default="fail"),
        "iceberg": _catalogue("the lake"),
    }


def _catalogue(what: str) -> JsonSchema:
    return _said(
        f"The Iceberg catalogue that has {what} too: its URI, its name in .pyiceberg.yaml, or a mapping of pyiceberg's "
        "properties.",
        {
            "anyOf": [
                _TEXT,
                {
                    "type": "object",
                    "minProperties": 1,
                    "additionalProperties": {"type": ["string", "integer", "boolean"]},
                },
            ]
        },
    )


def _trigger() -> dict[str, JsonSchema]:
    every = _time("millisecond", "second", "minute", "hour")
    return {
        "every": _said(
            "A micro-batch starts this often.", {"anyOf": [{"type": "number", "minimum": 0}, every]}, default="1 second"
        ),
        "availableNow": _said("Read up to the present, then end.", _FLAG, default=False),
    }


def _archive() -> dict[str, JsonSchema]:
    return {
        "path": _said("The archive's directory.", _TEXT),
        "keep": _said("How long entries are kept; without it, for ever.", _kept_for()),
        "keepBytes": _said("How much is kept; without it, everything.", _bytes()),
        "preImages": _said("Whether the server's pre-images are kept too.", _FLAG, default=True),
    }


def _limits() -> dict[str, JsonSchema]:
    return {
        "maxEventsPerTrigger": _said(
            "The most events in one micro-batch.", {"anyOf": [_number(1), _matching("[0-9]+")]}
        ),
        "maxBytesPerTrigger": _said("The most bytes of oplog in one micro-batch.", _bytes(), default="1g"),
    }


def _compaction() -> dict[str, JsonSchema]:
    return {
        "every": _said("Look for files to merge after this many commits; 0: never.", _number(0)),
        "targetBytes": _said("How large merged files become.", _bytes()),
        "fanIn": _said("The fewest files that are merged in a day that still grows.", _number(2)),
        "retention": _said("How long replaced files stay for readers; 30 days at most.", _kept_for()),
    }


def _tables() -> dict[str, JsonSchema]:
    policy = _said("What becomes of a value that does not fit its column.", {"enum": [*POLICIES]})
    nested = _said(
        "Columns of objects and arrays hold structs and lists, not JSON.", {"type": "boolean"}, default=False
    )
    rule = {
        "columns": _said(
            "Fields and their types, such as total: decimal(18,2) or tags: array<string>.", {"type": ["object", "null"]}
        ),
        "nested": nested,
        "onMismatch": policy,
        "partitionBy": _names("Columns that the table is divided by."),
        "zOrder": _names("Columns that merged files are arranged by."),
    }
    patterns = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
    rules = {"type": "object", "minProperties": 1, "additionalProperties": _section(rule)}
    time = _duration()
    return {
        "path": _said(
            "The directory of the tables, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX.", _TEXT
        ),
        "state": _said("The local directory of the state, for tables in an object store.", _TEXT),
        "collections": _said(
            "Patterns of collections, or a mapping of patterns to rules.", {"anyOf": [patterns, rules]}
        ),
        "every": _said("The tables are written this often.", time),
        "onMismatch": policy,
        "nested": nested,
        "compactEvery": _said("Merge small files after this many micro-batches; 0: never.", _number(0)),
        "targetBytes": _said("How large merged files become.", _bytes()),
        "grace": _said("How long replaced files and versions stay.", time),
        "retention": _said("How far back as-of reaches.", time),
        "versions": _said("How many versions are kept between grace and retention.", _number(0)),
        "changeFeed": _said("How far back the change feed reaches.", time),
        "mergeOnRead": _said(
            "Mark rows as gone (deletion vectors) in place of rewriting their files. Not every reader knows them.",
            {"type": "boolean"},
        ),
        "iceberg": _catalogue("the tables"),
    }


def _messages() -> dict[str, JsonSchema]:
    setting = {"type": ["string", "number", "boolean"]}
    settings = {"type": "object", "additionalProperties": setting}
    registry = {"type": "object", "required": ["url"], "properties": {"url": _TEXT}, "additionalProperties": setting}
    schemes = "|".join(message_settings.SCHEMES)
    collection = r"[^.]+\..+"
    positive = _matching(rf"(?=.*[1-9]){_DURATION}")
    return {
        "to": _said(
            "The broker's URI, without a password: kafka://HOST:9092,HOST:9092, redis://HOST:6379/0, nats://HOST:4222.",
            _matching(rf"(?:{schemes})://.+"),
        ),
        "config": _said(
            "Further settings of the broker's client. Kafka: librdkafka's; Redis: maxLength, replicas; NATS: "
            "credentials.",
            settings,
        ),
        "topic": _said("The topic, stream or subject; {database} and {collection} stand for a change's own.", _TEXT),
        "topicPrefix": _said("With format: debezium, what Debezium calls topic.prefix.", _matching(r"[A-Za-z0-9._-]+")),
        "collections": _names("Whose changes become messages, by name or pattern: shop.orders, shop.*"),
        "pipeline": _said("Stages that follow $changeStream, as YAML or JSON text.", {"anyOf": [_STAGES, _TEXT]}),
        "fullDocument": _said("The document after an update.", _one_of(*FULL_DOCUMENT_MODES)),
        "fullDocumentBeforeChange": _said("The document before the change.", _one_of(*BEFORE_CHANGE_MODES)),
        "showExpandedEvents": _said("The server's own option.", _FLAG),
        "format": _said("What a message holds.", _one_of(*message_settings.FORMATS), default="json"),
        "cloudEvents": _said("Make each message a CloudEvent.", _one_of(*message_settings.CLOUD_EVENTS)),
        "converter": _said(
            "What writes keys and values in Debezium's layout.", _one_of(*message_settings.CONVERTERS), default="json"
        ),
        "schemaRegistry": _said(
            "For avro and protobuf: the registry's URL, or settings of Confluent's client.",
            {"anyOf": [_TEXT, registry]},
        ),
        "tombstones": _said("Whether a delete's record is followed by a tombstone.", _FLAG),
        "startingFrom": _said("Where a new one begins.", _one_of(*message_settings.STARTS), default="now"),
        "onHistoryLost": _said(
            "What to do when the oplog no longer reaches back to the position.",
            _one_of(*message_settings.HISTORY_LOST),
            default="fail",
        ),
        "leases": _said(
            "The collection that holds the lease with the position.",
            _matching(collection),
            default=message_settings.LEASES,
        ),
        "leasesUri": _said(
            "The deployment that holds leases and dead letters, if it is not the one that is watched.", _TEXT
        ),
        "resource": _said(
            "The lease's name, which no other stream of messages may have; by default the entry's.", _TEXT
        ),
        "leaseTime": _said("How long after a crash another process takes over.", positive, default="30 seconds"),
        "partitions": _said("Lanes that are published side by side.", _number(1), default=1),
        "laneKey": _said("With partitions: events with the same value at this path stay in order.", _TEXT),
        "commitEvery": _said("Commit after this many changes.", _number(1), default=100),
        "retries": _said("How often a change that cannot become a message is tried again.", _number(0), default=0),
        "deadLetters": _said(
            "Write changes that cannot become messages to this collection, and go on.", _matching(collection)
        ),
        "afterDeadLetter": _said("After a dead letter: go on, or end.", _one_of(*message_settings.AFTER_LETTER)),
        "brokerTimeout": _said(
            "How long a broker that does not answer is tried again.", positive, default="10 minutes"
        ),
    }


def _masks() -> dict[str, JsonSchema]:
    action = {"enum": [*ACTIONS]}
    paths = {"type": "object", "minProperties": 1, "additionalProperties": action}
    place = {
        "type": "object",
        "properties": {"file": _TEXT, "environment": _TEXT},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    rules = {"type": "object", "minProperties": 1, "additionalProperties": paths}
    return {
        "key": _said("The file or the environment variable that holds the key.", place),
        "rules": _said("Patterns of collections, and for each the paths and what becomes of them.", rules),
    }


def _spark() -> dict[str, JsonSchema]:
    return {
        "cores": _said("How many processors are used; without it, all.", _number(1)),
        "memory": _said("Memory of the JVM.", _TEXT, default="1g"),
        "config": _said("Further settings of Spark.", {"type": ["object", "null"]}),
    }
