"""The Grafana board and the alert rules name metrics that exist, and a real Prometheus accepts both."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pymongo
import pytest
import yaml
from prometheus_client.registry import Collector

from tailrace.act.consumer.metrics import ListenerCollector
from tailrace.act.consumer.rules.settings import ListenerStatistics
from tailrace.act.consumer.standing import ListenerLag
from tailrace.act.sync.metrics import SyncCollector
from tailrace.act.sync.progress import SyncProgress
from tailrace.base.metrics_server import serve_metrics
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.planning.backlog import Backlog
from tailrace.lake.spark.query_collector import QueryCollector
from tailrace.lake.spark.query_numbers import QueryNumbers
from tailrace.lake.tables.metrics import TablesCollector
from tailrace.lake.tables.progress import TablesProgress
from tailrace.read.archive.metrics import ArchiveCollector
from tailrace.read.archive.writer import ArchiveProgress
from tailrace.watch.compare.metrics import ComparisonCollector
from tailrace.watch.compare.sampling import SamplingNumbers
from tailrace.watch.gateway.collector import GatewayCollector
from tailrace.watch.gateway.metrics import GatewayMetrics
from tests.differential.beside import wait_until
from tests.gateway.gateways import running_gateway

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy" / "prometheus" / "tailrace-alerts.yaml"
BOARD: Final = ROOT / "deploy" / "grafana" / "tailrace.json"
METRIC: Final = re.compile(r"\btailrace_[a-z_]+\b")


def rule_expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def board_expressions() -> list[str]:
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def collectors() -> Iterator[Collector]:
    """One of each kind, which has done nothing yet but serves all of its numbers."""
    now = ClusterTime.of(1, 1)
    yield GatewayCollector(GatewayMetrics())
    listener = SimpleNamespace(resource="a", statistics=ListenerStatistics())
    yield ListenerCollector([listener], lambda _: ListenerLag(0.0, True))
    yield TablesCollector(cast(Any, SimpleNamespace(progress=TablesProgress(0, 0, 0, now), resyncing=[])))
    yield ArchiveCollector(cast(Any, SimpleNamespace(statistics=lambda: {"a": ArchiveProgress(until=now)})))
    yield SyncCollector(lambda: SyncProgress("a", time=now, lag_s=0.0, reach_s=0.0, verified={"differences": 0}))
    yield ComparisonCollector(cast(Any, SimpleNamespace(numbers=SamplingNumbers(0, 0, 0, 0, 0.0, {}), share=0.0)))
    yield QueryCollector(lambda: [QueryNumbers("a", rows=Counter(insert=1), backlog=Backlog(0, 0, 0))])


def metrics() -> set[str]:
    """Every name that the commands serve."""
    families = [family for collector in collectors() for family in collector.collect()]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


@pytest.mark.parametrize("source", [rule_expressions, board_expressions])
def test_every_metric_that_is_named_exists(source: Any) -> None:
    named = {name for expression in source() for name in METRIC.findall(expression)}
    assert len(named) > 12
    assert named - metrics() == set()


def test_a_metric_that_does_not_exist_would_be_found() -> None:
    assert {"tailrace_gateway_lag_seconds", "tailrace_gateway_events_total", "tailrace_query_rows_total"} <= metrics()
    assert not {"tailrace_gateway_lag", "tailrace_gateway_events", "tailrace_gateway_lag_seconds_total"} & metrics()


def test_the_board_is_one_that_grafana_takes() -> None:
    board = json.loads(BOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    covered = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(covered) == len(set(covered)), "two panels at one place"
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "instance"}


# -- a real Prometheus -------------------------------------------------------------------------------------------


@pytest.mark.prometheus
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rule_expressions())} rules found" in done.stdout


class Prometheus:
    """A running server that scrapes ``target``."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"{self._base}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success"
        return found["data"]

    def has(self, expression: str) -> bool:
        try:
            return bool(self.ask("query", query=expression)["result"])
        except OSError:
            return False  # it has not begun to listen


