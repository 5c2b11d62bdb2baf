"""The files of ``deploy/`` are what their tools take, and start the commands that they name.

Neither a container engine nor a cluster is used: only what can be checked without them is. systemd checks its unit
where it is installed.
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
from tests.docs.runner import _INSTRUCTIONS, verify_unit
from tests.docs.snippets import ROOT

DEPLOY = ROOT / "deploy"


def test_every_file_is_looked_at_and_named_on_the_page() -> None:
    pages = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("gateway", "operations", "console")]
    page = "".join(path.read_text() for path in pages)
    files = {str(path.relative_to(ROOT)) for path in DEPLOY.rglob("*") if path.is_file()}
    assert files == {
        "deploy/systemd/tailrace-gateway.service",
        *(f"deploy/systemd/tailrace-{command}.service" for command in ("listen", "archive", "tables", "run")),
        "deploy/container/Dockerfile",
        *(f"deploy/container/{name}.lock" for name in ("build", "gateway", "stores")),
        "deploy/kubernetes/gateway.yaml",
        "deploy/kubernetes/stores.yaml",
        "deploy/prometheus/tailrace-alerts.yaml",
        "deploy/grafana/tailrace.json",
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


def dockerfile() -> list[str]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "container" / "Dockerfile").read_text())
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def started(stage: str) -> list[str]:
    """What the image of this stage of the Dockerfile starts."""
    lines = dockerfile()
    (begin,) = [number for number, line in enumerate(lines) if line.endswith(f" AS {stage}")]
    found: dict[str, list[str]] = {}
    for line in lines[begin + 1 :]:
        name, _, rest = line.partition(" ")
        if name == "FROM":
            break
        if name in ("ENTRYPOINT", "CMD"):
            found[name] = yaml.safe_load(rest)
    return found["ENTRYPOINT"] + found["CMD"]


def test_the_containers_start_the_command_line() -> None:
    assert {line.split()[0] for line in dockerfile()} <= _INSTRUCTIONS
    program, *words = started("gateway")
    assert program == "tailrace"
    assert build_parser().parse_args(words).command == "gateway"
    assert started("stores") == ["tailrace", "--help"]
    assert dockerfile()[-2:] == [line for line in dockerfile() if "gateway" in line or line.startswith("CMD")][-2:]


def test_images_are_built_from_locks_and_have_no_sources() -> None:
    """All that is installed has a checksum; what runs is a copy of the environment; nothing runs as root."""
    lines = dockerfile()
    assert {line.split()[1] for line in lines if line.startswith("FROM")} == {"${PYTHON}", "base"}
    installs = [part.strip() for line in lines for part in line.split("&&") if "pip install" in part]
    wheels = [line for line in installs if "/wheels/*.whl" in line]
    assert len(installs) == 5
    assert all("--no-deps" in line for line in wheels)
    assert len(wheels) == 2
    assert all(
        "--only-binary :all: --require-hashes --requirement /locks/" in line for line in installs if line not in wheels
    )
    last = lines[max(number for number, line in enumerate(lines) if line.endswith(" AS base")) :]
    assert any(line.startswith("USER 10001") for line in last)
    assert {line for line in last if line.startswith("COPY")} == {
        f"COPY --from=installed-{name} /opt/tailrace /opt/tailrace" for name in ("gateway", "stores")
    }


def test_what_the_images_are_built_from_is_let_through() -> None:
    """``.dockerignore`` begins with everything."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name for line in dockerfile() if line.startswith("COPY") and "--from" not in line for name in line.split()[1:-1]
    }
    assert {f"deploy/container/{name}.lock" for name in ("build", "gateway", "stores")} < copied
    assert copied - {name for name in copied if name.endswith(".lock")} == allowed - {"deploy/container/*.lock"}
    assert all((ROOT / name).exists() for name in copied)


PIN = re.compile(r"(?m)^([\w.-]+)==(\S+)")


@pytest.mark.parametrize("name", ["build", "gateway", "stores"])
def test_images_have_the_versions_that_are_tested(name: str) -> None:
    tested = set(PIN.findall((ROOT / "requirements.lock").read_text()))
    pins = set(PIN.findall((DEPLOY / "container" / f"{name}.lock").read_text()))
    only_for_building = {pin for pin in pins if pin[0] in ("setuptools", "wheel", "packaging")}
    assert pins - only_for_building <= tested
    assert len(pins) > 5


@pytest.fixture
def manifests() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "gateway.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_manifests_belong_together(manifests: dict[str, Any]) -> None:
    service, deployment, secret = (manifests[kind] for kind in ("Service", "Deployment", "Secret"))
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["sessionAffinity"] == "ClientIP", "a cursor belongs to one gateway"
    (container,) = template["spec"]["containers"]
    arguments = build_parser().parse_args(["gateway", *container["args"]])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert arguments.listen.endswith(f":{ports['mongodb']}")
    assert arguments.metrics.endswith(f":{ports['metrics']}")
    assert arguments.advertise == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["ports"][0]["targetPort"] in ports
    (volume,) = template["spec"]["volumes"]
    (mount,) = container["volumeMounts"]
    assert mount["readOnly"], "a gateway writes nothing"
    keys = {f"{mount['mountPath']}/{item['path']}": item["key"] for item in volume["secret"]["items"]}
    assert keys[arguments.tls_certificate_key_file] in secret["stringData"]
    (named,) = re.findall(r"tlsCAFile=([^&]+)", secret["stringData"]["uri"])
    assert keys[named] in secret["stringData"]


def pods() -> dict[str, dict[str, Any]]:
    """The pods' templates of all manifests, with their volumes that are claimed, by the name of what makes them."""
    found = {}
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] in ("Deployment", "StatefulSet"):
                claims = document["spec"].get("volumeClaimTemplates", [])
                assert document["kind"] == "Deployment" or document["spec"]["replicas"] == 1, "one process a directory"
                found[document["metadata"]["name"]] = document["spec"]["template"]["spec"] | {"claims": claims}
    return found


@pytest.mark.parametrize("name", ["tailrace-gateway", "tailrace-archive", "tailrace-tables", "tailrace-listen"])
def test_every_pod_is_locked_down_and_looked_after(name: str) -> None:
    pod = pods()[name]
    assert sorted(pods()) == ["tailrace-archive", "tailrace-gateway", "tailrace-listen", "tailrace-tables"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
        assert container[probe]["httpGet"]["path"] in ("/livez", "/readyz")
    volumes = {one["name"] for one in pod.get("volumes", [])} | {one["metadata"]["name"] for one in pod["claims"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    command = [*(["gateway"] if name.endswith("gateway") else []), *container["args"]]
    arguments = build_parser().parse_args(command)
    assert f"tailrace-{arguments.command}" == name
    (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == "metrics"]
    assert arguments.metrics == f"0.0.0.0:{port}"
    claimed = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "data"]
    assert claimed == (["/data"] if pod["claims"] else [])
