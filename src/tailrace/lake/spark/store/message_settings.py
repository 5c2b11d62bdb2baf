"""The section ``messages`` of a pipeline file: checked settings from the parsed YAML, an entry for each stream of
messages. Who publishes them is ``tailrace.cli.run_messages``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import bson
from bson import json_util

from tailrace.core.masking.stages import check_stages
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.options import BEFORE_CHANGE_MODES, FULL_DOCUMENT_MODES
from tailrace.core.user_text import nearest, seconds
from tailrace.errors import UsageError
from tailrace.lake.store.local_path import local_path
from tailrace.lake.store.pipeline_values import shown, whole_number
from tailrace.read.source.mask_file import Masks
from tailrace.read.source.uri import find_uri

#: The keys of one entry.
KEYS: Final = (
    "to",
    "config",
    "topic",
    "topicPrefix",
    "collections",
    "pipeline",
    "fullDocument",
    "fullDocumentBeforeChange",
    "showExpandedEvents",
    "format",
    "cloudEvents",
    "converter",
    "schemaRegistry",
    "tombstones",
    "startingFrom",
    "onHistoryLost",
    "leases",
    "leasesUri",
    "resource",
    "leaseTime",
    "partitions",
    "laneKey",
    "commitEvery",
    "retries",
    "deadLetters",
    "afterDeadLetter",
    "brokerTimeout",
)
FORMATS: Final = ("json", "bson", "debezium")
CLOUD_EVENTS: Final = ("structured", "binary")
CONVERTERS: Final = ("json", "jsonWithSchemas", "avro", "protobuf")
STARTS: Final = ("now", "oldest", "snapshot")
HISTORY_LOST: Final = ("fail", "snapshot", "gap")
AFTER_LETTER: Final = ("skip", "stop")
LEASES: Final = "tailrace.leases"
#: The schemes of brokers' URIs, and which broker each is of.
SCHEMES: Final = {"kafka": "kafka", "redis": "redis", "rediss": "redis", "nats": "nats", "tls": "nats"}
#: What ``config`` may hold. Kafka's client knows its own settings, and says which it does not know.
_CONFIG_KEYS: Final = {"redis": ("maxLength", "replicas"), "nats": ("credentials",)}
#: Keys that only records in Debezium's layout have.
_OF_DEBEZIUM: Final = ("topicPrefix", "converter", "schemaRegistry", "tombstones")
_REGISTERED: Final = ("avro", "protobuf")
_SCHEME: Final = re.compile(r"([a-z]+)://(?=.)")
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
_PLACES: Final = ("database", "collection")
_SAID_TO: Final = "must be the URI of a broker: kafka://HOST:9092,HOST:9092, redis://HOST:6379/0 or nats://HOST:4222"


@dataclass(frozen=True, slots=True)
class MessageSettings:
    """One entry, checked. What may hold a secret is not in its ``repr``.

    Attributes:
        name: what the file calls it
        broker: kafka, redis or nats
        to: the broker's URI
        config: further settings of the broker's client
        topic: a text, in which ``{database}`` and ``{collection}`` stand for those of a change; the prefix for Debezium
        selection: whose changes become messages
        pipeline: the user's stages
        watch: options of ``watch()``
        converter: what writes keys and values in Debezium's layout
        registry: settings of the schema registry
        store: the collection that holds lease and position, next to the dead letters
        store_uri: its deployment; ``None``: the one that is watched
        resource: the lease's name
        broker_s: seconds for which a broker that is away is tried again
    """

    name: str
    broker: str
    to: str = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    topic: str
    selection: Selection
    pipeline: tuple[Mapping[str, Any], ...]
    watch: Mapping[str, Any]
    form: str
    cloud_events: str | None
    converter: str
    registry: Mapping[str, Any] = field(repr=False)
    tombstones: bool
    start: str
    on_history_lost: str
    store: str
    store_uri: str | None = field(repr=False)
    resource: str
    lease_s: float
    partitions: int
    lane_key: str | None
    commit_every: int
    retries: int
    letters: str | None
    after_letter: str
    broker_s: float
    masks: Masks | None = None


def messages_of(given: Mapping[str, Any], masks: Masks | None, base: Path) -> tuple[MessageSettings, ...]:
    """The settings of all entries, whose events are masked by ``masks``; paths are relative to ``base``. Raises
    UsageError with the key's name."""
    entries = tuple(_Entry(str(name), one, masks, base).settings() for name, one in given.items())
    taken: dict[tuple[str | None, str, str], str] = {}
    for entry in entries:
        place = (entry.store_uri, entry.store, entry.resource)
        if place in taken:
            raise UsageError(
                f"messages.{taken[place]} and messages.{entry.name} have one lease: '{entry.resource}' in "
                f"{entry.store}",
                hint="Each needs a position of its own: give one of them another resource",
            )
        taken[place] = entry.name
    _check_kept(entries)
    return entries


