"""The files of ``deploy/`` are what their tools take, and start the commands that they name.

No container engine and no cluster is asked: what can be looked at without one is. systemd looks at its unit where it is
installed.
"""

from __future__ import annotations

import re
import shlex
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.cli.main import build_parser
from tests.docs.runner import _INSTRUCTIONS, check_extras, verify_unit
from tests.docs.snippets import ROOT

DEPLOY = ROOT / "deploy"


def test_every_file_is_looked_at_and_named_on_the_page() -> None:
    page = "".join((ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in ("gateway", "operations"))
    files = {str(path.relative_to(ROOT)) for path in DEPLOY.rglob("*") if path.is_file()}
    assert files == {
        "deploy/systemd/tailrace-gateway.service",
        *(f"deploy/systemd/tailrace-{command}.service" for command in ("listen", "archive", "tables", "run")),
        "deploy/container/Dockerfile",
        "deploy/kubernetes/gateway.yaml",
    }
    assert [name for name in files if name not in page] == []


@pytest.mark.parametrize("command", ["gateway", "listen", "archive", "tables", "run"])
def test_the_unit_starts_the_command(tmp_path: Path, command: str) -> None:
    file = DEPLOY / "systemd" / f"tailrace-{command}.service"
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(file.read_text())
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program == "/opt/tailrace/bin/tailrace"
    assert build_parser().parse_args(arguments).command == command
    tells = command != "archive"
    assert unit["Service"]["Type"] == ("notify" if tells else "exec"), "whether it tells systemd that it has begun"
    copy = tmp_path / file.name
    copy.write_text(file.read_text())
    verify_unit(copy, program)


def test_the_container_starts_the_gateway() -> None:
    text = re.sub(r"\\\n", " ", (DEPLOY / "container" / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= _INSTRUCTIONS
    assert lines[0].startswith("FROM ")
    check_extras(text)
    started = {
        line.split()[0]: yaml.safe_load(line.split(maxsplit=1)[1]) for line in lines if line[:3] in ("ENT", "CMD")
    }
    program, *words = started["ENTRYPOINT"] + started["CMD"]
    assert program == "tailrace"
    assert build_parser().parse_args(words).command == "gateway"


@pytest.fixture
def manifests() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "gateway.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_manifests_belong_together(manifests: dict[str, Any]) -> None:
    assert {kind: one["apiVersion"] for kind, one in manifests.items()} == {
        "Secret": "v1",
        "Service": "v1",
        "Deployment": "apps/v1",
    }
    service, deployment, secret = (manifests[kind] for kind in ("Service", "Deployment", "Secret"))
    template = deployment["spec"]["template"]
    assert (
        service["spec"]["selector"] == template["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    )
    assert service["spec"]["sessionAffinity"] == "ClientIP", "a cursor belongs to one gateway"
    (container,) = template["spec"]["containers"]
    arguments = build_parser().parse_args(["gateway", *container["args"]])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert arguments.listen.endswith(f":{ports['mongodb']}")
    assert arguments.metrics.endswith(f":{ports['metrics']}")
    assert arguments.advertise == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["ports"][0]["targetPort"] in ports
    reference = container["env"][0]["valueFrom"]["secretKeyRef"]
    assert reference["name"] == secret["metadata"]["name"]
    assert reference["key"] in secret["stringData"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert "volumeMounts" not in container, "a gateway writes nothing"
