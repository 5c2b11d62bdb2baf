"""``tailrace sync`` as people and programs call it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.cli.main import main
from tests.commands import Command, run_text
from tests.lending import Lender
from tests.patience import PATIENCE_S
from tests.sync.both import STATE_DB

SOURCE, TARGET = "mongodb://localhost:1/?replicaSet=a", "mongodb://localhost:2/?replicaSet=b"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sync"], "needs the connection URIs of a source and a target"),
        (["sync", SOURCE], "needs the connection URIs of a source and a target"),
        (["sync", "plan", SOURCE], "tailrace sync plan needs the connection URIs"),
        (["sync", "pln", SOURCE, TARGET], "needs the connection URIs"),
        (["sync", SOURCE, TARGET, "--rename", "shop"], "--rename shop does not give a new name"),
        (["sync", "verify", SOURCE, TARGET, "--sample", "-1"], "--sample must be a number of documents"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_opened(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rename", "a=b.c"], "'a=b.c' does not give a new name"),
        (["--lanes", "0"], "1 to 64 lanes, not 0"),
        (["--lease-seconds", "0.1"], "at least one second"),
        (["--only", "shop"], "shop"),
        (["--metrics", "nowhere"], "--metrics"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["sync", SOURCE, TARGET, *options]) in (1, 2)
    assert sentence in capsys.readouterr().err


@pytest.fixture
def ends(lender: Lender) -> Iterator[tuple[str, str]]:
    with lender.lent() as source, lender.lent() as target:
        with MongoClient[Any](source.uri) as client:
            client.shop.orders.insert_many([{"_id": n} for n in range(20)])
        yield source.uri, target.uri


def called(*words: str) -> tuple[int, str, str]:
    done = run_text("sync", *words)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.mongod
def test_a_sync_from_its_plan_to_its_way_back(ends: tuple[str, str]) -> None:
    """The commands one after the other, as in the how-to."""
    status, out, _ = called("plan", *ends, "--json")
    assert status == 0
    assert json.loads(out)["refusals"] == []
    status, _, err = called("status", *ends)
    assert (status, "there is no sync" in err) == (1, True)
    status, out, _ = called(*ends, "--once", "--json")
    assert status == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["phase"] == "follow"
    assert lines[-1]["isConsistent"] is True
    status, out, _ = called("verify", *ends)
    assert (status, "differences: 0" in out) == (0, True)
    with MongoClient[Any](ends[1]) as client:
        client.shop.orders.update_one({"_id": 3}, {"$set": {"planted": 1}})
    status, out, err = called("verify", *ends)
    assert status == 1
    assert "differs" in err
    assert "shop.orders" in out
    with MongoClient[Any](ends[1]) as client:
        client.shop.orders.update_one({"_id": 3}, {"$unset": {"planted": 1}})
    status, out, _ = called("pause", *ends, "--json")
    assert (status, json.loads(out)["paused"]) == (0, True)
    status, out, _ = called("resume", *ends, "--json")
    assert (status, json.loads(out)["paused"]) == (0, False)
    status, out, _ = called("cutover", *ends, "--writers-stopped", "--json")
    assert status == 0
    assert json.loads(out)["sourceBlocked"] is False
    status, _, err = called("cutover", *ends, "--writers-stopped")
    assert (status, "already been cut over" in err) == (1, True)
    with MongoClient[Any](ends[1]) as client:
        client.shop.orders.insert_one({"_id": "back"})
    status, _, _ = called("reverse", *ends, "--once")
    assert status == 0
    with MongoClient[Any](ends[0]) as client:
        assert client.shop.orders.find_one({"_id": "back"}) is not None


@pytest.mark.mongod
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_a_position_with_0(ends: tuple[str, str], number: signal.Signals) -> None:
    process = Command("sync", *ends, "--name", "named", "--rename", "shop=store", "--only", "shop.*")
    deadline = time.monotonic() + PATIENCE_S
    with MongoClient[Any](ends[1]) as client:
        while (client[STATE_DB].syncs.find_one({"_id": "named"}) or {}).get("phase") != "follow":
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        document = client[STATE_DB].syncs.find_one({"_id": "named"})
        assert document["owner"] is None, "the lease is given back"
        assert client.store.orders.count_documents({}) == 20


@pytest.mark.mongod
def test_secrets_of_both_uris_are_in_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    uri = "mongodb://ann:s3cret@localhost:1/?serverSelectionTimeoutMS=200"
    assert main(["sync", "plan", uri, uri.replace(":1/", ":2/")]) == 1
    told = capsys.readouterr()
    assert "s3cret" not in told.err + told.out