def _check_kept(entries: Sequence[MessageSettings]) -> None:
    """No entry publishes what entries write: each commit would be a change, whose message is followed by a commit."""
    kept = [name for one in entries if one.store_uri is None for name in (one.store, one.letters) if name is not None]
    for entry in entries:
        found = next((name for name in kept if entry.selection.has(name)), None)
        if found is not None:
            raise UsageError(
                f"messages.{entry.name}.collections takes in {found}, which is written whenever a position is "
                "committed: each commit would become a message",
                hint="Name the databases, such as shop.*, or give leases and deadLetters a place that no pattern names",
            )


class _Entry:
    """Reads the keys of one entry."""

    def __init__(self, name: str, given: object, masks: Masks | None, base: Path) -> None:
        if not name.strip():
            raise UsageError(
                "an entry of messages has no name", hint="Its name is that of its lease: orders-to-kafka: ..."
            )
        where = f"messages.{name}"
        if not isinstance(given, Mapping):
            raise UsageError(f"{where} must hold keys and values, not {shown(given)}")
        self._where, self._name, self._given, self._masks, self._base = where, name, given, masks, base
        for key in given:
            if key not in KEYS:
                meant = nearest(str(key), KEYS)
                hint = f"Did you mean '{where}.{meant}'?" if meant else f"The known keys are {', '.join(KEYS)}"
                raise UsageError(f"unknown key '{where}.{key}'", hint=hint)

    def settings(self) -> MessageSettings:
        broker, to = self._broker()
        form = self._one_of("format", FORMATS, "json")
        self._check_debezium(form, broker)
        converter = self._one_of("converter", CONVERTERS, "json")
        cloud = self._one_of("cloudEvents", CLOUD_EVENTS, "") or None
        if cloud == "structured" and converter != "json":
            raise self._wrong(
                "cloudEvents", "cannot be structured with this converter", "Use binary, or converter: json"
            )
        pipeline = self._pipeline()
        return MessageSettings(
            name=self._name,
            broker=broker,
            to=to,
            config=self._config(broker),
            topic=self._topic(form),
            selection=self._selection(),
            pipeline=pipeline,
            watch=self._watch(),
            form=form,
            cloud_events=cloud,
            converter=converter,
            registry=self._registry(converter),
            tombstones=self._flag("tombstones", default=broker == "kafka"),
            start=self._one_of("startingFrom", STARTS, "now"),
            on_history_lost=self._one_of("onHistoryLost", HISTORY_LOST, "fail"),
            store=self._collection("leases", LEASES),
            store_uri=self._store_uri(),
            resource=self._text("resource") if "resource" in self._given else self._name,
            lease_s=self._seconds("leaseTime", 30.0),
            partitions=self._number("partitions", 1, least=1),
            lane_key=self._text("laneKey") if "laneKey" in self._given else None,
            commit_every=self._number("commitEvery", 100, least=1),
            retries=self._number("retries", 0),
            letters=self._letters(),
            after_letter=self._one_of("afterDeadLetter", AFTER_LETTER, "skip"),
            broker_s=self._seconds("brokerTimeout", 600.0),
            masks=self._masks,
        )

    def _wrong(self, key: str, what: str, hint: str | None = None) -> UsageError:
        return UsageError(f"{self._where}.{key} {what}", hint=hint)

    def _broker(self) -> tuple[str, str]:
        """The broker and its URI, which no error repeats: it may hold a password."""
        if "to" not in self._given:
            raise self._wrong("to", f"is missing: it {_SAID_TO}")
        to = self._given["to"]
        match = _SCHEME.match(to) if isinstance(to, str) else None
        if match is None or match[1] not in SCHEMES:
            raise self._wrong("to", _SAID_TO, "Keep passwords out of the file: ${NAME} is an environment variable")
        if match[1] == "kafka" and re.search(r"[@/?#\s]", to[match.end() :]):
            raise self._wrong(
                "to",
                "must name only Kafka's brokers: kafka://HOST:9092,HOST:9092",
                "User and password belong in config: sasl.username, sasl.password: ${KAFKA_PASSWORD}",
            )
        return SCHEMES[match[1]], to

    def _config(self, broker: str) -> dict[str, Any]:
        given = self._given.get("config", {})
        if not isinstance(given, Mapping) or not all(isinstance(one, str | int | float) for one in given.values()):
            raise self._wrong(
                "config", "must hold settings of the broker's client, each a text, a number, true or false"
            )
        known = _CONFIG_KEYS.get(broker)
        unknown = None if known is None else next((key for key in given if key not in known), None)
        if known is not None and unknown is not None:
            raise self._wrong(
                f"config.{unknown}", f"is not a setting of {broker}", f"The known ones are {', '.join(known)}"
            )
        for key in ("maxLength", "replicas") if broker == "redis" else ():
            if key in given:
                whole_number(given[key], f"{self._where}.config.{key}", least=1)
        if broker == "nats" and not isinstance(given.get("credentials", ""), str):
            raise self._wrong("config.credentials", "must be the path of a file")
        if broker == "nats" and "credentials" in given:
            where = f"{self._where}.config.credentials"
            return {"credentials": str(local_path(given["credentials"], where, self._base))}
        return {str(key): value for key, value in given.items()}

    def _check_debezium(self, form: str, broker: str) -> None:
        if form != "debezium":
            for key in _OF_DEBEZIUM:
                if key in self._given:
                    raise self._wrong(key, "is only for format: debezium")
            return
        if "topic" in self._given:
            raise self._wrong("topic", "is not for format: debezium", "Give topicPrefix, as Debezium's topic.prefix")
        if broker != "kafka" and self._given.get("tombstones") is True:
            raise self._wrong("tombstones", f"cannot be true: {broker} stores no message without a body")
        if broker == "nats" and self._given.get("converter") in _REGISTERED:
            raise self._wrong("converter", "cannot be avro or protobuf with NATS, which stores no keys of bytes")

    def _topic(self, form: str) -> str:
        key = "topicPrefix" if form == "debezium" else "topic"
        if key not in self._given:
            raise self._wrong(key, "is missing: where the messages go")
        topic = self._text(key)
        if form == "debezium":
            if not re.fullmatch(r"[A-Za-z0-9._-]+", topic):
                raise self._wrong(key, "must consist of letters, digits, dots, dashes and underscores")
            return topic
        wrong = next((one for one in _PLACEHOLDER.findall(topic) if one not in _PLACES), None)
        if wrong is not None or re.search(r"[{}]", _PLACEHOLDER.sub("", topic)):
            raise self._wrong(key, "may hold {database} and {collection}, and no other braces")
        return topic

    def _selection(self) -> Selection:
        where, given = f"{self._where}.collections", self._given.get("collections")
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            raise UsageError(f"{where} must name collections: a list such as [shop.orders, shop.c*]")
        return Selection.of(given, where)

    def _pipeline(self) -> tuple[Mapping[str, Any], ...]:
        given = self._given.get("pipeline", [])
        try:
            text = given if isinstance(given, str) else json_util.dumps(given)
            stages = json_util.loads(text)
        except (ValueError, TypeError, RecursionError):
            stages = None
        if not isinstance(stages, list) or not all(isinstance(one, dict) and one for one in stages):
            raise self._wrong("pipeline", "must be a list of stages, as YAML or as JSON text")
        try:
            raw = [bson.encode(stage) for stage in stages]
        except (bson.errors.BSONError, OverflowError, TypeError, ValueError) as error:
            raise self._wrong("pipeline", f"cannot be used: {error}") from None
        if self._masks is not None:
            check_stages(raw)
        return tuple(stages)

    def _watch(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        after = self._one_of("fullDocument", FULL_DOCUMENT_MODES, "default")
        before = self._one_of("fullDocumentBeforeChange", BEFORE_CHANGE_MODES, "off")
        if after != "default":
            found["full_document"] = after
        if before != "off":
            found["full_document_before_change"] = before
        if self._flag("showExpandedEvents", default=False):
            found["show_expanded_events"] = True
        return found

    def _registry(self, converter: str) -> dict[str, Any]:
        given = self._given.get("schemaRegistry")
        if (given is not None) != (converter in _REGISTERED):
            raise self._wrong(
                "schemaRegistry",
                "belongs to converter: avro and protobuf" if given is not None else f"is missing: {converter} needs it",
                "Give its URL, or the settings of Confluent's client: {url: ..., basic.auth.user.info: ${NAME}}",
            )
        if given is None:
            return {}
        given = {"url": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping) or not isinstance(given.get("url"), str) or not given["url"]:
            raise self._wrong("schemaRegistry", "must be a URL, or settings with url")
        return {str(key): value for key, value in given.items()}

    def _store_uri(self) -> str | None:
        return find_uri(self._text("leasesUri"), {}, self._base).reveal() if "leasesUri" in self._given else None

    def _letters(self) -> str | None:
        if "deadLetters" in self._given:
            return self._collection("deadLetters", "")
        if "afterDeadLetter" in self._given:
            raise self._wrong("afterDeadLetter", "needs deadLetters, the collection that they go to")
        return None

    def _collection(self, key: str, default: str) -> str:
        text = self._text(key) if key in self._given else default
        scope = Scope.parse(text)
        if scope.database is None or scope.collection is None:
            raise self._wrong(key, f"must be a collection such as {LEASES}, not {shown(text)}")
        try:
            scope.check_names()
        except UsageError as error:
            raise self._wrong(key, f"cannot be used: {error.message}") from None
        return text

    def _text(self, key: str) -> str:
        value = self._given[key]
        if not isinstance(value, str) or not value:
            raise self._wrong(key, f"must be text, not {shown(value)}")
        return value

    def _one_of(self, key: str, known: tuple[str, ...], default: str) -> str:
        value = self._given.get(key, default) if key in self._given else default
        if key in self._given and value not in known:
            raise self._wrong(key, f"must be one of {', '.join(known)}, not {shown(value)}")
        return str(value)

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._given.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, f"must be true or false, not {shown(value)}")
        return value

    def _number(self, key: str, default: int, *, least: int = 0) -> int:
        return whole_number(self._given[key], f"{self._where}.{key}", least=least) if key in self._given else default

    def _seconds(self, key: str, default: float) -> float:
        if key not in self._given:
            return default
        value = self._given[key]
        duration_s = seconds(value) if isinstance(value, str) else None
        if duration_s is None or not duration_s > 0:
            raise self._wrong(key, f"must be a time such as '30 seconds' or '10 minutes', not {shown(value)}")
        return duration_s
