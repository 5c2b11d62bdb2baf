"""Gateways for the tests of this folder, and deployments for them: the server in use (6.0.27 in a plain run),
5.0.4 and 4.4.2 too with ``-m slow``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.embedded import Mongod, ReplicaSet, ShardedCluster, find_mongod
from tests.gateway.running import GatewayProcess, eventually
from tests.gateway.side_by_side import OLDER_ARE_SLOW, VERSIONS
from tests.server_in_use import major


@pytest.fixture(scope="session", params=OLDER_ARE_SLOW)
def server_version(request: pytest.FixtureRequest) -> str:
    """The version of the deployments below. A test that asks for one of them is run on each version."""
    return str(request.param)


@pytest.fixture(scope="session")
def older_replica_set(server_version: str) -> Iterator[ReplicaSet]:
    with ReplicaSet(1, version=server_version, enable_test_commands=True) as running:
        yield running


@pytest.fixture(scope="module")
def replica_set(server_version: str, request: pytest.FixtureRequest) -> Any:
    """The replica set that all modules share, or this folder's one of an older version."""
    return request.getfixturevalue("replica_set" if server_version == VERSIONS[0] else "older_replica_set")


@pytest.fixture(scope="module")
def sharded_cluster(server_version: str, request: pytest.FixtureRequest) -> Iterator[ShardedCluster]:
    """The cluster that all modules share, or this folder's one of an older version."""
    if server_version == VERSIONS[0]:
        yield request.getfixturevalue("sharded_cluster")
        return
    with ShardedCluster(3, version=server_version, enable_test_commands=True) as running:
        yield running


@pytest.fixture
def start_replica_set(server_version: str) -> Iterator[Callable[..., ReplicaSet]]:
    """``start_replica_set(members=3, ...)``: replica sets of a test's own, stopped at its end."""
    with ExitStack() as stack:

        def start(members: int = 1, **options: Any) -> ReplicaSet:
            return stack.enter_context(ReplicaSet(members, **{"version": server_version, **options}))

        yield start


@pytest.fixture(scope="module")
def gateway(replica_set: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One in front of the shared replica set, with fail points and statistics, for a module."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    with GatewayProcess(replica_set.uri, log, "--test-commands", "--metrics", "127.0.0.1:0") as running:
        yield running


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """``start_gateway(upstream, "--option", ...)``: gateways of a test's own, stopped at its end."""
    with ExitStack() as stack:

        def start(upstream: str, *arguments: str, listen: str = "127.0.0.1:0") -> GatewayProcess:
            number = len(list(tmp_path.glob("gateway-*.log")))
            return stack.enter_context(
                GatewayProcess(upstream, tmp_path / f"gateway-{number}.log", *arguments, listen=listen)
            )

        yield start


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem``, and ``server.pem`` for the loopback address, signed by it; ``other.pem`` is signed by somebody
    else."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes")
    for name in ("ca", "other"):
        run("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
    run("x509", "-req", "-in", "server.csr", "-out", "server.crt", *signing)
    (folder / "server.pem").write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())
    return folder


@pytest.fixture(scope="module")
def encrypted(certificates: Path, server_version: str) -> Iterator[str]:
    """The URI of a replica set of one member that accepts only TLS."""
    if major(server_version) == 7:
        pytest.skip("Wine has no certificate chains for a mongod that speaks TLS")
    arguments = ("--tlsMode", "requireTLS", "--tlsCertificateKeyFile", str(certificates / "server.pem"))
    arguments += ("--tlsCAFile", str(certificates / "ca.pem"), "--tlsAllowConnectionsWithoutCertificates")
    with Mongod(replica_set="encrypted", binary=find_mongod(server_version), arguments=arguments) as mongod:
        uri = f"mongodb://{mongod.host}/?tls=true&tlsCAFile={certificates / 'ca.pem'}"
        with pymongo.MongoClient[dict[str, Any]](uri, directConnection=True) as client:
            member = {"_id": 0, "host": mongod.host}
            client.admin.command("replSetInitiate", {"_id": "encrypted", "members": [member]})
            eventually(lambda: client.admin.command("hello")["isWritablePrimary"], "it did not become primary")
        yield uri
