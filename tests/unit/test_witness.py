"""A witness tells deployments and histories apart, and survives being kept as a document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness

AT = ClusterTime(7 << 32 | 3)
SET = DeploymentIdentity({"rs0": "aa"})


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (SET, SET, None),
        (SET, DeploymentIdentity({"rs0": "bb"}), "the id of the replica set rs0 was aa and is bb"),
        (SET, DeploymentIdentity({"rs0": ""}), None),
        (SET, DeploymentIdentity({"rs1": "aa"}), "the replica set was rs0 and is rs1"),
        (DeploymentIdentity({}, "c1"), DeploymentIdentity({}, "c1"), None),
        (DeploymentIdentity({}, "c1"), DeploymentIdentity({}, "c2"), "the cluster's id was c1 and is c2"),
        (DeploymentIdentity({}, "c1"), DeploymentIdentity({}, ""), None),
    ],
)
def test_what_tells_two_deployments_apart_is_named(
    before: DeploymentIdentity, now: DeploymentIdentity, said: str | None
) -> None:
    assert before.difference(now) == said


def test_a_mark_changes_with_the_bytes_of_its_entry() -> None:
    assert EntryMark.of(AT, b"one") == EntryMark.of(AT, b"one")
    assert EntryMark.of(AT, b"one") != EntryMark.of(AT, b"two")
    assert EntryMark.of(AT, b"one") != EntryMark.of(ClusterTime(AT + 1), b"one")


@pytest.mark.parametrize("identity", [SET, DeploymentIdentity({"s0": "aa", "s1": ""}, "c1")])
def test_a_witness_is_read_back_from_its_document(identity: DeploymentIdentity) -> None:
    witness = Witness(identity, {"rs0": EntryMark.of(AT, b"one")})
    assert Witness.from_document(json.loads(json.dumps(witness.to_document()))) == witness


@pytest.mark.parametrize("document", [{}, {"replicaSets": 3}, {"replicaSets": {}, "entries": {"a": {"ts": "x"}}}])
def test_what_is_no_witness_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no witness"):
        Witness.from_document(document)
