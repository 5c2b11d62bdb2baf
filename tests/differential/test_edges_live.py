"""Commands on deployments at the edge: unusual members, one shard, tags, majority reads switched off; and signals.

No ordinary command had been tested on these: members were never hidden, a URI never named tags that no member has, and
SIGTERM was only sent to commands that handle it themselves.
"""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import closing
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.cli.examination import _unusual, _unusual_member, examine
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tests.differential.test_watch_live import watching
from tests.differential.wire import Wire
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = pytest.mark.mongod
_PATIENCE_S = 300


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_ends_with_its_position_told_at_either_signal(replica_set: ReplicaSet, number: signal.Signals) -> None:
    database = f"edges_live_{number.name}"
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        now = client.admin.command("ping")["operationTime"]
        client[database].orders.insert_one({"_id": 1})
    arguments = (database, "--start-at-operation-time", f"{now.time},{now.inc}", "--format", "json")
    with watching(replica_set.uri, *arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["operationType"] == "insert"
        process.send_signal(number)
        assert process.wait(_PATIENCE_S) == 128 + number
        said = process.stderr.read().decode()
    assert re.fullmatch(r"tailrace: stopped\. To go on: --resume-after [0-9A-F]+\n", said)
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database(database)


def test_tags_that_no_member_has_are_named(replica_set: ReplicaSet, capsys: pytest.CaptureFixture[str]) -> None:
    """The message said to wait for the election."""
    uri = f"{replica_set.uri}&readPreference=secondary&readPreferenceTags=dc:moon&serverSelectionTimeoutMS=500"
    assert main(["watch", uri.replace("readPreference=secondary", "readPreference=nearest"), "--until", "now"]) == 1
    said = capsys.readouterr().err
    assert "no member has the tags dc:moon that the connection URI asks for" in said
    assert "readPreferenceTags" in said


def of_odd_name(wire: Wire, command: dict[str, Any]) -> None:
    """A command on a database whose name is not UTF-8, which no driver sends."""
    reply = wire.exchange(bson.encode({**command, "$db": "edges?live"}).replace(b"edges?live", b"edges\xfflive"))
    assert bson.decode(reply)["ok"] == 1


def test_doctor_works_where_a_name_is_not_utf8(replica_set: ReplicaSet) -> None:
    """Doctor ended with a raw InvalidBSON."""
    with Wire.to(replica_set.uri) as wire:
        of_odd_name(wire, {"insert": "c", "documents": [{"_id": 1}]})
        try:
            with closing(MongodSource(replica_set.uri)) as source:
                findings = {one.check: one for one in examine(source)}
        finally:
            of_odd_name(wire, {"dropDatabase": 1})
    assert findings["pre- and post-images"].status == "warn"
    assert "not UTF-8" in findings["pre- and post-images"].found


@pytest.mark.parametrize("delay_s", [0, 3600])
def test_doctor_names_a_hidden_and_a_delayed_member(replica_set: ReplicaSet, delay_s: int) -> None:
    """Doctor said ok for both."""
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        hello = client.admin.command("hello")
    assert _unusual(hello) is None
    ahead = Timestamp(hello["lastWrite"]["opTime"]["ts"].time + delay_s + 2, 1)
    said = {**hello, "hidden": True, "$clusterTime": {"clusterTime": ahead}}
    if delay_s:
        said["secondaryDelaySecs"] = delay_s
    found = _unusual(said)
    assert found is not None
    assert found.status == ("warn" if delay_s else "ok")
    kind = f"a delayed member ({delay_s} s)" if delay_s else "a hidden member"
    assert found.found == f"{kind}, {delay_s + 2} s behind the others now"
    assert ("late" in found.advice) == bool(delay_s)


@pytest.mark.slow
@pytest.mark.parametrize("version", [SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def test_doctor_on_a_real_delayed_member(version: str) -> None:
    with ReplicaSet(3, version=version) as members:
        with MongoClient[dict[str, Any]](members.uri) as client:
            config = client.admin.command("replSetGetConfig")["config"]
            member = next(one for one in config["members"] if one["_id"] != members.primary)
            delay = "slaveDelay" if version.startswith("4.") else "secondaryDelaySecs"
            member |= {"priority": 0, "hidden": True, "votes": 0, delay: 600}
            config["version"] += 1
            client.admin.command("replSetReconfig", config)
        direct = f"mongodb://{member['host']}/?directConnection=true"
        with MongoClient[dict[str, Any]](direct) as client:
            while not client.admin.command("hello").get("hidden"):
                time.sleep(0.05)
        with closing(MongodSource(direct)) as source:
            (found,) = _unusual_member(source)
    assert found.found.startswith("a delayed member (600 s), ")


@pytest.mark.slow
def test_without_majority_reads_the_servers_own_stream_is_named_and_works(capsys: pytest.CaptureFixture[str]) -> None:
    """The hint named only the server's setting, which on 4.4 an operator may have had a reason to switch off."""
    with ReplicaSet(1, version="4.4.2", arguments=["--enableMajorityReadConcern", "false"]) as members:
        assert main(["watch", members.uri, "--until", "now"]) == 1
        assert 'engine="server" (--engine server), which works' in capsys.readouterr().err
        assert main(["watch", members.uri, "--until", "now", "--engine", "server"]) == 0
