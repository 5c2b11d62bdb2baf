"""The recorded answers of the languages are those of running servers: of the one that the tests run on each time, of
the others when asked."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tailrace.embedded import ReplicaSet
from tests.golden.record_language import RECORDING, server_answers

pytestmark = pytest.mark.mongod


def recorded(version: str) -> object:
    answers = json.loads(RECORDING.read_text())["answers"]
    if version not in answers:
        pytest.skip(f"the answers of {version} are not recorded")
    return answers[version]


def test_a_running_server_gives_the_recorded_answers(start_replica_set: Callable[..., ReplicaSet]) -> None:
    """Not the shared one: where test commands are on, two stages are answered otherwise."""
    running = start_replica_set()
    assert server_answers(running.uri) == recorded(running.version)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.4.2", "5.0.4", "7.0.28"])
def test_other_versions_give_the_recorded_answers(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    assert server_answers(start_replica_set(version=version).uri) == recorded(version)
