"""``tailrace compare`` as a user has it: what it prints, writes and exits with. It tells nothing of the data."""

from __future__ import annotations

import base64
import datetime
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson.binary import Binary
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.objectid import ObjectId

from tailrace.cli.main import main
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.watch.compare import comparison, deployment
from tailrace.watch.compare.report import read_report
from tests import commands
from tests.compare.planted import altered
from tests.differential.beside import wait_until
from tests.patience import PATIENCE_S

DATABASE = "hunter2db"
TEXT, NUMBER, DOUBLE = "hunter2", Int64(4_111_111_111_111_111), 31337.25
OID, DATE = ObjectId("65a1b2c3d4e5f60718293a4b"), datetime.datetime(1984, 6, 1, 12, 34, 56)
BINARY = Binary(b"hunter2\x00\x01", 0)
DOCUMENT: dict[str, Any] = {
    "hunter2text": TEXT, "hunter2n": NUMBER, "hunter2d": DOUBLE, "hunter2o": OID, "hunter2t": DATE, "hunter2b": BINARY,
    "hunter2a": [TEXT, {"hunter2k": NUMBER}], "$hunter2": 1, "hunter2.dot": 1,
}  # fmt: skip
#: As they would stand in a file, in text or in BSON, in a token's hexadecimal digits, and in base64 at any place.
SECRETS = (
    b"hunter2", b"HUNTER2", TEXT.encode().hex().upper().encode(), str(NUMBER).encode(), struct.pack("<q", NUMBER),
    repr(DOUBLE).encode(), struct.pack("<d", DOUBLE), str(OID).encode(), OID.binary, b"1984-06-01",
    str(OID).upper().encode(), bson.encode({"": DATE})[6:14],
    *(base64.b64encode(b"x" * pad + b"hunter2")[(pad * 4 + 2) // 3 : -4] for pad in range(3)),
)  # fmt: skip


def write_secrets(client: pymongo.MongoClient[Any]) -> None:
    """Every kind of write that puts a user's names and values into the oplog."""
    shop = client[DATABASE]
    images = {"changeStreamPreAndPostImages": {"enabled": True}}
    validator = {"hunter2field": {"$ne": TEXT}}
    orders = shop.create_collection("hunter2coll", validator=validator, **images)
    orders.create_index([("hunter2n", 1)], name="hunter2index", partialFilterExpression={"hunter2n": {"$gt": NUMBER}})
    shop.create_collection("hunter2view", viewOn="hunter2coll", pipeline=[{"$match": {"hunter2field": TEXT}}])
    shop.command("collMod", "hunter2coll", validator={"hunter2field": {"$ne": NUMBER}})
    for identifier in (TEXT, NUMBER, DOUBLE, OID, DATE, BINARY, {"hunter2id": TEXT}):
        orders.insert_one({"_id": identifier, **DOCUMENT}, bypass_document_validation=True)
    orders.update_one(
        {"_id": TEXT}, {"$set": {"hunter2a.0": "hunter2 later", "hunter2new": OID}, "$unset": {"hunter2t": 1}}
    )
    orders.update_one({"_id": TEXT}, [{"$set": {"hunter2a": {"$slice": ["$hunter2a", 1]}}}])
    orders.replace_one({"_id": NUMBER}, {"hunter2text": "hunter2 again"})
    orders.delete_one({"_id": OID})
    with client.start_session() as session, session.start_transaction():
        orders.insert_one({"_id": "hunter2 in a transaction", **DOCUMENT}, session=session)
        orders.update_one({"_id": DOUBLE}, {"$set": {"hunter2text": "hunter2 changed"}}, session=session)
    orders.drop_index("hunter2index")
    shop.hunter2view.drop()
    orders.rename("hunter2other")
    shop.drop_collection("hunter2other")
    client.drop_database(DATABASE)
    # Nobody has to wait for the server's next no-op, ten seconds later.
    client.admin.command("appendOplogNote", 1, data={"msg": "the end"})


@pytest.fixture(scope="module")
def since(replica_set: ReplicaSet) -> ClusterTime:
    return write_all(replica_set.uri)


def write_all(uri: str) -> ClusterTime:
    """Write the secrets; since when."""
    with pymongo.MongoClient[Any](uri) as client:
        time = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"]).tick()
        write_secrets(client)
    return time


class Command:
    """The command in this process, on the replica set, with short waits."""

    def __init__(self, uri: str, version: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.version, self.out, self.err = version, "", ""
        self._uri, self._patch, self._capsys = uri, patch, capsys
        patch.setattr(deployment, "_AWAIT_MS", 50)
        patch.setattr(comparison, "_LOOK_S", 0.05)

    def begin_at(self, time: ClusterTime) -> None:
        """The next comparison begins there, and not now."""
        times = iter([time])
        real = deployment.operation_time
        self._patch.setattr(deployment, "operation_time", lambda client: next(times, None) or real(client))

    def alter_everything(self) -> None:
        """Every event of ours differs from the server's at its end, each at a place of its own kind."""
        real = deployment.DeploymentComparison.opener_of_ours

        def alter(raw: bytes) -> Iterator[bytes]:
            event = bson.decode(raw, CodecOptions(document_class=dict))
            yield bson.encode({**event, f"odd{event['operationType']}": TEXT})

        self._patch.setattr(
            deployment.DeploymentComparison, "opener_of_ours", lambda compared: altered(real(compared), alter)
        )

    def run(self, *arguments: str) -> int:
        """The exit status; ``out`` and ``err`` are what it printed."""
        try:
            status = main(["compare", self._uri, *arguments])
        except SystemExit as end:  # the parser's
            status = int(str(end.code))
        self.out, self.err = self._capsys.readouterr()
        return status


@pytest.fixture
def command(replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(replica_set.uri, replica_set.version, monkeypatch, capsys)


def tokens_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "_data" in value:
            yield value
        for inner in value.values():
            yield from tokens_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from tokens_of(inner)


STAGES = ("--pipeline", '[{"$set": {"hunter2made": "$fullDocument.hunter2text"}}]')


#: Everything that the stage can be told to show.
SWITCHES = ("--show-system-events", "--show-migration-events", "--show-raw-update-description")


@pytest.mark.parametrize(
    "more", [("report.json",), ("report.bson",), ("report.json", *STAGES), ("report.json", *SWITCHES)]
)
def test_nothing_of_the_data_is_in_the_report_or_the_output(
    command: Command, since: ClusterTime, tmp_path: Path, more: tuple[str, ...]
) -> None:
    search_for_secrets(command, since, tmp_path, more)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["7.0.28"])
def test_nothing_of_the_data_is_in_what_is_said_of_7_0(
    version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with ReplicaSet(version=version) as running:
        written = write_all(running.uri)
        for number, more in enumerate((("report.json", *SWITCHES), ("report.bson",), ("report.json", *STAGES))):
            folder = tmp_path / str(number)
            folder.mkdir()
            with monkeypatch.context() as patch:
                search_for_secrets(Command(running.uri, version, patch, capsys), written, folder, more)


def search_for_secrets(command: Command, since: ClusterTime, tmp_path: Path, more: tuple[str, ...]) -> None:
    command.begin_at(since)
    command.alter_everything()
    path = tmp_path / more[0]
    images = ("--full-document-before-change", "whenAvailable", "--full-document", "whenAvailable")
    status = command.run("--duration", "0s", "--show-expanded-events", *images, "--report", str(path), *more[1:])
    report = read_report(path)
    kinds = {one["operation"] for one in report["differences"]}
    assert {"insert", "update", "replace", "delete", "create", "createIndexes", "modify", "rename", "drop"} <= kinds
    assert status == 3
    assert report["differences"][0]["entries"]
    texts = [command.out.encode(), command.err.encode(), path.read_bytes(), bson.encode(report)]
    texts += [
        ResumeToken.parse(token).event_identifier or b"" for one in report["differences"] for token in tokens_of(one)
    ]
    for text in texts:
        for secret in SECRETS:
            place = text.find(secret)
            assert place < 0, (secret, text[max(0, place - 200) : place + 50])


def test_names_are_shown_where_that_is_asked_for_and_values_are_not(
    command: Command, since: ClusterTime, tmp_path: Path
) -> None:
    command.begin_at(since)
    command.alter_everything()
    path = tmp_path / "report.json"
    assert command.run(DATABASE, "--duration", "0s", "--show-names", "--report", str(path)) == 3
    text = path.read_bytes()
    assert b"hunter2text" in text
    assert str(NUMBER).encode() not in text


def test_where_nothing_differs_the_status_is_0_and_it_says_what_was_compared(
    command: Command, since: ClusterTime, tmp_path: Path
) -> None:
    command.begin_at(since)
    path = tmp_path / "report.json"
    assert command.run(DATABASE, "--duration", "0s", "--report", str(path)) == 0
    assert command.out.startswith(f"differences: 0 in 17 events of MongoDB {command.version}: 8 insert, 3 update")
    assert "types array, binData, date, double" in command.out
    report = read_report(path)
    assert report["differences"] == []
    assert report["compared"]["events"] == 17
    assert report["scope"] == {"database": "db1", "collection": None}


def test_a_number_of_events_ends_it(command: Command, since: ClusterTime) -> None:
    command.begin_at(since)
    assert command.run(DATABASE, "--events", "4", "--events-per-second", "100") == 0
    assert command.out.startswith("differences: 0 in 4 events")


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ([], (2000, 8 << 20)),
        (["--events-per-second", "0.5", "--mb-per-second", "2"], (0.5, 2 << 20)),
        (["--events-per-second", "none", "--mb-per-second", "none"], (None, None)),
    ],
)
def test_it_is_limited_unless_that_is_not_wanted(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], limits: tuple[float | None, float | None]
) -> None:
    prepare, asked = deployment.DeploymentComparison.prepare, list[Any]()

    def prepared(compared: Any, limits: Any, **more: Any) -> Any:
        asked.append(limits)
        return prepare(compared, limits, **more)

    monkeypatch.setattr(deployment.DeploymentComparison, "prepare", prepared)
    assert command.run("nobodyWritesHere", "--duration", "0s", *arguments) == 0
    assert [(one.events_per_second, one.bytes_per_second) for one in asked] == [limits]


def test_what_the_limits_kept_from_being_compared_is_said(
    command: Command, since: ClusterTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.begin_at(since)
    real = comparison.ComparisonLimits
    monkeypatch.setattr(
        "tailrace.watch.compare.comparison.ComparisonLimits", lambda **said: real(**said, patience_s=0.5)
    )
    assert command.run(DATABASE, "--duration", "0s", "--events-per-second", "2") == 0
    assert "s of writes were not compared: more is written than the limits" in command.out


def test_where_nothing_was_written_it_says_so(command: Command) -> None:
    assert command.run("nobodyWritesHere", "--duration", "0s") == 0
    assert command.out.startswith("differences: 0, but nothing was compared")
    assert "nothing was written" in command.err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--duration", "soon"], 1, "--duration soon is not a duration"),
        (["--report", "/no/such/directory/report"], 2, "no file can be written there"),
        (["--events", "0"], 2, "--events"),
        (["--events-per-second", "nan"], 2, "--events-per-second"),
        (["--mb-per-second", "0"], 2, "--mb-per-second"),
        (["--pipeline", '[{"$nothing": 1}]'], 1, "Unrecognized pipeline stage name"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(command: Command, arguments: list[str], status: int, said: str) -> None:
    assert command.run("x", *arguments) == status
    assert said in command.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_result(replica_set: ReplicaSet, tmp_path: Path, number: signal.Signals) -> None:
    """Without it a comparison of an hour would be lost with its last minute."""
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr, pymongo.MongoClient[Any](replica_set.uri) as client:
        command = commands.Command("compare", replica_set.uri, "comparedSignals", stdout=stdout, stderr=stderr)
        wait_until(lambda: b"comparing" in err.read_bytes(), "it begins")
        client.comparedSignals.c.insert_one({"_id": int(number)})
        command.send_signal(number)
        assert command.wait(PATIENCE_S) == 0
        client.comparedSignals.c.delete_one({"_id": int(number)})
    assert out.read_text().startswith("differences: 0")
