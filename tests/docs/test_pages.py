"""Every snippet and every command of the README, the pages and the examples runs as it is printed.

A page's snippets run in their order in one directory, against real servers; only the addresses in connection strings
are replaced. What cannot run here stands in ``NOT_RUN`` with its reason, and leaves it when it leaves the page.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pymongo
import pytest

from tailrace.cli.main import build_parser
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.docs import fork_server
from tests.docs.runner import Interpreter, PageRunner
from tests.docs.shop import open_sharded_shop, open_shop, order
from tests.docs.snippets import ROOT, Snippet, indented_code, inline_commands, name_of, pages, snippets
from tests.gateway.running import GatewayProcess

LANGUAGES = {"console", "sh", "python", "sql", "yaml", "js", "dockerfile", "ini", "text"}

#: ``(page, words of the snippet)``: why it is not run.
NOT_RUN: dict[tuple[str, str], str] = {
    ("docs/how-to/tables.md", "az://my-container"): "run by tests/tables/test_azure.py on a store of its own",
    ("docs/how-to/tables.md", "gs://my-bucket"): "run by tests/tables/test_google.py on a store of its own",
    ("docs/how-to/tables.md", "s3://my-bucket"): "run by tests/tables/test_object_store.py on a store of its own",
    ("docs/how-to/tables.md", '"s3.endpoint"'): "its readers are those of tests/tables/test_iceberg_in_store.py",
    ("docs/how-to/lake.md", '"s3.endpoint"'): "its readers are those of tests/tables/test_lake_iceberg_in_store.py",
    ("docs/how-to/lake.md", "s3://my-bucket"): "run by tests/spark/test_lake_in_store.py and tests/tables",
    ("docs/how-to/archive.md", "s3://my-bucket"): "run by tests/differential/test_archive_in_store.py",
    ("docs/how-to/spark-cluster.md", "--master spark://"): "needs a standalone Spark cluster",
    ("docs/how-to/spark-cluster.md", "--master yarn"): "needs YARN",
    ("docs/how-to/spark-cluster.md", "--master k8s://"): "needs Kubernetes",
    ("docs/how-to/spark-cluster.md", "local-cluster["): "run by tests/spark/test_cluster.py, with a script of its own",
    ("docs/design/truth.md", "--seeds 1-50"): "a fuzz of hours; tests/differential/test_fuzz_slice.py runs a slice",
}


def skipped(snippet: Snippet) -> str | None:
    return next((why for (page, words), why in NOT_RUN.items() if page == snippet.page and words in snippet.text), None)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    running = Interpreter(tmp_path_factory.mktemp("interpreter") / "log")
    yield running
    running.close()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Path]:
    with fork_server.commands(tmp_path_factory.mktemp("programs"), interpreter.session) as directory:
        yield directory


@pytest.fixture(scope="module")
def shop() -> Iterator[ReplicaSet]:
    with ReplicaSet(1) as replica_set, open_shop(replica_set):
        yield replica_set


@pytest.fixture(scope="module")
def guarded() -> Iterator[ReplicaSet]:
    """A server with users; each page makes its own users."""
    with ReplicaSet(1, root_password="r00t") as replica_set, open_shop(replica_set):
        yield replica_set


@pytest.fixture(scope="module")
def sharded_shop(sharded_cluster: ShardedCluster) -> Iterator[ShardedCluster]:
    with open_sharded_shop(sharded_cluster):
        yield sharded_cluster


@pytest.fixture(scope="module")
def shop_gateway(shop: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(shop.uri, tmp_path_factory.mktemp("gateway") / "log") as running:
        yield running


@pytest.fixture
def moved() -> Iterator[Callable[[str], str]]:
    """The replica sets that a page moves from and to, by their names: its own, since one of them ends as another's
    copy."""
    with ExitStack() as stack:
        started: dict[str, ReplicaSet] = {}

        def find(name: str) -> str:
            if name not in started:
                started[name] = stack.enter_context(ReplicaSet(1))
                if name == "old":
                    with pymongo.MongoClient(started[name].uri) as client:
                        client["shop"]["orders"].insert_many([order(number) for number in range(100)])
            return str(started[name].uri)

        yield find


@pytest.fixture
def uri_for(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """What stands in for a page's connection string: a user's for the server with users, one that names ``cfg`` for the
    cluster, one that names a gateway for one, ``replicaSet=old`` and ``new`` for two of its own, any other for the
    shop."""

    def find(uri: str) -> str:
        if named := re.search(r"replicaSet=(old|new2?)$", uri):
            return str(request.getfixturevalue("moved")(named[1]))
        if "gateway" in uri:
            return str(request.getfixturevalue("shop_gateway").uri)
        if "cfg" in uri:
            return str(request.getfixturevalue("sharded_shop").uri)
        user = re.match(r"mongodb://([^@/]*)@", uri)
        if uri == "mongodb://root" or (user and user[1].startswith("tailrace:")):
            guarded = request.getfixturevalue("guarded")
            if user is None:
                return str(guarded.uri)
            return f"mongodb://{user[1]}@{guarded.members[0].host}/?replicaSet={guarded.name}&authSource=admin"
        return str(request.getfixturevalue("shop").uri)

    return find


def fill(directory: Path, shop: ReplicaSet) -> None:
    """The files that pages take for granted: a dump, the examples, and a pipeline file."""
    (directory / "dump").mkdir()
    with (
        pymongo.MongoClient(shop.uri) as client,
        (directory / "dump" / "oplog.bson").open("wb") as dump,
    ):
        for batch in client["local"]["oplog.rs"].find_raw_batches({}):
            dump.write(batch)
    shutil.copytree(ROOT / "examples", directory / "examples")
    shutil.copy(ROOT / "examples" / "pipeline.yaml", directory)


@pytest.mark.mongod
@pytest.mark.parametrize("page", [page for page in pages() if snippets(page)], ids=name_of)
def test_what_the_page_prints_works(  # noqa: PLR0917  fixtures, given by their names
    page: Path,
    tmp_path: Path,
    shop: ReplicaSet,
    interpreter: Interpreter,
    programs: Path,
    uri_for: Callable[[str], str],
) -> None:
    """No test had run these snippets: an example with two settings that cannot be used together was printed for
    weeks."""
    fill(tmp_path, shop)
    secrets = {"KAFKA_PASSWORD": "k", "REDIS_PASSWORD": "r", "TAILRACE_CATALOG_TOKEN": "t"}
    environment = {"TAILRACE_URI": shop.uri, **secrets}
    runner = PageRunner(tmp_path, interpreter, programs, environment, uri_for)
    found = [snippet for snippet in snippets(page) if skipped(snippet) is None]
    runner.prepare(found)
    for snippet in found:
        runner.run(snippet)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_snippet_says_what_language_it_is(page: Path) -> None:
    assert [str(snippet) for snippet in snippets(page) if snippet.language not in LANGUAGES] == []
    assert indented_code(page) == [], "code in four spaces is seen by no test: fence it"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_commands_in_the_running_text_exist(page: Path) -> None:
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    for command in inline_commands(page):
        program, *words = shlex.split(command.replace("...", "x"))
        if program == "make":
            words = [word for word in words if word != "x"]
            assert {word for word in words if re.fullmatch(r"[a-z-]+", word)} <= {*targets, "help"}, command
        else:
            assert_flags_exist(command, words)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    return build_parser()  # which takes longer than all that is asked of it for a page


def assert_flags_exist(command: str, words: list[str]) -> None:
    """The command is one of ours and has these flags."""
    parser = _parser()
    for word in words:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            assert flag in parser._option_string_actions, f"{command}: no {flag}"
            continue
        choices = next((action.choices for action in parser._actions if hasattr(action.choices, "keys")), None)
        if choices is None:
            continue
        if word not in choices:
            assert not re.fullmatch(r"[a-z]+", word), f"{command}: no command {word}"
            break
        parser = choices[word]


def test_what_is_not_run_is_still_there() -> None:
    printed = [snippet for page in pages() for snippet in snippets(page)]
    stale = [entry for entry in NOT_RUN if not any(entry[0] == each.page and entry[1] in each.text for each in printed)]
    assert stale == []


def test_a_snippet_that_does_not_work_is_found(tmp_path: Path, interpreter: Interpreter, programs: Path) -> None:
    runner = PageRunner(tmp_path, interpreter, programs, dict(os.environ), lambda uri: uri)
    with pytest.raises(AssertionError, match="NameError"):
        runner.run(Snippet("x.md", 1, "python", "stream.statistic\n"))
    with pytest.raises(AssertionError, match="exit status 2"):
        runner.run(Snippet("x.md", 1, "console", "$ tailrace token decode --colour 82\n"))
    with pytest.raises(AssertionError, match="the page shows"):
        runner.run(Snippet("x.md", 1, "console", "$ echo one\ntwo\n"))
    with pytest.raises(AssertionError, match="is NULL in every one"):
        runner.run(Snippet("x.md", 1, "sql", "SELECT 1 AS a, NULL AS b;\n"))
