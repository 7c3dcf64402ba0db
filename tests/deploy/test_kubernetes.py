"""The manifests, against the schemas of the API, and against what the broker needs."""

from pathlib import Path
from typing import Any

import pytest

from narrows.broker.cli.broker import run_broker
from narrows.proto.errors import ConfigError

kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

FILE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "broker.yaml"
VERSION = "1.37"


@pytest.fixture
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text()))


def test_the_schemas_of_the_api_accept_each_manifest(manifests: list[dict[str, Any]]) -> None:
    kinds = [manifest["kind"] for manifest in manifests]
    assert kinds == ["Service", "Service", "PodDisruptionBudget", "StatefulSet"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_misspelt_key_is_found(manifests: list[dict[str, Any]]) -> None:
    manifests[-1]["spec"]["replicaz"] = manifests[-1]["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError, match="replicaz"):
        kubernetes_validate.validate(manifests[-1], VERSION, strict=True)


def test_all_find_the_pods_and_their_ports(manifests: list[dict[str, Any]]) -> None:
    *services, budget, broker = manifests
    template = broker["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for service in services:
        assert service["spec"]["selector"] == template["metadata"]["labels"]
        assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == ports
    assert broker["spec"]["serviceName"] in [each["metadata"]["name"] for each in services]
    assert budget["spec"]["selector"] == broker["spec"]["selector"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    spec = broker["spec"]
    made = [each["metadata"]["name"] for each in spec["volumeClaimTemplates"]]
    assert mounted == {each["name"] for each in template["spec"]["volumes"]} | set(made)


def test_the_broker_knows_its_flags(manifests: list[dict[str, Any]], tmp_path: Path) -> None:
    (container,) = manifests[-1]["spec"]["template"]["spec"]["containers"]
    command, *flags = container["args"]
    assert command == "broker" and flags.pop() == "--resume"
    given = dict(flag.removeprefix("--").split("=") for flag in flags)
    assert given.pop("state-dir") == "/data/state"
    settings = {f"broker.{name}": value for name, value in given.items()}
    with pytest.raises(ConfigError, match="there is nothing to resume"):
        run_broker(None, settings | {"broker.state_dir": str(tmp_path)}, resume=True)