@pytest.fixture
def prometheus(replica_set: ReplicaSet, tmp_path: Path) -> Iterator[Prometheus]:
    with running_gateway(replica_set.uri) as gateway:
        collector = GatewayCollector(gateway.gateway.metrics, gateway.gateway.tail_statistics)
        with (
            serve_metrics(collector, "127.0.0.1", 0, beside=[*collectors()][1:]) as url,
            pymongo.MongoClient[dict[str, Any]](gateway.uri()) as client,
            client.prometheus.orders.watch(max_await_time_ms=100),
        ):
            shutil.copy(RULES, tmp_path)
            (tmp_path / "prometheus.yml").write_text(
                "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
                f"rule_files: [{RULES.name}]\n"
                "scrape_configs:\n"
                f"  - {{job_name: tailrace, static_configs: [{{targets: ['{urllib.parse.urlsplit(url).netloc}']}}]}}\n"
            )
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            process = subprocess.Popen(
                ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                yield Prometheus(port)
            finally:
                process.terminate()
                process.wait(60)


#: For each alert, the series with which it fires, one value a minute from 0 to 90.
FIRES: Final = {
    "TailraceDown": {'up{job="tailrace", instance="a"}': "0x90"},
    "TailraceGatewayCannotRead": {"tailrace_gateway_trouble": "1x90"},
    "TailraceGatewayLags": {"tailrace_gateway_lag_seconds": "61x90"},
    "TailraceGatewayRefusesClients": {"tailrace_gateway_connections_refused_total": "0+1x90"},
    "TailraceGatewayProcessesEnd": {"tailrace_gateway_processes_ended_total": "0+1x90"},
    "TailraceListenerLags": {'tailrace_listener_lag_seconds{resource="a"}': "301x90"},
    "TailraceNobodyListens": {
        'tailrace_listener_holds_lease{resource="a"}': "0x90",
        'tailrace_listener_paused{resource="a"}': "0x90",
    },
    "TailraceHandlerFails": {'tailrace_listener_handler_failures_total{resource="a"}': "0+1x90"},
    "TailraceChangesGivenUp": {'tailrace_listener_changes_skipped_total{resource="a"}': "0+1x90"},
    "TailraceHistoryLost": {'tailrace_listener_gaps_total{resource="a"}': "0+1x90"},
    "TailraceQueryLosesItsPlace": {'tailrace_query_oplog_seconds_left{query="a"}': "3599x90"},
    "TailraceTablesLag": {"tailrace_tables_lag_seconds": "601x90"},
    "TailraceArchiveLags": {"tailrace_archive_lag_seconds": "901x90"},
    "TailraceSyncLosesItsPlace": {"tailrace_sync_oplog_reach_seconds": "3599x90"},
    "TailraceSyncDiffers": {"tailrace_sync_differences": "1x90"},
    "TailraceEventsDiffer": {"tailrace_compare_differences_total": "0+1x90"},
    "TailraceUnknownEntries": {"tailrace_gateway_unknown_entries_total": "0+1x90"},
}
#: The same series in good times.
CALM: Final = {
    'up{job="tailrace", instance="a"}': "1x90",
    "tailrace_gateway_lag_seconds": "60x90",
    'tailrace_listener_lag_seconds{resource="a"}': "300x90",
    'tailrace_listener_holds_lease{resource="a"}': "1x90",
    'tailrace_query_oplog_seconds_left{query="a"}': "3600x90",
    "tailrace_tables_lag_seconds": "600x90",
    "tailrace_archive_lag_seconds": "900x90",
    "tailrace_sync_oplog_reach_seconds": "3600x90",
}


@pytest.mark.prometheus
def test_each_alert_fires_with_its_series_alone_and_none_in_good_times(tmp_path: Path) -> None:
    rules = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert list(FIRES) == rules
    calm = {**dict.fromkeys((series for one in FIRES.values() for series in one), "0x90"), **CALM}
    cases = [(name, calm | series) for name, series in FIRES.items()] + [(None, calm)]
    asked = "count by (alertname) (ALERTS{alertstate='firing'})"
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in one.items()],
            "promql_expr_test": [
                {
                    "expr": asked,
                    "eval_time": "60m",
                    "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name else [],
                }
            ],
        }
        for name, one in cases
    ]
    file = tmp_path / "alerts.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
@pytest.mark.mongod
def test_a_prometheus_scrapes_a_gateway_and_evaluates_rules_and_board(prometheus: Prometheus) -> None:
    wait_until(lambda: prometheus.has("tailrace_gateway_streams == 1"), "the gateway is scraped")
    given = set(prometheus.ask("label/__name__/values"))
    named = {name for text in rule_expressions() + board_expressions() for name in METRIC.findall(text)}
    assert {name for name in named if name.startswith("tailrace_gateway_")} - given == set()
    wait_until(
        lambda: all(rule["health"] == "ok" for group in prometheus.ask("rules")["groups"] for rule in group["rules"]),
        "every rule has been evaluated",
    )
    # A panel of faults shows nothing while there is none; what it is made of must be there all the same.
    for expression in board_expressions():
        asked = expression.replace("$instance", ".*").replace("$__rate_interval", "1m").removesuffix(" > 0")
        wait_until(partial(prometheus.has, asked), f"the board's panel has data: {expression}")
