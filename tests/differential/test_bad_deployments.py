"""Deployments that cannot be read: one sentence from the command line, no traceback, no secret."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from tailrace.embedded import Mongod, ReplicaSet, find_mongod
from tailrace.read.source.mongod import MongodSource
from tailrace.watch.client import AsyncClient
from tests import commands
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.differential.beside import connect, event_loop, kind, on, outcome
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = pytest.mark.mongod

WRONG = "wr0ng-s3cret"


def tailrace(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return commands.run(*arguments)


def assert_one_sentence(done: subprocess.CompletedProcess[bytes], pattern: str, *, status: int = 1) -> None:
    text = done.stderr.decode()
    assert done.returncode == status, text
    assert "Traceback" not in text
    assert re.search(pattern, text), text
    assert len(text.strip().splitlines()) == 1, text
    assert text.startswith("tailrace: ")
    for secret in (PASSWORD, WRONG):
        assert secret not in text


def assert_waited_for(done: subprocess.CompletedProcess[bytes], host: str, why: str) -> None:
    """The command says once what it waits for, and in the end that it did not come."""
    told, _, done.stderr = done.stderr.partition(b"\n")
    assert told.decode() == f"tailrace: {host} has not answered so far: {why}. Trying again."
    assert_one_sentence(done, f"cannot reach {host}: {why}")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    with mongod_with_users(tmp_path_factory.mktemp("guarded")) as mongod:
        add_user(mongod, "nobody", PASSWORD, [])
        add_user(mongod, "reader", PASSWORD, [{"role": "read", "db": "local"}])
        add_user(mongod, "shopper", PASSWORD, [{"role": "read", "db": "local"}, {"role": "read", "db": "shop"}])
        yield mongod


def test_a_standalone_server_is_named_as_one() -> None:
    with Mongod() as standalone:
        assert_one_sentence(tailrace("watch", f"mongodb://{standalone.host}/"), "standalone server.*--replSet")
        done = tailrace("doctor", f"mongodb://{standalone.host}/")
        assert done.returncode == 1
        assert b"FAIL  replica set" in done.stdout
        assert done.stderr == b""


@pytest.mark.parametrize("version", [SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def test_a_standalone_server_is_refused_by_watch_as_pymongo_s_is(version: str) -> None:
    """With the server's code, whatever is watched, and before the first read."""

    async def awaited(watched: Any) -> Any:
        return await watched.watch()

    async def opened(uri: str) -> Any:
        return AsyncClient(uri)

    with Mongod(find_mongod(version)) as standalone:
        uri = f"mongodb://{standalone.host}/"
        codes: dict[str, list[Any]] = {}
        for way in ("pymongo", "server", "oplog", "async"):
            if way == "async":
                with event_loop() as loop:
                    client: Any = on(loop, opened(uri))
                    watched = (client, client.a, client.a.b)
                    outcomes = [outcome(partial(on, loop, awaited(one))) for one in watched]
                    on(loop, client.close())
            else:
                with connect(way, uri) as client:
                    outcomes = [outcome(one.watch) for one in (client, client.a, client.a.b)]
            codes[way] = [kind(each) for each in outcomes]
        assert codes == {way: [("OperationFailure", 40573)] * 3 for way in codes}


