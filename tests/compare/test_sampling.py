"""``--compare SHARE``: a share of a running product's time is compared, and whatever comes of it, it goes on."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import socket
import stat
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pymongo
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.base.metrics_server import serve_metrics
from tailrace.cli import run as run_command
from tailrace.cli.main import main
from tailrace.cli.sampled import sampled
from tailrace.compare import SampledComparison, Streams, read_report
from tailrace.embedded import ReplicaSet
from tailrace.errors import ServerError, UsageError
from tailrace.lake.spark.store.pipeline_file import load
from tailrace.watch.compare import comparison, deployment, sampling
from tailrace.watch.compare.metrics import ComparisonCollector
from tailrace.watch.compare.sampling import SAMPLE_S, SamplingPace, comparable, parse_share
from tests import commands
from tests.compare.planted import FAULTS, altered
from tests.compare.replay import replay_report
from tests.differential.auth import add_user, mongod_with_users, uri_of
from tests.differential.beside import wait_until
from tests.gateway.running import GatewayProcess
from tests.patience import PATIENCE_S
from tests.spark.commands import finished, tailrace

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_AWAIT_MS", 50)
    monkeypatch.setattr(comparison, "_LOOK_S", 0.05)


@contextmanager
def writing(uri: str, database: str) -> Iterator[pymongo.MongoClient[Any]]:
    """Documents come, change and go until the block ends."""
    over = threading.Event()

    def write(shop: Any) -> None:
        number = 0
        while not over.wait(0.01):
            number += 1
            shop.orders.insert_one({"_id": f"{SECRET} {number}", "n": 1})
            shop.orders.update_one({"_id": f"{SECRET} {number}"}, {"$set": {"n": 2, SECRET: number}})
            shop.orders.delete_one({"_id": f"{SECRET} {number - 5}"})

    with pymongo.MongoClient[Any](uri) as client:
        writer = threading.Thread(target=write, args=(client[database],), daemon=True)
        writer.start()
        try:
            yield client
        finally:
            over.set()
            writer.join()
            client.drop_database(database)


SHORT = replace(sampling.SAMPLE_LIMITS, duration_s=0.3, resume_every_s=0.2)


def numbers_of(address: str) -> dict[str, float]:
    """What Prometheus reads, without the prefix."""
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        return {
            " ".join([sample.name.removeprefix("tailrace_compare_"), *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }


# -- the share


@pytest.mark.parametrize(
    ("text", "share"),
    [("1%", 0.01), ("0.01", 0.01), (" 2.5% ", 0.025), ("100%", 1.0), ("0.5", 0.5), ("0.01%", 0.0001)],
)
def test_a_share_is_a_percentage_or_a_part_of_one(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    "text", ["", "1", "0", "0%", "101%", "-1%", "1.5", "nan", "1 %", "%", "0.001%", "a lot", "1e-2", "١%"]
)
def test_anything_else_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"share.* Such as 1% or 0\.01"):
        parse_share(text)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.25, 1.0])
def test_samples_take_their_share_of_the_time_and_no_more(share: float) -> None:
    pace = SamplingPace(share, seed=1)
    busy = [0.1 + (number % 17) for number in range(20_000)]
    pauses = [pace.pause_s(one, failed=False) for one in busy]
    assert sum(busy) / (sum(busy) + sum(pauses)) == pytest.approx(share, rel=0.01)
    assert all(
        0.5 * one * (1 / share - 1) <= pause <= 1.5 * one * (1 / share - 1)
        for one, pause in zip(busy, pauses, strict=True)
    )


def test_a_deployment_that_is_unwell_is_not_asked_more_often() -> None:
    pace = SamplingPace(0.01, seed=1)
    assert pace.pause_s(0.001, failed=True) >= 0.5 * SAMPLE_S * 99
    assert SamplingPace(1.0, seed=1).pause_s(0.001, failed=True) >= SAMPLE_S


class Clock:
    """A clock that is moved by the test, and a sleep that waits for it."""

    def __init__(self, end: float) -> None:
        self.now, self._end = 0.0, end

    def __call__(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.now >= self._end

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.is_set()


def test_the_thread_keeps_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(end=1_000_000)
    compared = SampledComparison("mongodb://127.0.0.1:1/", None, Streams(), 0.02, clock=clock, seed=5)
    busy = 0.0

    def compare_once() -> bool:
        nonlocal busy
        busy += 3.0
        clock.now += 3.0
        return True

    monkeypatch.setattr(compared, "_compare_once", compare_once)
    monkeypatch.setattr(compared, "_stopped", clock)
    compared._sample()
    compared._deployment.close()
    assert busy / clock.now == pytest.approx(0.02, rel=0.02)


# -- what is compared


def test_both_streams_are_asked_what_the_products_stream_is_asked() -> None:
    stage = {"fullDocument": "updateLookup", "showExpandedEvents": True, "showSystemEvents": True, "resumeAfter": {}}
    streams, left_out = comparable(stage, [{"$match": {}}], {"locale": "en"})
    assert streams.said == {"fullDocument": "updateLookup", "showExpandedEvents": True, "showSystemEvents": True}
    assert (streams.pipeline, streams.collation, left_out) == ([{"$match": {}}], {"locale": "en"}, [])
    streams, left_out = comparable({"fullDocument": "exact", "fullDocumentBeforeChange": "exactWhenAvailable"})
    assert (streams.said, left_out) == ({}, ["fullDocument", "fullDocumentBeforeChange"])


def test_samples_of_a_live_stream_differ_in_nothing(replica_set: ReplicaSet) -> None:
    uri, database = replica_set.uri, "sampledLive"
    streams = Streams(show_expanded_events=True, full_document="updateLookup")
    with writing(uri, database), SampledComparison(uri, database, streams, 0.5, limits=SHORT) as running:
        wait_until(lambda: running.numbers.comparisons >= 3 and running.numbers.events, "three samples")
    found = running.numbers
    assert (found.total, found.failures) == (0, 0)
    assert str(found).endswith("differences: 0")


def test_events_of_definitions_are_left_out_where_a_server_has_none(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment.DeploymentComparison, "server_version", "5.0.4")
    with SampledComparison(replica_set.uri, "x", Streams(show_expanded_events=True), 1.0, limits=SHORT) as running:
        assert running._deployment.streams.show_expanded_events is False


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    real = deployment.DeploymentComparison.opener_of_ours
    patch.setattr(
        deployment.DeploymentComparison, "opener_of_ours", lambda compared: altered(real(compared), FAULTS[fault][0]())
    )


def test_a_difference_is_counted_logged_once_and_reported_without_values(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plant(monkeypatch, "update")
    uri, database, path = replica_set.uri, f"{SECRET}Sampled", tmp_path / "report.json"
    path.write_text("an earlier run's")
    with (
        caplog.at_level(logging.WARNING, "tailrace.compare"),
        writing(uri, database),
        SampledComparison(uri, database, Streams(), 1.0, report=path, limits=SHORT) as running,
        serve_metrics(ComparisonCollector(running), "127.0.0.1", 0) as address,
    ):
        wait_until(lambda: running.numbers.comparisons >= 2 and running.numbers.total, "two samples")
        served = numbers_of(address)
    assert served["differences_total bytes"] > 1
    assert served["differences_total missing"] == 0
    assert served["comparisons_total"] >= 2
    assert served["share"] == 1
    said = [record.getMessage() for record in caplog.records]
    assert [one for one in said if "differ" in one] == [
        "Tailrace and the server's own stream differ: the events differ (update, updateDescription.updatedFields). "
        f"Please report it, with the masked evidence in {path}"
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in path.read_text()
    report = read_report(path)
    assert [one["operation"] for one in report["differences"]] == ["update"]
    assert report["differences"][0]["count"] > 1
    assert replay_report(path) == 1
    assert (tmp_path / "report.before.json").read_text() == "an earlier run's"


def test_without_a_name_the_report_is_a_private_temporary_file(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, "twice")
    monkeypatch.setattr(sampling.tempfile, "tempdir", str(tmp_path))
    uri, database, said = replica_set.uri, "sampledTwice", list[str]()
    with writing(uri, database), SampledComparison(uri, database, Streams(), 1.0, tell=said.append, limits=SHORT):
        wait_until(lambda: said, "a difference")
    (path,) = tmp_path.iterdir()
    assert f"the masked evidence in {path}" in said[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one["kind"] for one in read_report(path)["differences"]] == ["twice"]


def test_where_the_users_stages_make_the_events_no_name_of_theirs_is_told(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, "update")
    uri, database, said = replica_set.uri, "sampledStages", list[str]()
    streams = Streams(pipeline=[{"$set": {SECRET: "$documentKey._id"}}])
    report = tmp_path / "report.json"
    with (
        writing(uri, database),
        SampledComparison(uri, database, streams, 1.0, report=report, tell=said.append, limits=SHORT),
    ):
        wait_until(lambda: said, "a difference")
    assert said[0].startswith("Tailrace and the server's own stream differ: the events differ. Please")
    assert SECRET not in report.read_text()


def test_a_report_that_cannot_be_written_is_told_and_the_difference_counts(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, "lost")
    uri, database, said, gone = replica_set.uri, "sampledFull", list[str](), tmp_path / "gone"
    with (
        writing(uri, database),
        SampledComparison(uri, database, Streams(), 1.0, report=gone / "x", tell=said.append, limits=SHORT) as running,
    ):
        wait_until(lambda: running.numbers.comparisons >= 2 and said, "a difference")
    assert "The report cannot be written" in said[0]
    assert running.numbers.failures == 0
    assert running.numbers.differences["missing"] > 0


# -- the product goes on


class Broken:
    """Opens the server's stream once, and then fails with one of ``failures`` each time until they are used up."""

    def __init__(self, patch: pytest.MonkeyPatch, failures: list[Exception]) -> None:
        real = deployment.DeploymentComparison.opener_of_server
        self.opened = 0

        def opener(compared: Any, *arguments: Any) -> Callable[[Mapping[str, Any]], Any]:
            opens = real(compared, *arguments)

            def opened(start: Mapping[str, Any]) -> Any:
                self.opened += 1
                if self.opened > 1 and failures:
                    raise failures.pop(0)
                return opens(start)

            return opened

        patch.setattr(deployment.DeploymentComparison, "opener_of_server", opener)
        patch.setattr(sampling, "SAMPLE_S", 0.05)


