"""Gateways for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tailrace.embedded import ReplicaSet
from tests.gateway.running import GatewayProcess


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