def test_an_unreachable_host_is_named_without_the_password() -> None:
    """It is named first during the wait, which takes half a minute by default and was silent before."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    uri = f"mongodb://ann:{WRONG}@127.0.0.1:{port}/?serverSelectionTimeoutMS=5000"
    assert_waited_for(tailrace("watch", uri), f"127.0.0.1:{port}", "connection refused")


def test_another_name_of_the_replica_set_is_told_as_that(replica_set: ReplicaSet) -> None:
    """The message was "Cannot reach any server": the driver forgets servers of another set, so none was left to
    name."""
    uri = replica_set.uri.replace("replicaSet=rs0", "replicaSet=other") + "&serverSelectionTimeoutMS=5000"
    done = tailrace("watch", uri)
    told, _, done.stderr = done.stderr.partition(b"\n")
    assert told == b"tailrace: no server that answered belongs to a replica set named other.", "said before the wait"
    assert_one_sentence(done, "no server of the connection URI belongs to a replica set named other")


def test_a_host_that_takes_connections_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        uri = f"mongodb://127.0.0.1:{port}/?serverSelectionTimeoutMS=5000&connectTimeoutMS=200"
        assert_waited_for(tailrace("watch", uri), f"127.0.0.1:{port}", "no answer in time")


@pytest.mark.parametrize(
    "uri", ["localhost:27017", f"mongodb://ann:{WRONG}/x@host/", f"mongodb://ann:{WRONG}@host:x/", "mongodb://h:99999/"]
)
def test_a_uri_that_does_not_parse_is_told_without_its_password(uri: str) -> None:
    assert_one_sentence(tailrace("watch", uri), "connection URI")


@pytest.mark.parametrize(("user", "password"), [(ROOT, WRONG), ("stranger", WRONG)])
def test_a_wrong_password_is_told_as_that(guarded: Mongod, user: str, password: str) -> None:
    assert_one_sentence(
        tailrace("watch", uri_of(guarded, user, password)), "refused the user or the password.*authSource"
    )


def test_no_user_at_all_is_told_as_that(guarded: Mongod) -> None:
    assert_one_sentence(tailrace("watch", f"mongodb://{guarded.host}/"), "asks for a user and a password")


def test_a_user_without_rights_on_the_oplog_is_told_the_role_that_is_missing(guarded: Mongod) -> None:
    uri = uri_of(guarded, "nobody", PASSWORD)
    assert_one_sentence(tailrace("watch", uri, "shop"), r"may not read the oplog.*role read on the database local")
    done = tailrace("doctor", "--format", "json", uri)
    assert done.returncode == 1
    findings = json.loads(done.stdout)
    assert [(finding["check"], finding["status"]) for finding in findings] == [
        ("replica set", "ok"),
        ("rights", "fail"),
    ]
    assert "role read on the database local" in findings[1]["advice"]


def test_a_user_without_rights_on_documents_is_told_the_role_that_is_missing(guarded: Mongod) -> None:
    with MongodSource(uri_of(guarded, ROOT, PASSWORD)).client as root:
        now = root.admin.command("ping")["operationTime"]
        root.rights.c.insert_one({"_id": 1})
        root.rights.c.update_one({"_id": 1}, {"$set": {"x": 1}})
    start = f"{now.time},{now.inc}"
    done = tailrace(
        *("watch", uri_of(guarded, "reader", PASSWORD), "rights", "--until", "now"),
        *("--start-at-operation-time", start, "--full-document", "updateLookup"),
    )
    assert_one_sentence(done, "may not read the database rights.*role read on rights")
    done = tailrace(
        *("watch", uri_of(guarded, "shopper", PASSWORD), "rights", "--until", "now"),
        *("--start-at-operation-time", start, "--full-document-before-change", "whenAvailable"),
    )
    assert_one_sentence(done, r"may not read pre-images \(config.system.preimages\).*createRole")


def test_doctor_says_when_this_user_may_not_read_the_images_that_are_kept(guarded: Mongod) -> None:
    """Doctor looked for collections that keep images, but not whether the user may read the images: reading failed
    later."""
    with MongodSource(uri_of(guarded, ROOT, PASSWORD)).client as root:
        root.shop.create_collection("imaged", changeStreamPreAndPostImages={"enabled": True})
    for user, status in ((ROOT, "ok"), ("shopper", "warn")):
        finding = json.loads(tailrace("doctor", "--format", "json", uri_of(guarded, user, PASSWORD)).stdout)[-1]
        assert (finding["check"], finding["status"]) == ("pre- and post-images", status)
        assert ("createRole" in finding["advice"]) is (user != ROOT)


def test_doctor_says_what_this_user_may_not_do_beside_reading_the_oplog(guarded: Mongod) -> None:
    """Doctor said ok, and archives, copies and look-ups failed later."""
    with MongodSource(uri_of(guarded, ROOT, PASSWORD)).client as root:
        root.shop.there.insert_one({})
        root.secret.there.insert_one({})
    found = {}
    for user in (ROOT, "shopper", "reader"):
        printed = tailrace("doctor", "--format", "json", uri_of(guarded, user, PASSWORD)).stdout
        found[user] = {finding["check"]: finding for finding in json.loads(printed)}
    copies = {user: (each["look-ups and copies"]["status"], each["look-ups and copies"]["found"]) for user, each in
              found.items()}  # fmt: skip
    assert copies[ROOT] == ("ok", "this user may read every database")
    others = "it is not shown the others, so copies of the whole deployment are refused"
    assert copies["shopper"] == ("ok", f"this user may read shop; {others}")
    assert copies["reader"] == ("warn", "this user may read no database")
    ids = {user: each["replica set id"]["status"] for user, each in found.items()}
    assert ids == {ROOT: "ok", "shopper": "warn", "reader": "warn"}


def test_doctor_names_the_databases_that_may_not_be_read(guarded: Mongod) -> None:
    """The user of the quick start sees all of them, and may read one."""
    add_user(guarded, "newcomer", PASSWORD, [{"role": "clusterMonitor", "db": "admin"}, {"role": "read", "db": "shop"}])
    with MongodSource(uri_of(guarded, ROOT, PASSWORD)).client as root:
        root.shop.there.insert_one({})
        root.secret.there.insert_one({})
    printed = tailrace("doctor", "--format", "json", uri_of(guarded, "newcomer", PASSWORD)).stdout
    found = {finding["check"]: finding for finding in json.loads(printed)}
    assert found["look-ups and copies"]["status"] == "ok"
    assert re.match(r"this user may read shop. This user may not read .*secret", found["look-ups and copies"]["found"])
    assert "role read on each database" in found["look-ups and copies"]["advice"]
    assert found["replica set id"]["status"] == "ok"
    assert found["pre- and post-images"]["status"] == "warn"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["leases"], "cannot list the leases in tailrace.leases: not authorized on tailrace to execute find"),
        (
            ["dead-letters"],
            "dead letters in tailrace.deadLetters .* to execute find .* needs find on tailrace.deadLetters",
        ),
        (
            ["listen", "os:getcwd", "--database", "shop", "--resource", "r"],
            "cannot read the lease .* needs find, insert and update on the collection of leases",
        ),
    ],
)
def test_a_right_that_a_listener_misses_is_told_without_the_server_s_dump(
    guarded: Mongod, arguments: list[str], says: str
) -> None:
    """The whole command and the whole reply were printed, 1,261 characters; dead letters ended as a bug of ours."""
    uri = uri_of(guarded, "shopper", PASSWORD)
    done = tailrace(*arguments, *(["--uri", uri] if arguments[0] == "listen" else [uri]))
    last = done.stderr.decode().splitlines()[-1]
    assert (done.returncode, "bug" in last) == (1, False)
    assert re.search(says, last), last
    assert len(last) < 250


def test_a_short_time_limit_of_the_client_does_not_break_the_wait_for_events(
    replica_set: ReplicaSet, caplog: pytest.LogCaptureFixture
) -> None:
    """Only socketTimeoutMS bounded the wait; under a shorter timeoutMS each wait ended in a lost connection."""
    with closing(MongodSource(replica_set.uri, timeoutMS=3000)) as source:
        batches = source.tail(source.newest(), await_ms=10_000)
        with caplog.at_level(logging.WARNING, logger="tailrace.source"):
            for _ in range(2):
                next(batches)
    assert caplog.records == []


def test_a_reader_of_the_oplog_may_watch(guarded: Mongod) -> None:
    with MongodSource(uri_of(guarded, ROOT, PASSWORD)).client as root:
        root.shop.watched.insert_one({})  # where there is no such database, watch remarks on it
    done = tailrace("doctor", uri_of(guarded, "shopper", PASSWORD))
    assert done.returncode == 0, done.stdout
    assert PASSWORD.encode() not in done.stdout
    done = tailrace("watch", uri_of(guarded, "shopper", PASSWORD), "shop", "--until", "now")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pipeline", "[{"], "--pipeline is not JSON"),
        (["--pipeline", '{"$match": {}}'], "--pipeline must be an array"),
        (["--pipeline", '[{"$out": "x"}]'], r"\$out is not permitted in a \$changeStream pipeline"),
        (["--resume-after", "zz"], "not a valid hex string"),
        (["--resume-after", "82"], "."),
        (["--resume-after", "{"], "token document"),
        (["--start-at-operation-time", "yesterday"], "not a date and time"),
        (["--until", "whenever"], "not a date and time"),
    ],
)
def test_a_wrong_argument_is_told_in_one_sentence(replica_set: ReplicaSet, arguments: list[str], says: str) -> None:
    assert_one_sentence(tailrace("watch", replica_set.uri, "wrong.c", "--until", "now", *arguments), says)


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["--format", "xml"], ["--full-document", "maybe"]])
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(arguments: list[str]) -> None:
    done = tailrace("watch", "mongodb://127.0.0.1:1/", *arguments)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert arguments[0].encode() in done.stderr