def test_whatever_goes_wrong_later_is_told_and_tried_again(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [ServerError("no primary", code=10107) for _ in range(3)]
    Broken(monkeypatch, [*gone, ZeroDivisionError("a bug")])
    uri, database, said = replica_set.uri, "sampledBroken", list[str]()
    with (
        writing(uri, database),
        SampledComparison(uri, database, Streams(), 1.0, tell=said.append, limits=SHORT) as running,
    ):
        wait_until(lambda: running.numbers.comparisons and running.numbers.events, "a sample after the failures")
    assert running.numbers.failures == 4
    assert running.numbers.total == 0
    assert "no primary" in said[0]
    assert "ZeroDivisionError" in said[1]
    assert len(said) == 2, "each reason once"


def test_a_member_that_is_gone_for_a_while_is_no_difference(start_replica_set: Callable[..., ReplicaSet]) -> None:
    running = start_replica_set(1)
    said: list[str] = []
    with SampledComparison(running.uri, "shop", Streams(), 1.0, tell=said.append, limits=SHORT) as samples:
        with writing(running.uri, "shop"):
            wait_until(lambda: samples.numbers.events, "events are compared")
        running.kill(0)
        running.restart(0)
        before = samples.numbers
        with writing(running.uri, "shop"):
            wait_until(lambda: samples.numbers.events > before.events, "events are compared again")
    assert samples.numbers.total == 0
    assert not [one for one in said if "differ" in one]


def test_watch_goes_on_where_the_comparison_fails(
    replica_set: ReplicaSet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken(monkeypatch, [ServerError("not now", code=6) for _ in range(10_000)])
    uri, database = replica_set.uri, "sampledProduct"
    with writing(uri, database):
        wanted = main(["watch", uri, database, "--until", "300", "--compare", "100%", "--format", "json"])
    out, err = capsys.readouterr()
    assert wanted == 0
    assert broken.opened > 1
    assert len(out.splitlines()) == 300
    assert "has failed, and is tried again later: not now" in caplog.text
    assert re.search(r"compared with the server's own stream: 0 events in 0 comparisons, .* comparisons? failed", err)


def test_without_the_right_to_open_the_servers_stream_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mongod_with_users(tmp_path) as mongod:
        add_user(mongod, "reader", "pw", [{"role": "read", "db": "local"}])
        add_user(mongod, "both", "pw", [{"role": "read", "db": "local"}, {"role": "read", "db": "shop"}])
        reader = uri_of(mongod, "reader", "pw", directConnection="true")
        tables = str(tmp_path / "tables")
        for words in (
            ("watch", reader, "shop", "--until", "now"),
            ("gateway", "--upstream", reader, "--listen", "127.0.0.1:0"),
            ("tables", "write", reader, tables, "shop.*", "--once"),
        ):
            assert main([*words, "--compare", "1%"]) == 1
            said = capsys.readouterr().err
            what = "all databases" if words[0] == "gateway" else "shop"
            assert f"may not open the server's own change stream on {what} (13 Unauthorized)" in said
            assert "Or start without --compare" in said
            assert "compared with" not in said
        assert not Path(tables).exists()
        both = uri_of(mongod, "both", "pw", directConnection="true")
        assert main(["watch", both, "shop", "--until", "now", "--compare", "1%"]) == 0


# -- the commands


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["watch", "--compare", "5"], "does it mean 5%?"),
        (["watch", "--compare", "1%", "--engine", "server"], "--engine server asks for others"),
        (["watch", "--compare", "1%", "--server-version", "7.0"], "--server-version asks for others"),
        (["watch", "--compare", "1%", "--explain"], "--explain gives no events"),
        (["watch", "--compare-report", "x.json"], "--compare is not given"),
        (["watch", "--compare", "1%", "--compare-report", "/no/such/directory/x"], "no file can be written there"),
        (["gateway", "--compare", "many"], "'many' is not a share"),
        (["tables", "write", "DIR", "shop.*", "--compare", "200%"], "cannot be kept as a share"),
        (["tables", "status", "DIR", "--compare", "1%"], "--compare belongs to write"),
        (["run", "FILE", "--verify", "--compare", "1%"], "--verify follows no stream"),
        (["run", "FILE", "--compare", "0"], "cannot be kept as a share"),
    ],
)
def test_what_cannot_be_compared_is_wrong_usage(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TAILRACE_URI", "mongodb://127.0.0.1:1/")
    (tmp_path / "pipeline.yaml").write_text("source: {database: shop}\nlake: {path: lake}\n")
    places = {"DIR": str(tmp_path / "tables"), "FILE": str(tmp_path / "pipeline.yaml")}
    assert main([places.get(word, word) for word in words]) == 2
    assert said in capsys.readouterr().err


class Captured:
    """The comparison that a command in this process makes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.running: SampledComparison | None = None
        enter = SampledComparison.__enter__

        def entered(one: SampledComparison) -> SampledComparison:
            self.running = one
            return enter(one)

        patch.setattr(SampledComparison, "__enter__", entered)

    @property
    def has_compared(self) -> bool:
        return self.running is not None and self.running.numbers.events > 0


def test_watch_compares_and_says_so_at_its_end(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    captured = Captured(monkeypatch)
    uri, database = replica_set.uri, "sampledWatch"

    def end(client: pymongo.MongoClient[Any]) -> None:
        wait_until(lambda: captured.has_compared, "events are compared")
        client[database].drop_collection("orders")

    with writing(uri, database) as client:
        client[database].orders.insert_one({"_id": 0})
        ender = threading.Thread(target=end, args=(client,), daemon=True)
        ender.start()
        status = main(["watch", uri, f"{database}.orders", "--compare", "100%", "--format", "json"])
        ender.join()
    out, err = capsys.readouterr()
    assert status == 0
    assert '"operationType":"invalidate"' in out.replace(" ", "")
    assert re.search(r"compared with the server's own stream: [1-9][\d,]* events in .*differences: 0", err), err


def test_a_gateway_compares_and_serves_the_numbers(replica_set: ReplicaSet, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--compare", "50%", "--metrics", "127.0.0.1:0")
    with writing(replica_set.uri, "sampledGateway"), GatewayProcess(replica_set.uri, log, *options) as gateway:
        found: dict[str, float] = {}

        def has_compared() -> bool:
            found.update(numbers_of(str(gateway._statistics)))
            return found["events_total"] > 0

        wait_until(has_compared, "events are compared")
        assert gateway.stop() == 0
    assert sum(value for name, value in found.items() if name.startswith("differences_total")) == 0
    assert found["failures_total"] == 0
    assert found["share"] == 0.5
    assert "compared with the server's own stream: " in log.read_text()


def test_tables_compare_and_serve_the_numbers(replica_set: ReplicaSet, tmp_path: Path) -> None:
    database, err = "sampledTables", tmp_path / "err"
    words = ("tables", "write", replica_set.uri, str(tmp_path / "tables"), f"{database}.*")
    with writing(replica_set.uri, database), err.open("wb") as stderr:
        command = commands.Command(*words, "--compare", "50%", "--metrics", "127.0.0.1:0", stderr=stderr)
        try:
            address = re.compile(r"statistics at (http://\S+)")
            wait_until(lambda: address.search(err.read_text()), "it serves statistics")
            found = address.search(err.read_text())
            assert found is not None
            served: dict[str, float] = {}

            def has_compared() -> bool:
                served.update(numbers_of(found[1]))
                return served["events_total"] > 0 and "tailrace_tables_stated_seconds" in served  # the copy has ended

            wait_until(has_compared, "events are compared")
            command.send_signal(signal.SIGTERM)
            assert command.wait(PATIENCE_S) == 0
        finally:
            command.kill()
    assert served["failures_total"] == 0
    assert "tailrace_tables_changes_total" in served
    assert re.search(r"compared with the server's own stream: [1-9].*differences: 0", err.read_text())


def test_run_compares_its_source(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """Without Spark: what ``tailrace run`` has beside it."""
    database, path, told = "sampledRun", tmp_path / "pipeline.yaml", tmp_path / "told"
    path.write_text(
        f"source: {{uri: '{replica_set.uri}', collections: '{database}.orders', fullDocument: updateLookup,\n"
        "  pipeline: [{$match: {operationType: {$in: [insert, update]}}}]}\n"
        "lake: {path: lake}\n"
    )
    arguments = argparse.Namespace(compare="100%", compare_report=None)
    with told.open("w") as stderr, writing(replica_set.uri, database):
        log = run_command._SparkLog(None, stderr)
        with run_command._sampled(load(path), arguments, log) as running:
            assert running is not None
            wait_until(lambda: running.numbers.events > 0, "events are compared")
    assert [next(iter(stage)) for stage in running._deployment.streams.pipeline] == ["$match", "$match"]
    assert running._deployment.streams.said == {"fullDocument": "updateLookup"}
    assert running.numbers.total == 0
    assert "compared with the server's own stream: " in told.read_text()


@pytest.mark.slow
@pytest.mark.spark
def test_a_run_on_spark_compares_and_serves_the_numbers(replica_set: ReplicaSet, tmp_path: Path) -> None:
    database, path = "sampledSpark", tmp_path / "pipeline.yaml"
    path.write_text(
        f"source: {{uri: '{replica_set.uri}', database: {database}}}\nlake: {{path: lake}}\n"
        "spark: {cores: 2, config: {spark.sql.shuffle.partitions: 2}}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with writing(replica_set.uri, database):
        process = tailrace("run", str(path), "--progress", "json", "--metrics", f"127.0.0.1:{port}", "--compare", "50%")
        assert process.stdout is not None
        assert process.stdout.readline()
        wait_until(lambda: numbers_of(f"http://127.0.0.1:{port}/metrics")["events_total"] > 0, "events are compared")
        process.send_signal(signal.SIGTERM)
        code, _, err = finished(process)
    assert code == 0
    assert re.search(r"compared with the server's own stream: [1-9].*differences: 0", err)


def test_without_the_option_nothing_is_opened() -> None:
    arguments = argparse.Namespace(compare=None, compare_report=None)
    with sampled(arguments, "mongodb://127.0.0.1:1/", None, lambda: 1 / 0) as running:  # type: ignore[arg-type,return-value]
        assert running is None
